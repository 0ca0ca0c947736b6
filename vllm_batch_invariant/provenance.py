"""What the bits of a completion depend on beside the model and the request: read in the process that computes them."""

import hashlib
import re
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from . import __version__
from .ops.linear import LinearReduction
from .ops.norm import NormReduction
from .ops.softmax import SoftmaxReduction
from .ops.top_k_top_p import TopKTopPReduction

if TYPE_CHECKING:
    from .ops.attention import AttentionReduction

_DECIDING = ("ops/**/*.py", "integration/**/*.py", "aten/**/*.py")
"""This project's sources that can move a bit."""


@dataclass(frozen=True)
class Environment:
    """What the engine says of itself, as far as bits depend on it (docs/contract.md). Empty where it says nothing."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    mode: bool | None = None
    """Whether batch-invariant mode is on; None if nobody knows."""
    versions: dict[str, str] = field(default_factory=dict)
    device: dict[str, str | int] = field(default_factory=dict)
    engine: dict[str, str] = field(default_factory=dict)
    reductions: dict[str, dict[str, str | int]] = field(default_factory=dict)

    @property
    def is_silent(self) -> bool:
        """Whether the engine said nothing; the version of a server's vLLM is known even so."""
        return self.mode is None


def environment_here(
    device_type: str,
    *,
    hidden: int,
    vocabulary: int,
    dtype: torch.dtype,
    attention: "AttentionReduction",
    attention_by: str,
    engine: dict[str, str],
) -> Environment:
    """What this process is, with the mode on.

    Args:
        device_type: "cpu" or "cuda".
        hidden: row length of the norms, and K of the output head.
        vocabulary: row length of the softmax, and N of the output head.
        dtype: of weights and activations.
        attention: the reduction in force.
        attention_by: its implementation: bits of two are not comparable.
        engine: settings of vLLM's that decide bits.
    """
    return Environment(
        mode=True,
        versions=versions(device_type),
        device=device(device_type),
        engine=engine,
        reductions={
            "attention": {"implementation": attention_by} | _plain(attention),
            "linear (output head)": _plain(LinearReduction.of_device(device_type, vocabulary, hidden, dtype)),
            "norm": _plain(NormReduction.of_device(device_type, hidden, dtype)),
            "softmax (logprobs)": _plain(SoftmaxReduction.of_device(device_type, vocabulary, torch.float32)),
            "top-p": _plain(TopKTopPReduction.of_device(device_type)),
        },
    )


def versions(device_type: str | None = None) -> dict[str, str]:
    """Of everything between a model and its bits: vLLM, PyTorch and its BLAS or CUDA, the kernels' compilers, and this
    project with the first digits of the sha256 of its sources.
    """
    import vllm

    found = {
        "vllm": vllm.__version__,
        "torch": str(torch.__version__),
        "triton": _installed("triton"),
        "vllm-batch-invariant": f"{__version__} ({_sources()})",
    }
    if device_type == "cpu":
        blas = re.search(r"Math Kernel Library Version (\S+)", torch.__config__.show())
        found |= {"numba": _installed("numba"), "blas": f"MKL {blas[1]}" if blas else "of this PyTorch"}
    if device_type == "cuda":
        found["cuda"] = str(torch.version.cuda)
    return found


def device(device_type: str) -> dict[str, str | int]:
    """The kind of CPU with its number of threads, or the kind of GPU."""
    if device_type == "cpu":
        return {
            "type": "cpu",
            "name": _cpu_name(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        }
    major, minor = torch.cuda.get_device_capability()
    return {"type": device_type, "name": torch.cuda.get_device_name(), "capability": f"{major}.{minor}"}


def _cpu_name() -> str:
    wanted = ("model name", "cpu family", "model", "stepping")
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name, *numbers = (found.get(field) for field in wanted)
    if name is None:
        import platform

        return platform.processor() or platform.machine()
    return f"{name}, family {numbers[0]} model {numbers[1]} stepping {numbers[2]}"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


@cache
def _sources() -> str:
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _DECIDING for path in root.glob(pattern)):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _plain(reduction: Any) -> dict[str, str | int]:
    """A reduction's fields, without those that the device has no use for, and the dtype it adds in."""
    values = {field.name: getattr(reduction, field.name) for field in fields(reduction)}
    values |= {"accumulate": reduction.accumulate} if hasattr(reduction, "accumulate") else {}
    return {name: _plain_value(value) for name, value in values.items() if value is not None}


def _plain_value(value: Any) -> str | int:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number else str(value).removeprefix("torch.")
