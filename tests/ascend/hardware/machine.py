"""Whether this machine has an Ascend NPU, and what to say about it in a report."""

import importlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

PACKAGES = ("torch", "torch-npu", "triton-ascend", "vllm", "vllm-ascend", "vllm-batch-invariant")


@cache
def absence() -> str | None:
    """Why no test can run on an NPU here, in one line; None where they can. Imports torch_npu only where it is
    installed.
    """
    if find_spec("torch_npu") is None:
        return "needs an Ascend NPU: torch_npu is not installed"
    import torch

    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        first, *_ = str(error).splitlines() or [type(error).__name__]
        return f"needs an Ascend NPU: torch_npu does not load, {first}"
    if not torch.npu.is_available():
        return "needs an Ascend NPU: torch_npu finds none, see npu-smi info"
    return None


def description() -> str:
    """The NPU and the versions of what runs on it."""
    import torch

    return ", ".join([torch.npu.get_device_name(), *(f"{name} {_installed(name)}" for name in PACKAGES)])


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
