"""Weights of 16 or 32 bits as codes of FP8 (e4m3), by one formula for engines, for trainers and for who sends weights
from one to the other: that of activations (:class:`.QuantiseReduction`)::

    scale = m / 448,  code = round(w / scale)

m is the largest magnitude of what has one scale, whose scale is NaN where not all is finite. These are operations of
IEEE 754 in fp32: the same bits on every device, and in a part of a weight that cuts nothing that has one scale.
"""

from collections.abc import Callable, Sequence

import torch

from .reduction import E4M3, QuantiseReduction

SIDE = 128
"""Of a block."""
_REDUCTION = QuantiseReduction.of_dtype(torch.float32, E4M3)
_ROWS = 2048
"""Of a weight that are widened to fp32 at a time; whole blocks."""


def quantise_weight(
    weight: torch.Tensor,
    shared: str,
    widths: Sequence[int] | None = None,
    over_workers: Callable[[torch.Tensor], torch.Tensor] = lambda largest: largest,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as codes [N, K] float8_e4m3fn and scales in fp32.

    Args:
        weight: [N, K] fp32, bf16 or fp16.
        shared: what has one scale: "tensor", "channel" (a row) or "block" (of 128 x 128).
        widths: rows of each of the matrices that the weight is merged of; None: it is one. With "tensor" each has its
            own scale.
        over_workers: makes the largest magnitudes of a whole matrix of those of a part of its rows or columns.

    Returns:
        The codes, and the scales: [matrices], [N, 1], or [ceil(N / 128), ceil(K / 128)].
    """
    n, k = weight.shape
    side = SIDE if shared == "block" else 1
    width = SIDE if shared == "block" else k
    largest = torch.empty(-(-n // side), -(-k // width), dtype=torch.float32, device=weight.device)
    for start in range(0, n, _ROWS):
        part = _in_blocks(weight[start : start + _ROWS], side, width)
        largest[start // side : start // side + len(part)] = part.abs().amax((1, 3))
    if shared == "tensor":
        largest = torch.stack([of_matrix.amax() for of_matrix in largest.split(list(widths or (n,)))])
    largest = over_workers(largest)
    most = torch.tensor(_REDUCTION.largest, device=weight.device)  # a number of Python's would be inverted on a GPU
    scale = torch.where(largest < _REDUCTION.least, _REDUCTION.scale_of_zeros, largest / most)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    if shared == "tensor":
        counts = torch.tensor(list(widths or (n,)), device=weight.device)
        by_rows = scale.repeat_interleave(counts)[:, None]
    else:
        by_rows = scale
    codes = torch.empty(n, k, dtype=E4M3, device=weight.device)
    for start in range(0, n, _ROWS):
        rows = weight[start : start + _ROWS]
        part = _in_blocks(rows, side, width)
        of_part = by_rows[start // side : start // side + len(part), None, :, None]
        found = (part / of_part).clamp(-_REDUCTION.largest, _REDUCTION.largest).to(E4M3)
        codes[start : start + _ROWS] = found.reshape(-1, found.shape[2] * found.shape[3])[: len(rows), :k]
    return codes, scale


def _in_blocks(rows: torch.Tensor, side: int, width: int) -> torch.Tensor:
    """Rows [M, K] in fp32 as [blocks of rows, side, blocks of columns, width]; zeros fill up the last ones."""
    m, k = rows.shape
    whole = rows.new_zeros(-(-m // side) * side, -(-k // width) * width, dtype=torch.float32)
    whole[:m, :k] = rows
    return whole.view(-1, side, whole.shape[1] // width, width)
