"""Rows as codes on a CPU, in numba: only operations of IEEE 754, vectorised or not."""

import numpy as np
import torch
from numba import prange

from ..common.numba_rows import RowKernel
from .reduction import QuantiseReduction


def _quantise_kernel(rows, codes, scale, static, largest, smallest_static, least):
    largest, smallest, least = np.float32(largest), np.float32(smallest_static), np.float32(least)
    is_static = static.size > 0
    for row in prange(rows.shape[0]):
        x, y = rows[row], codes[row]
        top, strange = np.float32(0.0), 0
        for i in range(x.size):
            magnitude = abs(x[i])
            top = max(top, magnitude)
            strange += not magnitude < np.float32(np.inf)
        if strange:
            scale[row] = np.float32(np.nan)
            y[:] = 0
        elif is_static:
            step = static[0]
            scale[row] = step
            for i in range(x.size):
                y[i] = np.int8(np.rint(min(max(x[i] / step, smallest), largest)))
        elif top < least:
            scale[row] = np.float32(0.0)
            y[:] = 0
        else:
            scale[row], inverse = top / largest, largest / top
            for i in range(x.size):
                y[i] = np.int8(np.rint(x[i] * inverse))


_quantise = RowKernel(_quantise_kernel)


def quantise(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    reduction = QuantiseReduction.of_dtype(x.dtype)
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).float().contiguous()
    codes = torch.empty(rows.shape, dtype=reduction.codes)
    scales = torch.empty(len(rows), dtype=torch.float32)
    given = torch.empty(0, dtype=torch.float32) if scale is None else scale.reshape(1)
    numbers = (reduction.largest, reduction.smallest_static, reduction.least)
    _quantise(rows.numel(), rows, codes, scales, given, *numbers)
    return codes.view(x.shape), scales.view(x.shape[:-1])
