"""Products of codes of e4m3 on a CPU: the sums of groups, by kind, and what adds them up in numba.

Products of e4m3 are multiples of 2**-18 below 2**18, so that float64 holds each sum of a group of 128 exactly, in any
order: of :data:`.reduction.EXACT` no tile, library or number of threads moves a bit.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numba import prange

from ..common.native_kernels import kernel
from ..common.numba_math import fma
from ..common.numba_rows import RowKernel
from .cpu_tensor_core import Operand, wgmma_sums
from .reduction import EXACT, GROUP, WGMMA, ScaledLinearReduction

BLOCK_N = 2048
"""Rows of a weight that are widened at a time, a multiple of :data:`GROUP`: 2 MiB of fp64."""
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def _widen_kernel(codes, values, out):
    for row in prange(codes.shape[0]):
        x, y = codes[row], out[row]
        for i in range(x.size):
            y[i] = values[x[i]]


def _promote_kernel(sums, row_scale, column_scale, total):
    for row in prange(sums.shape[0]):
        x, y = sums[row], total[row]
        for i in range(x.size):
            y[i] = fma(row_scale[row] * column_scale[i], np.float32(x[i]), y[i])


_widen, _promote = RowKernel(_widen_kernel), RowKernel(_promote_kernel)


class Widened:
    """Codes of a group [rows, up to 128] as fp64."""

    def __init__(self, codes: torch.Tensor) -> None:
        self.values = torch.empty(codes.shape, dtype=torch.float64)
        _widen(codes.numel(), codes, _VALUES, self.values)


def exact_sums(x: Widened, weight: Widened) -> torch.Tensor:
    """Those of the products of a group: [M, N] fp64."""
    return kernel("mm", x.values)(x.values, weight.values.t())


SUMS: dict[str, tuple[type, Callable[..., torch.Tensor]]] = {
    EXACT: (Widened, exact_sums),
    WGMMA: (Operand, wgmma_sums),
}
"""By ``mma``, what codes of a group become, and the function of two of them that gives the sums [M, N] in fp64."""


def _groups(codes: torch.Tensor, size: int | None) -> Iterator[torch.Tensor]:
    """The bits of codes [rows, K] by groups of so many elements of K; none where K is 0."""
    return (part.contiguous() for part in codes.view(torch.uint8).split(size, 1) if part.numel())


def scaled_linear(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: ScaledLinearReduction,
) -> torch.Tensor:
    """See the operation's package; codes [M, K] and scales [M] or [M, groups]; an ``mma`` of :data:`SUMS`."""
    m, n = len(codes), len(weight)
    out = torch.empty(m, n, dtype=reduction.dtype)
    if out.numel() == 0:
        return out
    operand, sums = SUMS[reduction.mma or ""]
    rows = [operand(part) for part in _groups(codes, reduction.promote)]
    ones, of_rows = torch.ones(m), scale.t().contiguous()
    for block, columns in zip(weight.split(BLOCK_N), torch.arange(n).split(BLOCK_N), strict=True):
        total, of_columns = torch.zeros(m, len(block)), torch.ones(len(block))
        for group, part in enumerate(_groups(block, reduction.promote)):
            if reduction.in_blocks:
                ones, of_columns = of_rows[group], weight_scale[columns // GROUP, group]
            _promote(total.numel(), sums(rows[group], operand(part)), ones, of_columns, total)
        if not reduction.in_blocks:
            total.mul_(scale[:, None]).mul_(weight_scale[columns])
        if bias is not None:
            total += bias[columns].to(torch.float32)
        out[:, columns[0] : columns[-1] + 1] = total.to(reduction.dtype)
    return out
