"""Sums, means and variances on the CPU, in numba: the order of additions is in the source."""

from functools import partial

import numpy as np
import torch
from numba import prange

from ..common.numba_math import LANES, row_sum
from ..common.numba_rows import RowKernel
from ..common.rows import as_rows, from_rows, normalise_dims, row_length
from .reduction import TERMS, SumReduction


def _row_sums_kernel(rows, sums):
    for row in prange(rows.shape[0]):
        sums[row] = row_sum(rows[row], np.empty(LANES, rows.dtype))


def _row_sums_of_kernel(rows, term, sums):
    for row in prange(rows.shape[0]):
        x, terms = rows[row], np.empty(rows.shape[1], rows.dtype)
        if term == _SIZES:
            for i in range(x.size):
                terms[i] = abs(x[i])
        elif term == _SQUARES:
            for i in range(x.size):
                terms[i] = x[i] * x[i]
        else:
            for i in range(x.size):
                terms[i] = x[i] if x[i] == x[i] else 0
        sums[row] = row_sum(terms, np.empty(LANES, rows.dtype))


def _row_moments_kernel(rows, squares, means):
    for row in prange(rows.shape[0]):
        x, terms, lanes = rows[row], np.empty(rows.shape[1], rows.dtype), np.empty(LANES, rows.dtype)
        mean = row_sum(x, lanes) / rows.dtype.type(x.size)
        for i in range(x.size):
            terms[i] = (x[i] - mean) * (x[i] - mean)
        squares[row], means[row] = row_sum(terms, lanes), mean


_SIZES, _SQUARES = TERMS.index("sizes"), TERMS.index("squares")
_row_sums = RowKernel(_row_sums_kernel)
_row_sums_of = RowKernel(_row_sums_of_kernel)
_row_moments = RowKernel(_row_moments_kernel)


def _reduce(
    x: torch.Tensor,
    dim: int | list[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    divide: bool,
) -> torch.Tensor:
    """:func:`sum` and :func:`mean` of the operation's package."""
    dims = normalise_dims(dim, x.dim())
    reduction = SumReduction.of_device("cpu", row_length(x, dims), dtype or x.dtype)
    rows = as_rows(x.to(reduction.dtype), dims, reduction.accumulate)
    sums = rows.new_empty(rows.shape[0])
    _row_sums(rows.numel(), rows, sums)
    if divide:
        sums /= reduction.length
    return from_rows(sums, x, dims, keepdim).to(reduction.dtype)


sum, mean = partial(_reduce, divide=False), partial(_reduce, divide=True)


def _rows(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return as_rows(x, dims, SumReduction.of_device("cpu", row_length(x, dims), x.dtype).accumulate)


def sum_of(term: str, x: torch.Tensor, dim: int | list[int] | None, keepdim: bool = False) -> torch.Tensor:
    """See the operation's package."""
    dims = normalise_dims(dim, x.dim())
    rows = _rows(x, dims)
    sums = rows.new_empty(rows.shape[0])
    _row_sums_of(rows.numel(), rows, TERMS.index(term), sums)
    return from_rows(sums, x, dims, keepdim)


def moments(x: torch.Tensor, dim: int | list[int] | None, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    dims = normalise_dims(dim, x.dim())
    rows = _rows(x, dims)
    squares, means = rows.new_empty(2, rows.shape[0])
    _row_moments(rows.numel(), rows, squares, means)
    return from_rows(squares, x, dims, keepdim), from_rows(means, x, dims, keepdim)
