"""Rows as codes on a CPU, in numba: only operations of IEEE 754, vectorised or not."""

import numpy as np
import torch
from numba import prange

from ..common.numba_exact_math import bits_of_float
from ..common.numba_rows import RowKernel, compiled
from .reduction import E4M3, QuantiseReduction

_LEAST_NORMAL = np.float32(2.0**-6)
_STEP_BELOW = np.float32(2.0**9)
"""Codes of e4m3 to 1 where they are subnormal."""
_DROPPED = np.int32(20)
"""Of the 23 bits of fp32's fraction."""
_HALF_LESS_ONE = np.int32((1 << 19) - 1)
_BIAS = np.int32((127 - 7) << 3)
_SIGN_SHIFT, _SIGN = np.int32(24), np.int32(0x80)


def _e4m3_code(x):
    """The bits of the code nearest to an fp32 x of at most 448, of two the even one."""
    bits, magnitude = bits_of_float(x), abs(x)
    normal = ((bits & np.int32(0x7FFFFFFF)) + _HALF_LESS_ONE + (bits >> _DROPPED & np.int32(1)) >> _DROPPED) - _BIAS
    subnormal = np.int32(np.rint(magnitude * _STEP_BELOW))
    return (subnormal if magnitude < _LEAST_NORMAL else normal) | (bits >> _SIGN_SHIFT & _SIGN)


_code_of_e4m3 = compiled(_e4m3_code)


def _quantise_kernel(rows, codes, scales, static, largest, smallest_static, least, group, divides, zeros, is_e4m3):
    largest, least, zeros = np.float32(largest), np.float32(least), np.float32(zeros)
    smallest = np.float32(smallest_static) if static.size else -largest
    for row in prange(rows.shape[0]):
        for part in range(scales.shape[1]):
            x, y = rows[row, part * group : (part + 1) * group], codes[row, part * group : (part + 1) * group]
            top, strange = np.float32(0.0), 0
            for i in range(x.size):
                magnitude = abs(x[i])
                top = max(top, magnitude)
                strange += not magnitude < np.float32(np.inf)
            divided = divides or static.size > 0
            by = np.float32(1.0)
            if strange:
                scales[row, part] = np.float32(np.nan)
            elif static.size:
                scales[row, part] = by = static[0]
            elif top < least:
                scales[row, part] = zeros
            else:
                scales[row, part] = top / largest
                by = top / largest if divides else largest / top
            if strange or (top < least and not static.size):
                y[:] = 0
                continue
            for i in range(x.size):
                n = x[i] / by if divided else x[i] * by
                n = min(max(n, smallest), largest)
                y[i] = np.int8(_code_of_e4m3(n) if is_e4m3 else np.int32(np.rint(n)))


_quantise = RowKernel(_quantise_kernel)


def quantise(
    x: torch.Tensor, scale: torch.Tensor | None, reduction: QuantiseReduction
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    length = x.shape[-1]
    counts = reduction.scales_of(length)
    rows = x.reshape(x.shape[:-1].numel(), length).float().contiguous()
    codes = torch.empty(rows.shape, dtype=torch.int8)
    scales = torch.empty(len(rows), 1 if counts is None else counts, dtype=torch.float32)
    given = torch.empty(0, dtype=torch.float32) if scale is None else scale.max().reshape(1)
    numbers = (reduction.largest, reduction.smallest_static, reduction.least, reduction.group or max(length, 1))
    formula = (reduction.divides, reduction.scale_of_zeros, reduction.codes == E4M3)
    _quantise(rows.numel(), rows, codes, scales, given, *numbers, *formula)
    shape = x.shape[:-1] if counts is None else (*x.shape[:-1], counts)
    return codes.view(reduction.codes).view(x.shape), scales.view(shape)
