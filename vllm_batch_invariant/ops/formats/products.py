"""What formats share: products of codes and scales that are rounded once, and scales for certificates."""

from collections.abc import Iterator

import torch

_BLOCK = 1 << 21
"""Elements that are decoded at a time: what is in between takes a few times as much memory."""


def blocks(out: torch.Tensor, rows: int = 1) -> Iterator[slice]:
    """Rows of a matrix [N, K] to decode at a time, a multiple of ``rows``."""
    step = max(1, _BLOCK // (rows * max(1, out.shape[1]))) * rows
    return (slice(first, first + step) for first in range(0, len(out), step))


def write_product(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``codes * scales``, the exact product rounded once.

    Args:
        codes: numbers of at most 9 significant bits, of any dtype.
        scales: of any floating-point dtype; expands to the codes' shape.
        out: of the codes' shape, of any floating-point dtype.
    """
    wide = torch.promote_types(out.dtype, torch.float32)
    if out.dtype.itemsize == 2 and scales.dtype == torch.float32:
        out.copy_(rounded_to_odd(codes.double() * scales.double()))
    else:  # exact, but for fp32 and fp64 results, which this product rounds
        out.copy_(codes.to(wide) * scales.to(wide))


def rounded_to_odd(x: torch.Tensor) -> torch.Tensor:
    """fp64 numbers in fp32 such that rounding these to 16 bits is rounding x: those that are no fp32 number become
    that neighbour of theirs which has an odd last bit (Boldo and Melquiond, "When double rounding is odd", 2004).
    PyTorch's own conversion from fp64 to 16 bits rounds twice.
    """
    near = x.float()
    back = near.double()
    bits = near.view(torch.int32)
    bits = bits - (back.abs() > x.abs()).int()  # towards zero
    return torch.where(back != x, bits | 1, bits).view(torch.float32)


def alternate(rows: int, groups: int, device: torch.device) -> torch.Tensor:
    """What scales of a certificate are divided by, and codes multiplied: of every other row 1 and 2 in turn, so that a
    scale of another group shows, and equal elements stay equal; of the others 1. fp32 [rows, groups].
    """
    row, group = torch.arange(rows, device=device)[:, None], torch.arange(groups, device=device)
    return 1.0 + (row % 2) * ((group + row // 2) % 2)


def step(weight: torch.Tensor, largest: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """The scale of each row with which its largest element has the code ``largest``; 1 of a row of zeros. [N, 1]"""
    found = (weight.float().abs().amax(1, keepdim=True) / largest).to(dtype)
    return torch.where(found == 0, 1, found)
