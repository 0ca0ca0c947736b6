"""The functions of :mod:`..exact.definition` for numba, with the same operations in the same order."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ..exact import definition
from ..exact.definition import LOG2_E, LOWEST_EXPONENT, MASS_BITS, MEAN_BITS, THREE_DIGITS, TWO_DIGITS
from .numba_math import float_of_bits

_C = definition.EXP2
_T = definition.TANH
_TANH_BY_EXP2 = definition.TANH_BY_EXP2
_TWICE_LOG2_E = LOG2_E + LOG2_E
_A = definition.ATANH
_A64 = definition.ATANH_FP64
_LN_2, _SQRT_2 = definition.LN_2, definition.SQRT_2
_LN_2_FP64, _SQRT_2_FP64 = definition.LN_2_FP64, definition.SQRT_2_FP64
_LOWEST, _HIGHEST = np.float32(-126), np.float32(127)
_NAN = np.float32(np.nan)
_MASS_ONE = np.float32(2.0**MASS_BITS)
_UNIT, _HALF_UNIT, _BELOW_ONE = np.float32(2.0**-62), np.float32(2.0**-63), np.float32(1 - 2.0**-24)


def _bit_cast(name: str, source: types.Type, target: types.Type, code: ir.Type):
    @intrinsic
    def cast(typing_context, value):
        def codegen(context, builder, signature, arguments):
            return builder.bitcast(arguments[0], code)

        return target(source), codegen

    cast.__name__ = name
    return cast


bits_of_float = _bit_cast("bits_of_float", types.float32, types.int32, ir.IntType(32))
bits_of_double = _bit_cast("bits_of_double", types.float64, types.int64, ir.IntType(64))
double_of_bits = _bit_cast("double_of_bits", types.int64, types.float64, ir.DoubleType())


@njit(error_model="numpy")
def exponent(x):
    return max(
        (bits_of_float(x) >> types.int32(23) & types.int32(255)) - types.int32(127), types.int32(LOWEST_EXPONENT)
    )


@njit(error_model="numpy")
def power_of_two(n):
    """2**n of an integer n up to 127, 0 below -126."""
    n = types.int32(n)
    power = float_of_bits(types.int32((max(n, types.int32(-126)) + types.int32(127)) << types.int32(23)))
    return np.float32(0.0) if n < -126 else power


@njit(error_model="numpy")
def exp2(x):
    inside = min(max(x, _LOWEST), _HIGHEST)
    n = np.rint(inside)
    f = inside - n
    p = _C[6]
    p = p * f + _C[5]
    p = p * f + _C[4]
    p = p * f + _C[3]
    p = p * f + _C[2]
    p = p * f + _C[1]
    p = p * f + _C[0]
    found = p * power_of_two(types.int32(n))
    found = np.float32(0.0) if x < _LOWEST else found
    return x if x != x else found


@njit(error_model="numpy")
def tanh(x):
    magnitude = abs(x)
    if magnitude < _TANH_BY_EXP2:
        square = x * x
        p = _T[5]
        p = p * square + _T[4]
        p = p * square + _T[3]
        p = p * square + _T[2]
        p = p * square + _T[1]
        p = p * square + _T[0]
        return x * p
    large = np.float32(1.0) - np.float32(2.0) / (np.float32(1.0) + exp2(magnitude * _TWICE_LOG2_E))
    return -large if x < np.float32(0.0) else large


@njit(error_model="numpy")
def capped(x, soft_cap):
    return tanh(x / soft_cap) * soft_cap


@njit(error_model="numpy")
def ln(x):
    bits = bits_of_float(x)
    k = (bits >> types.int32(23)) - types.int32(127)
    m = float_of_bits(types.int32(bits & types.int32(0x7FFFFF) | types.int32(0x3F800000)))
    if m > _SQRT_2:
        k, m = types.int32(k + 1), m * np.float32(0.5)
    t = (m - np.float32(1.0)) / (m + np.float32(1.0))
    return np.float32(k) * _LN_2 + (t + t) * atanh_over(t * t)


@njit(error_model="numpy")
def atanh_over(square):
    """atanh(t) / t of t**2."""
    p = _A[4]
    p = p * square + _A[3]
    p = p * square + _A[2]
    p = p * square + _A[1]
    return p * square + _A[0]


@njit(error_model="numpy")
def ln_of_integer(s):
    """ln(s) in fp64, of a positive number that is no subnormal one."""
    bits = bits_of_double(np.float64(s))
    k = (bits >> np.int64(52)) - np.int64(1023)
    m = double_of_bits(bits & np.int64((1 << 52) - 1) | np.int64(1023 << 52))
    if m > _SQRT_2_FP64:
        k, m = k + np.int64(1), m * 0.5
    t = (m - 1.0) / (m + 1.0)
    square = t * t
    p = _A64[10]
    for i in range(9, -1, -1):
        p = p * square + _A64[i]
    return np.float64(k) * _LN_2_FP64 + (t + t) * p


@njit(error_model="numpy")
def finest(top, bits, limit):
    """The exponent of the finest grid on which a row's largest magnitude is an integer of at most ``limit``."""
    e = exponent(top)
    fits = np.rint(top * power_of_two(types.int32(bits - 1) - e)) <= limit
    return (e if fits else e + types.int32(1)) - types.int32(bits - 1)


