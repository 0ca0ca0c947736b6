"""Products of codes of e4m3 on a CPU: the sums of groups, by kind, and what adds them up in numba.

Products of e4m3 are multiples of 2**-18 below 2**18, so that float64 holds each sum of a group of 128 exactly, in any
order: of :data:`.reduction.EXACT` no tile, library or number of threads moves a bit. So few rows are multiplied by a
kernel that reads a weight's codes, in integers; for more rows codes are widened for the BLAS, at every call: as fp64
they would take eight times the memory of what is loaded.
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
FEW_ROWS = 8
"""That are multiplied as integers: of 4096 x 4096 codes in blocks one row took 10 ms so and 22 ms by the BLAS, 8 rows
21 and 27, 16 rows 37 and 33 (CPU time of one thread of an EPYC that others used, November 2026).
"""
_GROUP = np.int64(GROUP)
_NAN = np.uint8(0x7F)
"""The code of NaN, but for its sign."""
_STEP = np.float64(2.0**-18)
"""Of products of codes as integers."""
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
_INTEGERS = (_VALUES * 2**9).nan_to_num().int()


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


def _few_rows_kernel(x, x_nans, weight, stride, table, row_scale, column_scale, total):
    rows, k = x.shape
    for column in prange(total.shape[1]):
        integers, largest = np.empty(_GROUP, np.int32), np.uint8(0)
        for group in range(row_scale.shape[0]):
            first = group * _GROUP
            size = min(_GROUP, k - first)
            w = weight[column * stride + first : column * stride + first + size]
            for i in range(size):
                integers[i] = table[w[i]]
                largest = max(largest, np.uint8(w[i] & _NAN))
            of_column = column_scale[column // _GROUP, group]
            for row in range(rows):
                a, exact = x[row, first : first + size], np.int64(0)
                for i in range(size):
                    exact += np.int64(a[i]) * np.int64(integers[i])
                of_group = np.float32(np.float64(exact) * _STEP)
                total[row, column] = fma(row_scale[group, row] * of_column, of_group, total[row, column])
        for row in range(rows):
            if largest == _NAN or x_nans[row]:
                total[row, column] = np.nan


_widen, _promote, _few_rows = (RowKernel(one) for one in (_widen_kernel, _promote_kernel, _few_rows_kernel))


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
"""By ``mma``, what codes of a group become, and the function of two of them that gives the sums [M, N], exactly."""


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
    if reduction.mma == EXACT and m <= FEW_ROWS and codes.numel() and weight.stride(1) == 1:
        total = _by_integers(codes, scale, weight, weight_scale, reduction)
        return _finished(total, scale, weight_scale, bias, reduction)
    operand, sums = SUMS[reduction.mma or ""]
    rows = [operand(part) for part in _groups(codes, reduction.promote)]
    ones, of_rows = torch.ones(m), scale.t().contiguous()
    for block, columns in zip(weight.split(BLOCK_N), torch.arange(n).split(BLOCK_N), strict=True):
        total, of_columns = torch.zeros(m, len(block)), torch.ones(len(block))
        for group, part in enumerate(_groups(block, reduction.promote)):
            if reduction.in_blocks:
                ones, of_columns = of_rows[group], weight_scale[columns // GROUP, group]
            _promote(total.numel(), sums(rows[group], operand(part)), ones, of_columns, total)
        of_part = None if bias is None else bias[columns]
        made = _finished(
            total, scale, weight_scale if reduction.in_blocks else weight_scale[columns], of_part, reduction
        )
        out[:, columns[0] : columns[-1] + 1] = made
    return out


def _by_integers(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    reduction: ScaledLinearReduction,
) -> torch.Tensor:
    """The sums of all groups of few rows: [M, N] fp32. Rows of the weight are packed."""
    (m, k), n, groups = codes.shape, len(weight), -(-codes.shape[1] // GROUP)
    bits = codes.view(torch.uint8)
    integers, nans = _INTEGERS[bits.long()], (bits & int(_NAN) == int(_NAN)).any(1)
    of_rows, of_columns = torch.ones(groups, m), torch.ones(-(-n // GROUP), groups)
    if reduction.in_blocks:
        of_rows, of_columns = scale.t().contiguous(), weight_scale.contiguous()
    stride = weight.stride(0) if n > 1 else k
    flat = weight.view(torch.uint8).as_strided(((n - 1) * stride + k,), (1,))  # one layout for parts of weights, too
    total = torch.zeros(m, n)
    _few_rows(m * n * k, integers, nans, flat, stride, _INTEGERS, of_rows, of_columns, total)
    return total


def _finished(
    total: torch.Tensor,
    scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: ScaledLinearReduction,
) -> torch.Tensor:
    if not reduction.in_blocks:
        total.mul_(scale[:, None]).mul_(weight_scale)
    if bias is not None:
        total += bias.to(torch.float32)
    return total.to(reduction.dtype)
