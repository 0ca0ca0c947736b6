"""Sum and mean whose rows have the same bits however many rows there are."""

import torch

from ..dispatch import implementation
from .reduction import SumReduction

__all__ = ["SumReduction", "mean", "sum"]


def sum(
    x: torch.Tensor, dim: int | list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Sum over ``dim`` (one, several, or None for all), accumulated in fp32 (fp64 for fp64), rounded once to ``dtype``
    or x's own.

    Raises:
        NotCovered: a dtype that is not fp32, bf16, fp16 or fp64, or a device without an implementation.
    """
    return implementation("reduce", x).sum(x, dim, keepdim, dtype=dtype)


def mean(
    x: torch.Tensor, dim: int | list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Mean over ``dim``; arguments and errors as for :func:`sum`."""
    return implementation("reduce", x).mean(x, dim, keepdim, dtype=dtype)
