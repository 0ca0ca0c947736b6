"""What takes time of :mod:`.definition`, in numba: the same bits, by vectors of sixteen columns and on many threads.

Where an exponent is so large or so small that :mod:`.cpu_simd` does not serve, or an operand is no number, integers are
added, one column at a time.
"""

import numpy as np
import torch
from numba import prange, types

from ..attention.cpu_simd import WIDTH, load, store
from ..common.numba_exact_math import bits_of_float
from ..common.numba_math import float_of_bits, fma
from ..common.numba_rows import RowKernel, compiled
from ..exact.definition import Floats
from .cpu_simd import NO_NUMBER, ZERO, add_products, are_usual, largest_exponents
from .definition import FRACTION, K_STEP, LARGE, LOG2_E, MINUS_LOG2_E, SMALLEST_NORMAL
from .tables import Tables

_BLOCK_K = 256
"""Elements of K of a panel of sixteen columns that lies in the first cache."""
_BLOCK_M = 256
"""Rows that a thread multiplies with a panel, which it makes of the weight."""


def _significand(x):
    """Of a bf16 value: its significand with its sign, 7 bits of fraction, and its exponent."""
    bits = bits_of_float(x) >> np.int32(16)
    field, fraction = bits >> np.int32(7) & np.int32(255), bits & np.int32(127)
    magnitude = fraction if field == 0 else fraction | np.int32(128)
    return types.int64(-magnitude if bits < 0 else magnitude), types.int64(max(field, np.int32(1)) - np.int32(127))


_significand = compiled(_significand)


def _shifted(value, shift):
    """An integer divided by 2**shift, towards 0."""
    shift = min(shift, types.int64(62))
    return -(-value >> shift) if value < 0 else value >> shift


_shifted = compiled(_shifted)


def _towards_zero(value, power):
    """value * 2**power, cut towards 0 to fp32; an integer below 2**40."""
    exact = np.ldexp(np.float64(value), power)
    near = np.float32(exact)
    if abs(np.float64(near)) > abs(exact):
        near = float_of_bits(bits_of_float(near) - np.int32(1))
    return near


_towards_zero = compiled(_towards_zero)


def _one_step(a, at, b, panel, column, c):
    """One column of a step by integers, where exponents are unusual or an operand is no number."""
    total = np.float64(c)
    finite = np.isfinite(c)
    for k in range(K_STEP):
        x, y = a[at + k], b[(panel + k) * WIDTH + column]
        finite &= np.isfinite(x) & np.isfinite(y)
        total += np.float64(x) * np.float64(y)
    if not finite:
        return np.float32(total)
    bits = types.int64(bits_of_float(c))
    field, fraction = bits >> 23 & 255, bits & 0x7FFFFF
    magnitude = fraction if field == 0 else fraction | 0x800000
    c_exponent = max(field, 1) - 127
    top = c_exponent if magnitude else types.int64(-(1 << 20))
    for k in range(K_STEP):
        (sx, ex), (sy, ey) = _significand(a[at + k]), _significand(b[(panel + k) * WIDTH + column])
        if sx * sy != 0:
            top = max(top, ex + ey)
    summed = _shifted((-magnitude if bits < 0 else magnitude) << 2, top - c_exponent) if magnitude else types.int64(0)
    for k in range(K_STEP):
        (sx, ex), (sy, ey) = _significand(a[at + k]), _significand(b[(panel + k) * WIDTH + column])
        if sx * sy != 0:
            summed += _shifted(sx * sy << 11, top - ex - ey)
    return _towards_zero(summed, top - FRACTION) if summed else np.float32(0)


_one_step = compiled(_one_step)


def _exponent_of(x):
    """Of an operand, with a place of its own for 0 and for no number."""
    bits = bits_of_float(x) & np.int32(0x7FFFFFFF)
    field = bits >> np.int32(23)
    usual = max(field, np.int32(1)) - np.int32(127)
    return np.int16(ZERO if bits == 0 else NO_NUMBER if field == 255 else usual)


_exponent_of = compiled(_exponent_of)


def _exponents_kernel(x, out):
    for row in prange(x.shape[0]):
        for i in range(x.shape[1]):
            out[row, i] = _exponent_of(x[row, i])


_exponents = RowKernel(_exponents_kernel)


def _multiply_kernel(a, a_exponents, weight, out):
    """out [M, N + 15 or less] += a @ weight.T; a: [M, K] fp32, K a multiple of 16; weight: [N, K] fp32."""
    rows, k = a.shape
    columns = weight.shape[0]
    panels, blocks = (columns + WIDTH - 1) // WIDTH, (rows + _BLOCK_M - 1) // _BLOCK_M
    for part in prange(panels * blocks):
        b = np.zeros(_BLOCK_K * WIDTH, np.float32)
        b_exponents = np.empty(_BLOCK_K * WIDTH, np.int16)
        scratch = np.empty(WIDTH, np.float32)
        first, first_row = part // blocks * WIDTH, part % blocks * _BLOCK_M
        for start in range(0, k, _BLOCK_K):
            depth = min(_BLOCK_K, k - start)
            for column in range(min(WIDTH, columns - first)):
                for i in range(depth):
                    b[i * WIDTH + column] = weight[first + column, start + i]
            for i in range(depth * WIDTH):
                b_exponents[i] = _exponent_of(b[i])
            for row in range(first_row, min(first_row + _BLOCK_M, rows)):
                x, x_exponents, y = a[row], a_exponents[row], out[row]
                c = load(y, first)
                for i in range(0, depth, K_STEP):
                    e = largest_exponents(c, x_exponents, start + i, b_exponents, i)
                    if are_usual(e):
                        c = add_products(c, e, x, start + i, b, i)
                    else:
                        store(c, scratch, 0)
                        for column in range(WIDTH):
                            scratch[column] = _one_step(x, start + i, b, i, column, scratch[column])
                        c = load(scratch, 0)
                store(c, y, first)


