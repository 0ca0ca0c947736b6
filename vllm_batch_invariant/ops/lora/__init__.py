"""Adapters of low rank (LoRA; Hu et al., arxiv.org/abs/2106.09685), each row with one of its own or with none.

    y' = round(y + round(x A^T) B^T)

A factor of the product is a part of B. Weights with an adapter merged into them are another function: they are rounded.
"""

from collections.abc import Sequence

import torch

from ..dispatch import implementation
from .reduction import LoraReduction

__all__ = ["LoraReduction", "add_adapters", "add_expanded"]


def add_adapters(
    y: torch.Tensor,
    x: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    slots: torch.Tensor,
    reduction: LoraReduction,
) -> None:
    """Add to each row of y what its adapter makes of its row of x, as :class:`LoraReduction` says.

    Args:
        y: [M, N] of the reduction's dtype, what the base layer gives; changed in place. Rows may be any stride apart.
        x: [M, K] of the same dtype, the layer's input. Rows may be any stride apart.
        a: of each slice of the columns of y one tensor [slots, 1, R, K], of the same dtype, packed.
        b: of each slice [slots, 1, N_i, R], packed; N is the sum of N_i. Of an adapter of a lower rank than R the rows
            of A and the columns of B behind it are zeros.
        slots: [M] int64 or int32, where each row's adapter is; -1 for none: that row of y is not written.
        reduction: of the layer.

    A row's bits depend on that row and its adapter: not on other rows, their adapters, the number of slots, the slot
    or R.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotCovered: a device without an implementation.
    """
    rows, columns = y.shape
    fits = (
        x.shape == (rows, reduction.k)
        and slots.shape == (rows,)
        and slots.dtype in (torch.int64, torch.int32)
        and 0 < len(a) == len(b)
        and sum(one.shape[2] for one in b if one.dim() == 4) == columns
        and all(_is_adapter(*pair, reduction.k) and len(pair[0]) == len(a[0]) for pair in zip(a, b, strict=True))
        and {one.dtype for one in (y, x, *a, *b)} == {reduction.dtype}
        and (y.stride(1) == 1 or columns == 1)
        and (x.stride(1) == 1 or reduction.k == 1)
    )
    if not fits:
        given = ", ".join(f"{list(one.shape)} {one.dtype}" for one in (y, x, *a, *b, slots))
        raise ValueError(f"no adapters of {given} with {reduction}")
    implementation("lora", y, x, *a, *b, slots).add_adapters(y, x, a, b, slots, reduction)


def add_expanded(
    y: torch.Tensor, u: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, reduction: LoraReduction
) -> None:
    """The same from u on, as of an embedding, whose u is a row of A: ``y' = round(y + u B^T)``.

    Args:
        y: as of :func:`add_adapters`.
        u: [M, R] of the reduction's dtype, packed.
        b: [slots, 1, N, R] of the same dtype, packed.
        slots: as of :func:`add_adapters`.
        reduction: of the layer; its K and leaves decide nothing here.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotCovered: a device without an implementation.
    """
    rows, columns = y.shape
    fits = (
        b.dim() == 4
        and b.shape[1:] == (1, columns, *u.shape[1:])
        and u.shape[0] == rows
        and slots.shape == (rows,)
        and slots.dtype in (torch.int64, torch.int32)
        and {y.dtype, u.dtype, b.dtype} == {reduction.dtype}
        and (y.stride(1) == 1 or columns == 1)
        and u.is_contiguous()
        and b.is_contiguous()
    )
    if not fits:
        given = ", ".join(f"{list(one.shape)} {one.dtype}" for one in (y, u, b, slots))
        raise ValueError(f"no expanded adapters of {given} with {reduction}")
    implementation("lora", y, u, b, slots).add_expanded(y, u, b, slots, reduction)


def _is_adapter(a: torch.Tensor, b: torch.Tensor, k: int) -> bool:
    """Whether a [slots, 1, R, K] and b [slots, 1, N, R] are two packed tensors of one slice."""
    of_one_rank = a.dim() == b.dim() == 4 and a.shape == (len(b), 1, b.shape[3], k) and b.shape[1] == 1
    return of_one_rank and a.is_contiguous() and b.is_contiguous()
