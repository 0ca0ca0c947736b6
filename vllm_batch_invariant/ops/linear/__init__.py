"""Matrix products whose rows have the same bits however many rows there are.

Inside ``batch_invariant_mode()`` PyTorch's own spellings (``@``, ``F.linear``, ``torch.mm``, ...) come here, with
autograd.
"""

import torch

from ..devices import implementation
from .reduction import LinearReduction

__all__ = ["LinearReduction", "bmm", "linear", "mm"]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``, rounded once.

    Args:
        x: [..., K] fp32, bf16, fp16 or fp64, any strides.
        weight: [N, K] of the same dtype, any strides.
        bias: [N], or None.

    Returns:
        [..., N] of x's dtype. A row's bits depend on that row, the weight and the bias.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotCovered: a dtype or device without an implementation.
    """
    if (
        weight.dim() != 2
        or x.dim() == 0
        or x.shape[-1] != weight.shape[1]
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        shapes = [list(tensor.shape) for tensor in (x, weight, bias) if tensor is not None]
        raise ValueError(f"linear takes x [..., K], weight [N, K] and bias [N], got {shapes}")
    rows = mm(x.reshape(x.shape[:-1].numel(), x.shape[-1]), weight.t(), bias)
    return rows.reshape(*x.shape[:-1], weight.shape[0])


def mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``a @ b + bias``. a: [M, K], b: [K, N], bias: [N] or None; returns [M, N]. Errors as in :func:`linear`."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"mm takes [M, K] and [K, N], got {list(a.shape)} and {list(b.shape)}")
    _same_dtype(a, b)
    return implementation("linear", a, b, bias).mm(a, b, bias)


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` for each batch entry. a: [B, M, K], b: [B, K, N]; returns [B, M, N]. Errors as in :func:`linear`."""
    if a.dim() != 3 or b.dim() != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise ValueError(f"bmm takes [B, M, K] and [B, K, N], got {list(a.shape)} and {list(b.shape)}")
    _same_dtype(a, b)
    return implementation("linear", a, b).bmm(a, b)


def _same_dtype(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dtype != b.dtype:
        raise ValueError(f"a product needs operands of one dtype, got {a.dtype} and {b.dtype}")
