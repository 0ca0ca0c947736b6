"""The functions of :mod:`..exact.definition` for Triton, with the same operations in the same order.

Every operation is one of IEEE 754 or of integers: Triton's own exp2, log, sigmoid and rsqrt are approximations, its
floor and its fp32 division are not IEEE's, and its conversions of bf16 are not its interpreter's. Launch with
``enable_fp_fusion=False``: there is no fused multiply-add.
"""

import triton
import triton.language as tl

from ..exact import definition

_EXP2 = tl.constexpr(tuple(map(float, definition.EXP2)))
_TANH, _TANH_BY_EXP2 = tl.constexpr(tuple(map(float, definition.TANH))), tl.constexpr(float(definition.TANH_BY_EXP2))
_GELU_1, _GELU_3 = tl.constexpr(float(definition.GELU[0])), tl.constexpr(float(definition.GELU[1]))
_ATANH = tl.constexpr(tuple(map(float, definition.ATANH)))
_ATANH_FP64 = tl.constexpr(definition.ATANH_FP64)
_LN_2, _LN_2_FP64 = tl.constexpr(float(definition.LN_2)), tl.constexpr(definition.LN_2_FP64)
_SQRT_2, _SQRT_2_FP64 = tl.constexpr(float(definition.SQRT_2)), tl.constexpr(definition.SQRT_2_FP64)
LOG2_E = tl.constexpr(float(definition.LOG2_E))
_TWICE_LOG2_E = tl.constexpr(2 * float(definition.LOG2_E))
TWO_DIGITS, THREE_DIGITS = tl.constexpr(definition.TWO_DIGITS), tl.constexpr(definition.THREE_DIGITS)
LOWEST_EXPONENT = tl.constexpr(definition.LOWEST_EXPONENT)
_MASS_ONE = tl.constexpr(2.0**definition.MASS_BITS)
_LN_MASS_ONE = tl.constexpr(definition.MASS_BITS * definition.LN_2_FP64)
_ROUNDS_TO_1 = tl.constexpr(1.5 * 2**23)
"""Added to an fp32 number of at most 2**22, of either sign, it leaves its integer in the sum's last bits."""
_ITS_BITS = tl.constexpr(0x4B400000)
_TWO_TO_23 = tl.constexpr(2.0**23)
_BITS_OF_TWO_TO_23 = tl.constexpr(0x4B000000)
_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_LARGEST_BELOW_1 = tl.constexpr(1 - 2.0**-24)
_HALF_OF_E4M3 = tl.constexpr((1 << 19) - 1)
"""Of what is dropped from 23 bits of a fraction, less one."""
_BIAS_OF_E4M3 = tl.constexpr((127 - 7) << 3)
_ROUNDS_TO_E4M3 = tl.constexpr(2.0**14)
"""Added to an fp32 magnitude of at most 2**-6, it leaves its multiple of 2**-9 in the sum's last bits."""
_BITS_ROUNDING_TO_E4M3 = tl.constexpr(0x46800000)
_GOLDEN, _FIRST, _SECOND = (
    tl.constexpr(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


@triton.jit
def rint(x):
    """x rounded to an integer, to nearest even, as int32; |x| is at most 2**22."""
    return (x + _ROUNDS_TO_1).to(tl.int32, bitcast=True) - _ITS_BITS


@triton.jit
def rint_24(x):
    """:func:`rint` of |x| up to 2**23."""
    n = (tl.abs(x) + _TWO_TO_23).to(tl.int32, bitcast=True) - _BITS_OF_TWO_TO_23
    return tl.where(x < 0, -n, n)


@triton.jit
def ceil(x):
    """The smallest integer of at least x, as fp32, and NaN of NaN."""
    n = (tl.abs(x) + _TWO_TO_23) - _TWO_TO_23
    n = tl.where(x < 0, -n, n)
    n = tl.where(tl.abs(x) < _TWO_TO_23, n, x)  # else x is an integer
    return tl.where(n < x, n + 1.0, n)


@triton.jit
def to_fp32(integers):
    """int64 as fp32, rounded once: by way of fp64 it would be twice."""
    return integers.to(tl.float32)


@triton.jit
def power_of_two(n):
    """2**n as fp32 of an int32 of at most 127; 0 below -126."""
    power = ((tl.maximum(n, -126) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(n < -126, 0.0, power)


@triton.constexpr_function
def _highest_power(coefficients):
    return len(coefficients) - 1


@triton.jit
def polynomial(x, COEFFICIENTS: tl.constexpr):
    """Horner's rule from the highest power on."""
    HIGHEST: tl.constexpr = _highest_power(COEFFICIENTS)
    value = x * COEFFICIENTS[HIGHEST] + COEFFICIENTS[HIGHEST - 1]
    for power in tl.static_range(2, HIGHEST + 1):
        value = value * x + COEFFICIENTS[HIGHEST - power]
    return value


@triton.jit
def exp2(x):
    """2**x: 0 below -126, and 2**127 from 127 on."""
    inside = tl.where(x < -126.0, -126.0, x)  # not tl.maximum, which has no NaN of NaN
    inside = tl.where(inside > 127.0, 127.0, inside)
    shifted = inside + _ROUNDS_TO_1
    power = power_of_two(shifted.to(tl.int32, bitcast=True) - _ITS_BITS)
    y = polynomial(inside - (shifted - _ROUNDS_TO_1), _EXP2) * power
    return tl.where(x < -126.0, 0.0, y)


@triton.jit
def exp2_in_parts(x):
    """y and n of :func:`exp2`, y * 2**n, of x from -126 to 0; of less, and of NaN, those of -126. y is from 0.7 to 1.5,
    and no less than 1 where n is -126.
    """
    inside = tl.maximum(x, -126.0)
    shifted = inside + _ROUNDS_TO_1
    return polynomial(inside - (shifted - _ROUNDS_TO_1), _EXP2), shifted.to(tl.int32, bitcast=True) - _ITS_BITS


@triton.jit
def times_power_of_two(y, n):
    """y * 2**n, both of them normal numbers."""
    return (y.to(tl.int32, bitcast=True) + (n << 23)).to(tl.float32, bitcast=True)


@triton.jit
def tanh(x):
    """tanh(x)."""
    magnitude = tl.abs(x)
    is_small = magnitude < _TANH_BY_EXP2
    small = tl.where(is_small, x, 0.0)
    large = 1.0 - tl.div_rn(tl.full(x.shape, 2.0, tl.float32), 1.0 + exp2(magnitude * _TWICE_LOG2_E))
    return tl.where(is_small, small * polynomial(small * small, _TANH), tl.where(x < 0, -large, large))


@triton.jit
def capped(x, soft_cap):
    """tanh(x / soft_cap) * soft_cap."""
    return tanh(tl.div_rn(x, tl.full(x.shape, soft_cap, tl.float32))) * soft_cap


@triton.jit
def silu(x):
    """x / (1 + 2**(-x log2 e))."""
    return tl.div_rn(x, 1.0 + exp2(-x * LOG2_E))


@triton.jit
def gelu(x):
    """GELU by its approximation with tanh."""
    return tl.div_rn(x, 1.0 + exp2(x * (_GELU_1 + _GELU_3 * (x * x))))


@triton.jit
def ln(x):
    """ln(x) of a positive normal fp32 x."""
    bits = x.to(tl.int32, bitcast=True)
    k = (bits >> 23) - 127
    m = (bits & 0x7FFFFF | 0x3F800000).to(tl.float32, bitcast=True)
    above = m > _SQRT_2
    k, m = tl.where(above, k + 1, k), tl.where(above, m * 0.5, m)
    t = tl.div_rn(m - 1.0, m + 1.0)
    return k.to(tl.float32) * _LN_2 + (t + t) * polynomial(t * t, _ATANH)


@triton.jit
def ln_of_integer(s):
    """ln(s) of a positive int64, in fp64."""
    bits = s.to(tl.float64).to(tl.int64, bitcast=True)
    k = (bits >> 52) - 1023
    m = (bits & 0xFFFFFFFFFFFFF | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    above = m > _SQRT_2_FP64
    k, m = tl.where(above, k + 1, k), tl.where(above, m * 0.5, m)
    t = (m - 1.0) / (m + 1.0)  # in fp64 it is IEEE's
    return k.to(tl.float64) * _LN_2_FP64 + (t + t) * polynomial(t * t, _ATANH_FP64)


@triton.jit
def to_bf16(x):
    """x rounded to bf16, to nearest even."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def e4m3_bits(x):
    """The bits of the code of e4m3 nearest to an fp32 x of at most 448, of two the even one: uint8. By integers,
    because not every GPU has the conversion.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.abs(x)
    normal = ((bits & _MAGNITUDE) + _HALF_OF_E4M3 + (bits >> 20 & 1) >> 20) - _BIAS_OF_E4M3
    subnormal = (magnitude + _ROUNDS_TO_E4M3).to(tl.int32, bitcast=True) - _BITS_ROUNDING_TO_E4M3
    code = tl.where(magnitude < 2.0**-6, subnormal, normal) | (bits >> 24 & 0x80)
    return code.to(tl.uint8)


@triton.jit
def from_bf16(x):
    """x as fp32, where it is bf16: the interpreter's conversion of subnormal numbers is another."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def top_of(a, AXIS: tl.constexpr):
    """The bits of the largest magnitudes along an axis, as int32 in which infinities and NaN are the largest."""
    return tl.max(a.to(tl.int32, bitcast=True) & _MAGNITUDE, AXIS)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def top_of_numbers(y, AXIS: tl.constexpr):
    """:func:`top_of` numbers of any dtype as fp32, along the last axis. Those of 16 bits are compared as such: where
    they are extended before, Triton reduces them a second time for what wants the result in another layout.
    """
    if y.dtype.primitive_bitwidth == 16:
        top = tl.reduce(y.to(tl.int16, bitcast=True) & 0x7FFF, AXIS, _larger)
        top = from_bf16(top.to(y.dtype, bitcast=True)).to(tl.int32, bitcast=True)
    else:
        top = top_of(y, AXIS)
    return top


@triton.jit
def is_finite(top):
    """Whether rows with these bits of :func:`top_of` are finite."""
    return top < _INFINITY


@triton.jit
def exponent(top):
    """The e of a magnitude m * 2**e with 1 <= m < 2, given its bits; no less than ``LOWEST_EXPONENT``."""
    return tl.maximum((top >> 23) - 127, LOWEST_EXPONENT)


@triton.jit
def finest(top, BITS: tl.constexpr, LIMIT: tl.constexpr):
    """The exponent of the finest grid on which a magnitude with these bits is at most ``LIMIT``, of ``BITS`` bits."""
    e = exponent(top)
    n = rint_24(top.to(tl.float32, bitcast=True) * power_of_two(BITS - 1 - e))
    return tl.where(n <= LIMIT, e, e + 1) - (BITS - 1)


@triton.jit
def finest_of_two_digits(top):
    """:func:`finest` for two digits, and no less than ``LOWEST_EXPONENT``."""
    return tl.maximum(finest(top, 15, TWO_DIGITS), LOWEST_EXPONENT)


@triton.jit
def finest_of_three_digits(top):
    """The same for three."""
    return tl.maximum(finest(top, 23, THREE_DIGITS), LOWEST_EXPONENT)


@triton.jit
def scale_of(top, e):
    """2**e, and NaN for a row that is not finite."""
    return tl.where(is_finite(top), power_of_two(e), float("nan"))


@triton.jit
def last_digit(integers):
    """The last signed digit of base 256, and the integer of the digits before it."""
    digit = ((integers + 128) & 255) - 128
    return digit, (integers - digit) >> 8


@triton.jit
def digits_of(integers):
    """The two signed digits of integers that have no more, as int8, the last one behind."""
    return ((integers + 128) >> 8).to(tl.int8), integers.to(tl.int8)


@triton.jit
def mass(difference):
    """The integer of a token's weight, as int64, given its logit less the largest."""
    y = exp2(difference * LOG2_E) * _MASS_ONE
    small = rint_24(tl.where(y < _TWO_TO_23, y, 0.0))
    return tl.where(y < _TWO_TO_23, small.to(tl.int64), y.to(tl.int64))  # from 2**23 on y is an integer


@triton.jit
def ln_of_masses(total):
    """ln of the sum of weights, given the sum of their integers: in fp64, rounded to fp32."""
    return (ln_of_integer(total) - _LN_MASS_ONE).to(tl.float32)


@triton.jit
def _hashed(held, number):
    held = held + number + _GOLDEN
    held = (held ^ (held >> 30)) * _FIRST
    held = (held ^ (held >> 27)) * _SECOND
    return held ^ (held >> 31)


@triton.jit
def uniform(key, tokens):
    """A number above 0 and below 1 for each token; the key of a row's noise and tokens are uint64."""
    held = _hashed(_hashed(key, key * 0), tokens)
    u = (held >> 2).to(tl.int64).to(tl.float32) * 2.0**-62 + 2.0**-63
    return tl.minimum(u, _LARGEST_BELOW_1)


@triton.jit
def gumbel(key, tokens):
    """Noise of each token, from :func:`uniform`."""
    u = uniform(key, tokens)
    t = tl.div_rn(u, 2.0 - u)
    exponential = tl.where(u < 0.25, (t + t) * polynomial(t * t, _ATANH), -ln(1.0 - u))
    return -ln(exponential)
