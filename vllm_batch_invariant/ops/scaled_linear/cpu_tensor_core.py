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

from ..common.numba_exact_math import bits_of_float
from ..common.numba_rows import RowKernel, compiled

K_STEP = 32
"""Elements of K of one instruction."""
FRACTION = 13
"""Bits that products are cut to behind the largest exponent, and a sum behind its first bit."""
_PRODUCT_FRACTION = 6
"""Bits of two codes' fractions: what a product of significands has to be shifted by less."""
_NONE = np.int32(-200)
"""An exponent below all."""
_SIGNIFICANT = np.int32(FRACTION + 1)
_SHIFT = np.int32(FRACTION - _PRODUCT_FRACTION)
_FRACTION, _MOST = np.int32(FRACTION), np.int32(31)
_ZERO, _SIGN_BIT = np.int32(0), np.int32(31)


def _decode_kernel(codes, significands, exponents, nans):
    for row in prange(codes.shape[0]):
        x, s, e = codes[row], significands[row], exponents[row]
        nans[row] = 0
        for i in range(x.size):
            code = np.int32(x[i])
            field, fraction = code >> np.int32(3) & np.int32(15), code & np.int32(7)
            magnitude = fraction if field == 0 else fraction | np.int32(8)
            s[i] = -magnitude if code & np.int32(128) else magnitude
            e[i] = max(field, np.int32(1)) - np.int32(7) if magnitude else _NONE
            nans[row] |= code & np.int32(127) == np.int32(127)


_decode = RowKernel(_decode_kernel)


class Operand:
    """Codes of a group [rows, K], filled up with zeros: significands and exponents, and which rows have NaN."""

    def __init__(self, codes: torch.Tensor) -> None:
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % K_STEP))
        self.significands = torch.empty(codes.shape, dtype=torch.int32)
        self.exponents = torch.empty(codes.shape, dtype=torch.int32)
        self.nans = torch.empty(len(codes), dtype=torch.int32)
        _decode(codes.numel(), codes, self.significands, self.exponents, self.nans)


def _cut(value, shift):
    """An integer divided by 2**shift, towards 0."""
    sign = value >> _SIGN_BIT
    return (((value ^ sign) - sign >> min(shift, _MOST)) ^ sign) - sign


cut = compiled(_cut)


def _wgmma(a, a_exponents, b, b_exponents, c, c_exponent):
    """One instruction: the sum is c * 2**(c_exponent - 13), where |c| is 0 or from 2**13 to 2**14."""
    top = c_exponent
    for i in range(a.size):
        top = max(top, a_exponents[i] + b_exponents[i])
    total = cut(c, top - c_exponent)
    for i in range(a.size):
        total += cut(a[i] * b[i] << _SHIFT, top - a_exponents[i] - b_exponents[i])
    if total == 0:
        return _ZERO, _NONE
    magnitude = abs(total)
    bits = (bits_of_float(np.float32(magnitude)) >> np.int32(23)) - np.int32(126)  # below 2**24: fp32 holds it
    more = bits - _SIGNIFICANT
    magnitude = magnitude >> more if more > 0 else magnitude << -more
    return (magnitude if total > 0 else -magnitude), top + more


wgmma = compiled(_wgmma)


def _sums_kernel(x, x_exponents, x_nans, w, w_exponents, w_nans, steps, out):
    for row in prange(out.shape[0]):
        for column in range(out.shape[1]):
            c, exponent = _ZERO, _NONE
            for step in range(steps):
                k = slice(step * K_STEP, (step + 1) * K_STEP)
                c, exponent = wgmma(x[row, k], x_exponents[row, k], w[column, k], w_exponents[column, k], c, exponent)
            out[row, column] = np.ldexp(np.float64(c), exponent - _FRACTION)
            if x_nans[row] or w_nans[column]:
                out[row, column] = np.nan


_sums = RowKernel(_sums_kernel)


def wgmma_sums(x: Operand, weight: Operand) -> torch.Tensor:
    """Those of the products of a group: [M, N] fp64, which fp32 holds."""
    out = torch.empty(len(x.nans), len(weight.nans), dtype=torch.float64)
    given = [(one.significands, one.exponents, one.nans) for one in (x, weight)]
    k = x.significands.shape[1]
    _sums(out.numel() * k, *given[0], *given[1], k // K_STEP, out)
    return out
