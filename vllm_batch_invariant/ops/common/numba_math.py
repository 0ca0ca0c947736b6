"""fp32 building blocks for the CPU kernels, every addition in an order that the source spells out, and the order of
values as integers.

Numba compiles without fast-math: nothing is reassociated or contracted into an fma, so these functions give the same
bits on every CPU, in every loop they are inlined into, vectorised or not. libm and the vector libraries promise
neither.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from .row_reduction import LANES

_LOG2E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_EXP_UNDERFLOW = np.float32(-87.33654)
_EXP_OVERFLOW = np.float32(88.72283)
_LOW_BITS = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)


@intrinsic
def float_of_bits(typing_context, bits):
    """Reinterpret an int32 as the float32 with the same bits."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def fma(typing_context, a, b, c):
    """a * b + c of fp32, rounded once: an instruction where the CPU has it, else the C library's function."""

    def codegen(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), codegen


@njit(inline="always")
def _power_of_two(n):
    return float_of_bits(types.int32((n + types.int32(127)) << types.int32(23)))


@njit(inline="always")
def exp32(x):
    """e**x in fp32 within 1 ulp, from additions and multiplications alone; exactly 0 below the normal range.

    Cody-Waite range reduction and the polynomial of Cephes' expf (Moshier, netlib.org/cephes).
    """
    clamped = min(max(x, _EXP_UNDERFLOW), _EXP_OVERFLOW)
    n = np.floor(clamped * _LOG2E + np.float32(0.5))
    r = clamped - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * (r * r) + r + np.float32(1.0)
    # Two factors, because 2**128 alone is no float.
    n_low = types.int32(n) >> types.int32(1)
    n_high = types.int32(n) - n_low
    scaled = p * _power_of_two(n_low) * _power_of_two(n_high)
    underflowed = np.float32(0.0) if x < _EXP_UNDERFLOW else scaled
    return x if x != x else (np.float32(np.inf) if x > _EXP_OVERFLOW else underflowed)


@njit(inline="always")
def erf32(x):
    """erf(x) in fp32: a polynomial of x**2 times x below 1, and from there on 1 - erfc, both of Cephes (ndtrf.c)."""
    magnitude = abs(x)
    z = x * x
    p = np.float32(7.853861353153693e-5)
    p = p * z + np.float32(-8.010193625184903e-4)
    p = p * z + np.float32(5.188327685732524e-3)
    p = p * z + np.float32(-2.685381193529856e-2)
    p = p * z + np.float32(1.128358514861418e-1)
    p = p * z + np.float32(-3.761262582423300e-1)
    p = p * z + np.float32(1.128379165726710)
    q = np.float32(1.0) / max(magnitude, np.float32(1.0))
    y = q * q
    near = np.float32(2.326819970068386e-2)
    near = near * y + np.float32(-1.387039388740657e-1)
    near = near * y + np.float32(3.687424674597105e-1)
    near = near * y + np.float32(-5.824733027278666e-1)
    near = near * y + np.float32(6.210004621745983e-1)
    near = near * y + np.float32(-4.944515323274145e-1)
    near = near * y + np.float32(3.404879937665872e-1)
    near = near * y + np.float32(-2.741127028184656e-1)
    near = near * y + np.float32(5.638259427386472e-1)
    far = np.float32(-1.047766399936249e1)
    far = far * y + np.float32(1.297719955372516e1)
    far = far * y + np.float32(-7.495518717768503)
    far = far * y + np.float32(2.921019019210786)
    far = far * y + np.float32(-1.015265279202700)
    far = far * y + np.float32(4.218463358204948e-1)
    far = far * y + np.float32(-2.820767439740514e-1)
    far = far * y + np.float32(5.641895067754075e-1)
    beyond = np.float32(1.0) - exp32(-z) * q * (near if magnitude < np.float32(2.0) else far)
    return x * p if magnitude < np.float32(1.0) else (-beyond if x < np.float32(0.0) else beyond)


@njit(inline="always")
def add_tree(lanes):
    """Sum of ``lanes`` (a power of two of them) by halving: lane i takes lane i + half. Overwrites its argument."""
    half = lanes.size // 2
    while half > 0:
        for i in range(half):
            lanes[i] += lanes[i + half]
        half //= 2
    return lanes[0]


@njit(inline="always")
def row_sum(row, lanes):
    """Sum of a contiguous row: element i is added to lane i % LANES, ascending, then the lanes by :func:`add_tree`.

    ``lanes`` is scratch of LANES elements in the accumulator's dtype.
    """
    lanes[:] = 0
    whole = row.size // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] += row[start + lane]
    for i in range(whole, row.size):
        lanes[i - whole] += row[i]
    return add_tree(lanes)


@njit(inline="always")
def order_key(bits):
    """int32 that grow with the fp32 value of those bits: the two zeros have one key, and NaN the largest, so that no
    comparison needs a case for them.
    """
    magnitude = bits & _LOW_BITS
    key = bits ^ ((bits >> types.int32(31)) & _LOW_BITS)
    key = types.int32(0) if magnitude == 0 else key
    return _LOW_BITS if magnitude > _INFINITY else key


@njit(inline="always")
def value_of(key):
    """The fp32 value that has the key."""
    return float_of_bits(key ^ ((key >> np.int32(31)) & _LOW_BITS))
