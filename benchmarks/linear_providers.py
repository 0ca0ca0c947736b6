"""Who computes the linear operation in its benchmark."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module

import torch

from vllm_batch_invariant.errors import NotCovered


class Absent(Exception):
    """A provider that the installed packages do not have."""


@dataclass(frozen=True)
class Provider:
    """One way to multiply."""

    name: str
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """x [M, K], weight [N, K] to [M, N]."""
    promises_bits: bool = True
    """Whether a row's bits shall not depend on M."""
    prepare: Callable[[torch.Tensor, int], None] | None = None
    """Called once for a weight and the most rows that it will meet."""


def _stock() -> Provider:
    return Provider("stock", lambda x, weight: torch.mm(x, weight.t()), promises_bits=False)


def _ours() -> Provider:
    linear = import_module("vllm_batch_invariant.ops.linear")
    return Provider("ours", linear.linear, prepare=linear.prepare)


def _ours_triton() -> Provider:
    mm = import_module("vllm_batch_invariant.ops.linear.triton_gemm").mm
    return Provider("ours-triton", lambda x, weight: mm(x, weight.t()))


def _native() -> Provider:
    from vllm_batch_invariant.integration import patch_points

    try:
        return Provider("native", replace(patch_points.INIT_BATCH_INVARIANCE, attribute="linear_batch_invariant").get())
    except (ImportError, NotCovered) as error:
        raise Absent(f"vLLM's own batch-invariant linear: {error}") from error


_LOADERS: dict[str, Callable[[], Provider]] = {
    "stock": _stock,
    "ours": _ours,
    "ours-triton": _ours_triton,
    "native": _native,
}
NAMES = tuple(_LOADERS)


def load(name: str) -> Provider:
    """The provider of one of :data:`NAMES`.

    Raises:
        Absent: it is not part of what is installed.
    """
    return _LOADERS[name]()
