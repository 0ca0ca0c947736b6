"""softmax and log_softmax whose rows have the same bits however many rows there are."""

import torch

from ..devices import implementation
from .reduction import SoftmaxReduction

__all__ = ["SoftmaxReduction", "log_softmax", "softmax"]


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
