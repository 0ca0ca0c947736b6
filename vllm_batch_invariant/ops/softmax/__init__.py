"""softmax and log_softmax whose rows have the same bits however many rows there are."""

import torch

from ..dispatch import implementation
from .reduction import SoftmaxReduction

__all__ = ["SoftmaxReduction", "log_softmax", "log_softmax_at", "softmax"]

_ROWS_AT_ONCE = 64
"""Of which log_softmax is held in memory to look a few values up."""


def softmax(x: torch.Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """softmax over ``dim``, computed in fp32 and rounded once to ``dtype`` or x's own.

    A row of nothing but -inf is NaN, as in PyTorch.

    Raises:
        NotCovered: a dtype that is not fp32, bf16 or fp16, or a device without an implementation.
    """
    return implementation("softmax", x).softmax(x, dim, dtype=dtype)


def log_softmax(x: torch.Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """log_softmax over ``dim``; arguments and errors as for :func:`softmax`."""
    return implementation("softmax", x).log_softmax(x, dim, dtype=dtype)


def log_softmax_at(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Values of log_softmax in fp32 over the last dimension of x [rows, length] at indices [rows, n], integers.

    Returns:
        [rows, n] fp32, with the bits of log_softmax of the whole.
    """
    parts = [
        log_softmax(part, dtype=torch.float32).gather(-1, wanted.to(torch.int64))
        for part, wanted in zip(x.split(_ROWS_AT_ONCE), indices.split(_ROWS_AT_ONCE), strict=True)
    ]
    return torch.cat(parts)
