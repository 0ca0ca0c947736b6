"""What a measurement on a GPU is true for, so that what is kept of it serves no other GPU, driver or version."""

import hashlib
import json
import os
from pathlib import Path

import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars

from ... import kept_file, sources
from ...version import __version__

_TELLS_COMPILER = ("TRITON_", "PTXAS_", "DISABLE_PTXAS_", "DISABLE_LLVM_", "DISABLE_MMA_", "LLVM_", "MLIR_")
"""How variables begin by which Triton, LLVM and ptxas are told what to compile, or to be others."""
_TELLS_WHERE = frozenset(
    {"TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_CACHE_AUTOTUNING", "TRITON_PRINT_AUTOTUNING"}
)
"""Those of them that only say where something is kept, or printed."""


def gpu_environment(device: int, *code: str) -> dict[str, str]:
    """The GPU, the driver, the libraries, and the code that was measured.

    Args:
        device: index of the GPU.
        code: the modules that decide what is measured, as :func:`~vllm_batch_invariant.sources.digest` takes them.
    """
    found = torch.cuda.get_device_properties(device)
    driver = Path("/sys/module/nvidia/version")
    return {
        "gpu": f"{found.name}, {found.major}.{found.minor}, {found.multi_processor_count} multiprocessors",
        "driver": driver.read_text().strip() if driver.exists() else str(torch._C._cuda_getDriverVersion()),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "compiler": compiler(),
        "vllm-batch-invariant": f"{__version__}, {sources.digest(*code)[:12]}",
    }


def compiler() -> str:
    """What the user tells Triton's compiler by environment variables: names with values, and with the digest of what
    they name if that is a file. Triton brings its own ptxas and libraries, which its version tells.
    """
    names = {name for name in os.environ if name.startswith(_TELLS_COMPILER)} - _TELLS_WHERE
    told = get_cache_invalidating_env_vars() | {name: os.environ[name] for name in names if os.environ[name]}
    return ", ".join(f"{name}={value}{_content(value)}" for name, value in sorted(told.items())) or "as Triton has it"


def _content(value: str) -> str:
    try:
        return f" ({hashlib.sha256(Path(value).read_bytes()).hexdigest()[:12]})"
    except (OSError, ValueError):  # no file
        return ""


def kept_path(kind: str, environment: dict[str, str]) -> Path | None:
    """Where measurements of a kind are kept that are true for an environment."""
    name = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:16]
    return kept_file.path_of(f"{kind}-{name}.json")
