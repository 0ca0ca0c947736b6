"""What a measurement on a GPU is true for, so that what is kept of it serves no other GPU, driver or version."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import torch
import triton

from ... import kept_file
from ...version import __version__


def gpu_environment(device: int, sources: Iterable[Path]) -> dict[str, str]:
    """The GPU, the driver, the libraries, and the code that was measured.

    Args:
        device: index of the GPU.
        sources: files whose content decides what is measured.
    """
    found = torch.cuda.get_device_properties(device)
    driver = Path("/sys/module/nvidia/version")
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    return {
        "gpu": f"{found.name}, {found.major}.{found.minor}, {found.multi_processor_count} multiprocessors",
        "driver": driver.read_text().strip() if driver.exists() else str(torch._C._cuda_getDriverVersion()),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm-batch-invariant": f"{__version__}, {code.hexdigest()[:12]}",
    }


def kept_path(kind: str, environment: dict[str, str]) -> Path | None:
    """Where measurements of a kind are kept that are true for an environment."""
    name = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:16]
    return kept_file.path_of(f"{kind}-{name}.json")