_multiply = RowKernel(_multiply_kernel)


def mma(a: Floats, b: Floats, c: Floats | None = None) -> Floats:
    """:func:`.definition.mma`."""
    missing, columns = -a.shape[1] % K_STEP, -(-len(b) // WIDTH) * WIDTH
    if missing:
        a, b = (np.pad(one, ((0, 0), (0, missing))) for one in (a, b))
    out = np.zeros((len(a), columns), np.float32)
    if c is not None:
        out[:, : len(b)] = c
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    exponents = np.empty(a.shape, np.int16)
    given = [torch.from_numpy(one) for one in (a, exponents, b, out)]
    _exponents(a.size, *given[:2])
    _multiply(a.size * columns, *given)
    return out[:, : len(b)]


def _ex2_ftz(x, table):
    """:func:`.definition.ex2_ftz` of one number."""
    if x != x:
        return x
    if x >= np.float32(128):
        return np.float32(np.inf)
    if x < np.float32(-127):
        return np.float32(0)
    if abs(x) < SMALLEST_NORMAL:
        return np.float32(1)
    at = types.int64(np.float64(x) * 8388608.0)  # cut towards 0
    power = types.int32(at >> 23)
    if power < -126:
        return np.float32(0)
    return float_of_bits(((power + np.int32(126)) << np.int32(23)) + table[at & 0x7FFFFF])


_ex2_ftz = compiled(_ex2_ftz)


def _exp(x, table):
    """:func:`.definition.exp` of one number, x times log2 e."""
    if x < np.float32(-126):
        half = _ex2_ftz(x * np.float32(0.5), table)
        return half * half
    return _ex2_ftz(x, table)


_exp = compiled(_exp)


def _bf16(x):
    """x rounded to bf16, to nearest even."""
    if x != x:
        return np.float32(np.nan)
    bits = bits_of_float(x)
    return float_of_bits((bits + np.int32(0x7FFF) + (bits >> np.int32(16) & np.int32(1))) & np.int32(-65536))


_bf16 = compiled(_bf16)


def _divide(a, b, table):
    """:func:`.definition.divide` of two numbers."""
    size = abs(b)
    factor = np.float32(1)
    if size > LARGE:
        factor = np.float32(0.25)
    elif size < SMALLEST_NORMAL:
        factor = np.float32(16777216.0)
    bits = bits_of_float(b * factor)
    field, fraction = bits >> np.int32(23) & np.int32(255), bits & np.int32(0x7FFFFF)
    if field == 0:
        reciprocal = np.float32(np.inf)
    elif field == 255:
        reciprocal = np.float32(np.nan) if fraction else np.float32(0)
    else:
        reciprocal = np.float32(np.ldexp(np.float64(table[fraction]), 103 - field))
    return (a * factor) * (-reciprocal if bits < 0 else reciprocal)


_divide = compiled(_divide)


def _weights_kernel(s, factor, m, table, out):
    for row in prange(s.shape[0]):
        for i in range(s.shape[1]):
            out[row, i] = _bf16(_ex2_ftz(fma(s[row, i], factor, -m[row]), table))


def _exp_kernel(x, table, out):
    for row in prange(x.shape[0]):
        for i in range(x.shape[1]):
            out[row, i] = _exp(x[row, i] * LOG2_E, table)


def _silu_kernel(x, exp2, rcp, out):
    size = out.shape[1]
    for row in prange(x.shape[0]):
        for i in range(size):
            gate = x[row, i]
            shrunk = _divide(gate, np.float32(1) + _exp(gate * MINUS_LOG2_E, exp2), rcp)
            out[row, i] = _bf16(_bf16(shrunk) * x[row, size + i])


_weights, _exps, _silu = RowKernel(_weights_kernel), RowKernel(_exp_kernel), RowKernel(_silu_kernel)


def _rows(x: Floats) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x.reshape(-1, x.shape[-1])))


def weights(s: Floats, factor: np.float32, m: Floats, tables: Tables) -> Floats:
    """:func:`.definition.weights`."""
    out = torch.empty(s.shape, dtype=torch.float32)
    _weights(s.size, _rows(s), factor, torch.from_numpy(m), torch.from_numpy(tables.exp2), out)
    return out.numpy()


def exp(x: Floats, tables: Tables) -> Floats:
    """:func:`.definition.exp`."""
    rows = _rows(x)
    out = torch.empty_like(rows)
    _exps(x.size, rows, torch.from_numpy(tables.exp2), out)
    return out.numpy().reshape(x.shape)


def silu_and_mul(x: Floats, tables: Tables) -> Floats:
    """:func:`.definition.silu_and_mul`."""
    out = torch.empty(len(x), x.shape[-1] // 2)
    _silu(x.size, _rows(x), torch.from_numpy(tables.exp2), torch.from_numpy(tables.rcp), out)
    return out.numpy()
