"""Sums, means and variances whose rows have the same bits however many rows there are."""

import torch

from ..dispatch import implementation
from .reduction import SumReduction

__all__ = ["SumReduction", "mean", "moments", "sum", "sum_of"]


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


def sum_of(term: str, x: torch.Tensor, dim: int | list[int] | None = None, keepdim: bool = False) -> torch.Tensor:
    """Sum over ``dim`` of a term of each element: its absolute value ("sizes"), its square ("squares"), or itself with
    0 in the place of NaN ("numbers"). Added as by :func:`sum`, and not rounded again.

    Args:
        x: fp32 or fp64.

    Raises:
        NotCovered: another dtype, or a device without an implementation.
    """
    return implementation("reduce", x).sum_of(term, x, dim, keepdim)


def moments(
    x: torch.Tensor, dim: int | list[int] | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the squared distances from the mean over ``dim``, and the mean: the mean is taken first, so there are
    two sums, each added as by :func:`sum`. Arguments and errors as for :func:`sum_of`.
    """
    return implementation("reduce", x).moments(x, dim, keepdim)
