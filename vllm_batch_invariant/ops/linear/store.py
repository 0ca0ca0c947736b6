"""Keeps on disk what was measured about this machine's products, so that the next start need not measure it again."""

import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from filelock import FileLock

from ... import __version__

_SOURCES = (
    "../gluon_names.py",
    "cancelling.py",
    "certificate.py",
    "cublaslt.py",
    "kernels.py",
    "narrow_kernel.py",
    "schedule.py",
    "signature.py",
    "triton.py",
)


def folder() -> Path:
    """Where the files are: ``$XDG_CACHE_HOME/vllm-batch-invariant``, by default under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-batch-invariant"


@cache
def environment(device: int, library: str) -> dict[str, str]:
    """Everything that a measurement is true for: another GPU, driver, library or version of this code has its own.

    Args:
        device: index of the GPU.
        library: version of cuBLASLt, or why there is none.
    """
    found = torch.cuda.get_device_properties(device)
    driver = Path("/sys/module/nvidia/version")
    code = hashlib.sha256(b"".join(Path(__file__).parent.joinpath(name).read_bytes() for name in _SOURCES))
    return {
        "gpu": f"{found.name}, {found.major}.{found.minor}, {found.multi_processor_count} multiprocessors",
        "driver": driver.read_text().strip() if driver.exists() else str(torch._C._cuda_getDriverVersion()),
        "cublaslt": library,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm-batch-invariant": f"{__version__}, {code.hexdigest()[:12]}",
    }


def _path(of: dict[str, str]) -> Path:
    return folder() / f"linear-{hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]}.json"


def load(of: dict[str, str]) -> dict[str, dict[str, Any]]:
    """What is known of an environment: signature to rows to entry. Empty for an unknown one or an unreadable file."""
    try:
        stored = json.loads(_path(of).read_text())
        return stored["products"] if stored["environment"] == of else {}
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):  # none, or not written by this
        return {}


def save(of: dict[str, str], products: dict[str, dict[str, Any]]) -> None:
    """Add to what is known of an environment. A folder that cannot be written is left alone: the next start measures
    again.
    """
    try:
        folder().mkdir(parents=True, exist_ok=True)
        path = _path(of)
        with FileLock(f"{path}.lock"):
            known = load(of)
            for name, entries in products.items():
                known.setdefault(name, {}).update(entries)
            written = path.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps({"environment": of, "products": known}, indent=1))
            written.replace(path)
    except (OSError, RuntimeError, NotImplementedError):
        return
