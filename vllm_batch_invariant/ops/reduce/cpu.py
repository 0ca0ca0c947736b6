"""Sum and mean on the CPU, in numba: the order of additions is in the source."""

import numpy as np
import torch
from numba import prange

from ..common.numba_math import LANES, row_sum
from ..common.numba_rows import RowKernel
from ..common.rows import as_rows, from_rows, normalise_dims, row_length
from .reduction import SumReduction


def _row_sums_kernel(rows, sums):
    for row in prange(rows.shape[0]):
        sums[row] = row_sum(rows[row], np.empty(LANES, rows.dtype))


_row_sums = RowKernel(_row_sums_kernel)


def _reduce(
    x: torch.Tensor, dim: int | list[int] | None, keepdim: bool, dtype: torch.dtype | None, divide: bool
) -> torch.Tensor:
    dims = normalise_dims(dim, x.dim())
    reduction = SumReduction.of_device("cpu", row_length(x, dims), dtype or x.dtype)
    rows = as_rows(x.to(reduction.dtype), dims, reduction.accumulate)
    sums = rows.new_empty(rows.shape[0])
    _row_sums(rows.numel(), rows, sums)
    if divide:
        sums /= reduction.length
    return from_rows(sums, x, dims, keepdim).to(reduction.dtype)


def sum(
    x: torch.Tensor, dim: int | list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See the operation's package."""
    return _reduce(x, dim, keepdim, dtype, divide=False)


def mean(
    x: torch.Tensor, dim: int | list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See the operation's package."""
    return _reduce(x, dim, keepdim, dtype, divide=True)