@njit(error_model="numpy")
def largest_magnitude(row):
    """NaN if the row is not finite."""
    top = np.float32(0.0)
    finite = True
    for k in range(row.size):
        magnitude = abs(row[k])
        finite &= magnitude < np.inf
        top = max(top, magnitude)
    return top if finite else _NAN


@njit(error_model="numpy")
def to_integers(row, integers, e):
    """Write a finite row's integers on the grid 2**e, or on the lowest one; returns its scale."""
    e = max(e, types.int32(LOWEST_EXPONENT))
    factor = power_of_two(-e)
    for k in range(row.size):
        integers[k] = np.rint(row[k] * factor)
    return power_of_two(e)


@njit(error_model="numpy")
def not_finite(integers):
    """What stands for the integers of a row that is not finite, and its scale."""
    integers[:] = 0
    return _NAN


@njit(error_model="numpy")
def _on_finest(row, integers, bits, limit):
    top = largest_magnitude(row)
    return not_finite(integers) if top != top else to_integers(row, integers, finest(top, bits, limit))


@njit(error_model="numpy")
def two_digits(row, integers):
    return _on_finest(row, integers, 15, TWO_DIGITS)


@njit(error_model="numpy")
def three_digits(row, integers):
    return _on_finest(row, integers, 23, THREE_DIGITS)


@njit(error_model="numpy")
def activations(row, integers):
    top = largest_magnitude(row)
    if top != top:
        return not_finite(integers)
    e = exponent(top)
    factor = power_of_two(types.int32(22) - e)
    total = np.int64(0)
    for k in range(row.size):
        total += np.int64(np.rint(abs(row[k]) * factor))
    mean = max(total // row.size, np.int64(1))
    exponent_of_mean = (bits_of_double(np.float64(mean)) >> np.int64(52)) - np.int64(1023)
    by_mean = types.int32(exponent_of_mean) + e - types.int32(22 + MEAN_BITS)
    grid = max(min(finest(top, 15, TWO_DIGITS), by_mean), finest(top, 23, THREE_DIGITS))
    return to_integers(row, integers, grid)


@njit(error_model="numpy")
def mass(difference):
    """The weight of a token whose logit is that much above the largest, as an integer."""
    return np.int64(np.rint(exp2(difference * LOG2_E) * _MASS_ONE))


@njit(error_model="numpy")
def _hashed(held, number):
    held = held + number + np.uint64(0x9E3779B97F4A7C15)
    held = (held ^ (held >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    held = (held ^ (held >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return held ^ (held >> np.uint64(31))


@njit(error_model="numpy")
def hashed_key(key):
    """What :func:`uniform` takes of a key."""
    return _hashed(np.uint64(key), np.uint64(0))


@njit(error_model="numpy")
def uniform(hashed, token):
    u = np.float32(np.int64(_hashed(hashed, np.uint64(token)) >> np.uint64(2))) * _UNIT + _HALF_UNIT
    return min(u, _BELOW_ONE)


@njit(error_model="numpy")
def gumbel(key, token):
    u = uniform(hashed_key(key), token)
    t = u / (np.float32(2.0) - u)
    exponential = (t + t) * atanh_over(t * t) if u < np.float32(0.25) else -ln(np.float32(1.0) - u)
    return -ln(exponential)
