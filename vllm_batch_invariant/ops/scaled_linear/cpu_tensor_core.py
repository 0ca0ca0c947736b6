"""Sums of products of e4m3 as Hopper's wgmma makes them, in integers: a GPU's bits on a CPU.

The model of one instruction, of 32 elements of K, is MMA-Sim's (github.com/microsoft/MMA-Sim); an H200 had its bits in
every one of 40960 sums, of operands that are normal, of two sizes, of one sign, cancelling, and spread over 24 powers
of two. With the accumulator c, and exponents of e4m3's fields (that of a subnormal code is the smallest)::

    e = the largest exponent of c and of the products that are not 0    # a product's: the sum of its two codes'
    c = sum of all of them, each cut towards 0 to a multiple of 2**(e - 13)
    c = c cut towards 0 to 13 bits behind its first

A group of 128 elements is four of them, from c = 0.
"""

import numpy as np
import torch
from numba import prange

from ..common.numba_rows import RowKernel, compiled
from ..common.numba_simd import WIDTH, load, store
from ..common.numba_tensor_core import ZERO, instruction

K_STEP = 32
"""Elements of K of one instruction."""
FRACTION = 13
"""Bits that products are cut to behind the largest exponent, and a sum behind its first bit."""
largest_exponents, add_products = instruction(K_STEP, FRACTION, kept=FRACTION)
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num()
_LEAST_FIELD, _BIAS = 1, 7
_EXPONENTS = ((torch.arange(256) >> 3 & 15).clamp(_LEAST_FIELD) - _BIAS).where(_VALUES != 0, ZERO).short()
"""Of codes: that of a subnormal one is the smallest."""


def _decode_kernel(codes, of_values, of_exponents, values, exponents, nans):
    for row in prange(codes.shape[0]):
        x, y, e, nan = codes[row], values[row], exponents[row], np.uint8(0)
        for i in range(x.size):
            y[i], e[i] = of_values[x[i]], of_exponents[x[i]]
            nan = max(nan, np.uint8(x[i] & np.uint8(127)))
        nans[row] = nan == np.uint8(127)


_decode = RowKernel(_decode_kernel)


class Operand:
    """Codes of a group [rows, K], filled up with zeros: values and exponents, and which rows have NaN."""

    def __init__(self, codes: torch.Tensor) -> None:
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % K_STEP))
        self.values = torch.empty(codes.shape, dtype=torch.float32)
        self.exponents = torch.empty(codes.shape, dtype=torch.int16)
        self.nans = torch.empty(len(codes), dtype=torch.bool)
        _decode(codes.numel(), codes, _VALUES, _EXPONENTS, self.values, self.exponents, self.nans)


def _chain(x, x_exponents, b, b_exponents):
    """The sum of x [K] with sixteen columns of b [K * 16], from 0."""
    zero = np.zeros(WIDTH, np.float32)
    c = load(zero, 0)
    for i in range(0, x.size, K_STEP):
        c = add_products(c, largest_exponents(c, x_exponents, i, b_exponents, i), x, i, b, i)
    return c


_chain = compiled(_chain)


def _sums_kernel(x, x_exponents, x_nans, w, w_exponents, w_nans, out):
    rows, k = x.shape
    columns = w.shape[0]
    for panel in prange((columns + WIDTH - 1) // WIDTH):
        first = panel * WIDTH
        count = min(WIDTH, columns - first)
        b, b_exponents = np.zeros(k * WIDTH, np.float32), np.full(k * WIDTH, ZERO, np.int16)
        for column in range(count):
            for i in range(k):
                b[i * WIDTH + column] = w[first + column, i]
                b_exponents[i * WIDTH + column] = w_exponents[first + column, i]
        made = np.empty(WIDTH, np.float32)
        for row in range(rows):
            store(_chain(x[row], x_exponents[row], b, b_exponents), made, 0)
            for column in range(count):
                is_nan = x_nans[row] or w_nans[first + column]
                out[row, first + column] = np.float32(np.nan) if is_nan else made[column]


_sums = RowKernel(_sums_kernel)


def wgmma_sums(x: Operand, weight: Operand) -> torch.Tensor:
    """Those of the products of a group: [M, N] fp32."""
    out = torch.empty(len(x.nans), len(weight.nans), dtype=torch.float32)
    given = [(one.values, one.exponents, one.nans) for one in (x, weight)]
    _sums(out.numel() * x.values.shape[1], *given[0], *given[1], out)
    return out
