"""The usual arithmetic of a Hopper in numpy: each operation of a dense model in bf16, with the bits of its kernels.

What a kernel leaves to its compiler is written down as the code for sm_90 does it (Triton 3.9 and ptxas 12.8, read as
PTX and SASS): no product is fused with an addition but where :func:`fma` stands, ``exp`` is ``ex2.approx`` of a product
with log2 e, a division is ``div.full`` unless it is rounded as IEEE says, and sums of rows are trees. Numbers are fp32,
bf16 values are held in fp32, and an array's last dimension is a row, as in :mod:`..exact.definition`.

The tensor core's model is MMA-Sim's (github.com/microsoft/MMA-Sim), its special functions are tables
(:mod:`.tables`). Which operations a GPU was seen to have the bits of stands in :mod:`.confirmed`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..exact.definition import Floats, Integers, bf16, fp32, in_order, splits
from ..exact.families import rope_type
from .tables import Tables

K_STEP = 16
"""Elements of K that one instruction adds at once."""
FRACTION = 25
"""Bits behind the largest exponent that each of them is cut to."""
_PRODUCT_FRACTION = 14
"""Bits behind the point of a product of two significands of bf16."""
_NONE = -(1 << 20)
"""An exponent below all: of a product that is 0."""
WARP = 32
KEY_TILE = 64
"""Keys of a step of the online softmax."""
SPLITS = ((0, 256), (2048, 512), (32_768, 1024))
"""(first position, keys) of the splits of attention, ascending."""

MINUS_LOG2_E, LOG2_E = fp32(float.fromhex("-0x1.715476p+0")), fp32(float.fromhex("0x1.715476p+0"))
SMALLEST_NORMAL, LARGE = fp32(2.0**-126), fp32(2.0**126)


def _fp32(*bits: int) -> tuple[np.float32, ...]:
    return tuple(np.array(bits, np.uint32).view(fp32))


LOG = _fp32(
    *(0xBE055027, 0x3E1039F6, 0xBDF8CDCC, 0x3E0F2955, 0xBE2AD8B9, 0x3E4CED0B, 0xBE7FFF22, 0x3EAAAA78, 0xBF000000)
)
"""Of libdevice's logf, from the highest power on."""
_LN_2, *_ = _fp32(0x3F317218)
_TURNS, *HALF_PI = _fp32(0x3F22F983, 0xBFC90FDA, 0xB3A22168, 0xA7C234C5)
"""2 / pi, and -pi / 2 in three parts: of libdevice's cosf and sinf."""
COSINE = _fp32(0x37CBAC00, 0xBAB607ED, 0x3D2AAABB, 0xBEFFFFFF)
SINE = _fp32(0xB94D4153, 0x3C0885E4, 0xBE2AAAA8)
TANH = _fp32(0x3C80F082, 0xBD563CAE, 0x3E085941, 0xBEAAA9ED, 0)
"""Of libdevice's tanhf, from the highest power of x * x on, where x is smaller than the next number."""
TANH_BY_EX2, TANH_IS_1, TWICE_LOG2_E = _fp32(0x3F19999A, 0x41102CB4, 0x4038AA3B)
"""From the first on it is made of a power of two, from the second on it is 1."""
GELU_SLOPE, GELU_CUBE = _fp32(0x3F4C422A, 0x3D372713)
"""sqrt(2 / pi), and of the cube of what GELU is of."""
LARGEST_ANGLE = 105_615
"""From here on libdevice reduces an angle otherwise: no position may be larger."""


def fma(a: NDArray, b: NDArray, c: NDArray) -> Floats:
    """a * b + c, rounded once: the sum in fp64, its last bit odd where it is not exact, rounded to fp32."""
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    c = np.asarray(c, np.float64)
    total = np.atleast_1d(product + c)
    with np.errstate(invalid="ignore"):
        rest = total - product
        error = (product - (total - rest)) + (c - rest)
    bits = total.view(np.int64)
    adjust = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    bits = np.where(adjust, bits + np.where((error > 0) == (total > 0), 1, -1), bits)
    out = np.ascontiguousarray(bits).view(np.float64).astype(fp32)
    return out.reshape(np.broadcast_shapes(product.shape, c.shape))


def ex2_ftz(x: Floats, tables: Tables) -> Floats:
    """``ex2.approx.ftz``: x is cut towards 0 to 23 bits of fraction, and 2**fraction is looked up. The fraction of a
    negative x is the complement of its bits, the last place less than it is, but where that is 0.
    """
    x = np.asarray(x, fp32)
    x = np.where(np.abs(x) < SMALLEST_NORMAL, fp32(0), x)
    inside = np.clip(np.where(np.isnan(x), fp32(0), x), fp32(-200), fp32(200)).astype(np.float64)
    at = np.trunc(inside * 2.0**23).astype(np.int64)
    at = np.where((at < 0) & (at & (1 << 23) - 1 != 0), at - 1, at)
    power, place = at >> 23, at & (1 << 23) - 1
    found = np.ldexp(tables.exp2[place].astype(np.float64), power - 23)
    found = np.where(power < -126, 0.0, found)
    with np.errstate(over="ignore"):
        return np.where(np.isnan(x), fp32(np.nan), found.astype(fp32))


def ex2(x: Floats, tables: Tables) -> Floats:
    """``ex2.approx``: below -126 the square of the power of half of x."""
    small = x < fp32(-126)
    with np.errstate(under="ignore", over="ignore"):
        power = ex2_ftz(np.where(small, x * fp32(0.5), x), tables)
        return np.where(small, power * power, power)


def exp(x: Floats, tables: Tables) -> Floats:
    """``tl.exp``."""
    with np.errstate(over="ignore"):
        return ex2(x * LOG2_E, tables)


def rcp(x: Floats, tables: Tables) -> Floats:
    """``rcp.approx.ftz`` of numbers whose reciprocal is normal, of 0 and of infinities: the mantissa is looked up."""
    bits = np.ascontiguousarray(x, fp32).view(np.int32)
    exponent, mantissa = bits >> 23 & 255, bits & 0x7FFFFF
    found = np.ldexp(tables.rcp[mantissa].astype(np.float64), -24 - (exponent - 127))
    found = np.where(exponent == 0, np.inf, np.where(exponent == 255, 0.0, found))
    found = np.where((exponent == 255) & (mantissa != 0), np.nan, found)
    with np.errstate(over="ignore"):
        return np.copysign(found, np.asarray(x, fp32)).astype(fp32)


def divide(a: Floats, b: Floats, tables: Tables) -> Floats:
    """``div.full``: a * (1 / b), both first multiplied by a power of two where b is very large or very small."""
    a, b = np.broadcast_arrays(np.asarray(a, fp32), np.asarray(b, fp32))
    size = np.abs(b)
    factor = np.where(size > LARGE, fp32(0.25), np.where(size < SMALLEST_NORMAL, fp32(2.0**24), fp32(1)))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return (a * factor) * rcp(b * factor, tables)


def ln(x: Floats) -> Floats:
    """libdevice's ``logf``: a polynomial of x / 2**k - 1, from -1/3 to 1/3, and k * ln 2."""
    x = np.asarray(x, fp32)
    small = x < SMALLEST_NORMAL
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = np.where(small, x * fp32(2.0**23), x)
    bits = np.ascontiguousarray(scaled).view(np.int32)
    power = (bits - np.int32(0x3F2AAAAB)) & np.int32(-(1 << 23))
    k = fma(power.astype(fp32), fp32(2.0**-23), np.where(small, fp32(-23), fp32(0)))
    with np.errstate(invalid="ignore", over="ignore"):
        t = (bits - power).view(fp32) - fp32(1)
        value = np.full_like(t, LOG[0])
        for coefficient in LOG[1:]:
            value = fma(value, t, coefficient)
        found = fma(k, _LN_2, fma(t * value, t, t))
    found = np.where(np.isposinf(x), x, found)
    return np.where(x == 0, fp32(-np.inf), np.where((x < 0) | np.isnan(x), fp32(np.nan), found))


def tanh(x: Floats, tables: Tables) -> Floats:
    """libdevice's ``tanhf``."""
    size = np.abs(np.asarray(x, fp32))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        large = fma(rcp(ex2_ftz(size * TWICE_LOG2_E, tables) + fp32(1), tables), fp32(-2), fp32(1))
        square, value = size * size, np.full_like(size, TANH[0])
        for coefficient in TANH[1:]:
            value = fma(square, value, coefficient)
        small = fma(x, value, x)
    large = np.copysign(np.where(size >= TANH_IS_1, fp32(1), large), x)
    return np.where(size >= TANH_BY_EX2, large, small)


def cosine(x: Floats, shift: int = 1) -> Floats:
    """libdevice's ``cosf``, or its ``sinf`` with a ``shift`` of 0, of angles below :data:`LARGEST_ANGLE`."""
    x = np.asarray(x, fp32)
    quarter = np.rint(x * _TURNS)
    rest = x
    for part in HALF_PI:
        rest = fma(quarter, part, rest)
    quarter = quarter.astype(np.int64) + shift
    is_sine = quarter & 1 == 0
    square = rest * rest
    factor = np.where(is_sine, rest, fp32(1))
    by_square = square * factor + fp32(0)
    value = np.where(is_sine, SINE[0], fma(COSINE[0], square, COSINE[1]))
    value = fma(value, square, np.where(is_sine, SINE[1], COSINE[2]))
    value = fma(value, square, np.where(is_sine, SINE[2], COSINE[3]))
    value = fma(value, by_square, factor)
    return np.where(quarter & 2 != 0, fp32(0) - value, value)


# The tensor core.


def _fields(x: Floats) -> tuple[Integers, Integers]:
    """Significands of bf16 values with their signs, 7 bits of fraction, and exponents; that of a subnormal one is the
    smallest.
    """
    bits = np.ascontiguousarray(x, fp32).view(np.int32) >> 16
    exponent, fraction = bits >> 7 & 255, bits & 127
    significand = np.where(exponent == 0, fraction, fraction | 128)
    return np.where(bits < 0, -significand, significand).astype(np.int64), np.maximum(exponent, 1).astype(
        np.int64
    ) - 127


def _cut(value: Integers, shift: Integers) -> Integers:
    """Integers divided by 2**shift, towards 0."""
    return np.sign(value) * (np.abs(value) >> np.minimum(shift, 62))


def towards_zero(x: NDArray[np.float64]) -> Floats:
    """fp64 cut towards 0 to fp32; what is 2**128 and more is infinite."""
    with np.errstate(over="ignore"):
        near = x.astype(fp32)
    too_large = np.abs(near.astype(np.float64)) > np.abs(x)
    too_large &= np.abs(x) < 2.0**128
    return np.where(too_large, np.nextafter(near, fp32(0)), near)


def mma_step(a: Floats, b: Floats, c: Floats) -> Floats:
    """One instruction, of 16 elements of K: c + a @ b.T.

    With e the largest exponent of c and of the products that are not 0 (a product's: the sum of its two operands'),
    each is cut towards 0 to a multiple of 2**(e - 25). Their sum is exact, and cut towards 0 to fp32.

    Args:
        a: [M, 16] bf16 values.
        b: [N, 16] bf16 values.
        c: [M, N] fp32.
    """
    (sa, ea), (sb, eb) = _fields(a), _fields(b)
    products = sa[:, None, :] * sb[None, :, :]
    exponents = np.where(products == 0, _NONE, ea[:, None, :] + eb[None, :, :])
    bits = np.ascontiguousarray(c, fp32).view(np.int32).astype(np.int64)
    field, fraction = bits >> 23 & 255, bits & 0x7FFFFF
    significand = np.where(field == 0, fraction, fraction | 0x800000)
    c_exponent = np.where(significand == 0, _NONE, np.maximum(field, 1) - 127)
    top = np.maximum(exponents.max(-1), c_exponent)
    total = _cut(np.where(bits < 0, -significand, significand) << FRACTION - 23, top - c_exponent)
    total = total + _cut(products << FRACTION - _PRODUCT_FRACTION, top[..., None] - exponents).sum(-1)
    power = np.where(total == 0, 0, top - FRACTION)
    found = towards_zero(np.ldexp(total.astype(np.float64), power))
    finite = np.isfinite(a).all(-1)[:, None] & np.isfinite(b).all(-1) & np.isfinite(c)
    if finite.all():
        return found
    with np.errstate(invalid="ignore", over="ignore"):
        special = (a[:, None, :].astype(np.float64) * b[None].astype(np.float64)).sum(-1) + c
        return np.where(finite, found, special.astype(fp32))


def mma(a: Floats, b: Floats, c: Floats | None = None) -> Floats:
    """c + a @ b.T by the tensor core, K ascending: fp32.

    Args:
        a: [M, K] bf16 values; K is filled up with zeros to a multiple of 16.
        b: [N, K] bf16 values.
        c: [M, N] fp32, zeros if None.
    """
    c = np.zeros((len(a), len(b)), fp32) if c is None else c
    missing = -a.shape[1] % K_STEP
    if missing:
        a, b = (np.pad(one, ((0, 0), (0, missing))) for one in (a, b))
    for start in range(0, a.shape[1], K_STEP):
        c = mma_step(a[:, start : start + K_STEP], b[:, start : start + K_STEP], c)
    return c


Mma = Callable[[Floats, Floats, Floats | None], Floats]
"""What computes as :func:`mma` does."""


def linear(x: Floats, weight: Floats, bias: Floats | None = None, k_slices: int = 1, mma: Mma = mma) -> Floats:
    """x @ weight.T + bias in bf16: one accumulator, or one for each of equal parts of K, which are rounded and added as
    a tree whose nodes are rounded.

    Args:
        x: [M, K] bf16 values.
        weight: [N, K] bf16 values.
        bias: [N] bf16 values, added in fp32; without slices.
        k_slices: parts of K, a power of two.
        mma: what multiplies.
    """
    if k_slices == 1:
        total = mma(x, weight, None)
        return bf16(total if bias is None else total + bias)
    parts = zip(np.split(x, k_slices, 1), np.split(weight, k_slices, 1), strict=True)
    sums = [bf16(mma(*(np.ascontiguousarray(one) for one in part), None)) for part in parts]
    while len(sums) > 1:
        sums = [bf16(left + right) for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


# Rows.


def _halved(x: Floats) -> Floats:
    """The sum of a row of a power of two of elements by halving: element i takes i + half."""
    while x.shape[-1] > 1:
        left, right = np.split(x, 2, axis=-1)
        x = left + right
    return x[..., 0]


def row_sums(x: Floats, threads: int) -> Floats:
    """Sums of rows of a power of two of elements as ``common.triton_rows.row_sums`` has them in ``threads`` threads: 8
    adjacent elements by a tree; then those half a row apart, until each thread has one; then a warp's lanes by halving,
    then warps.
    """
    for _ in range(3):
        if x.shape[-1] > 1:
            x = x[..., 0::2] + x[..., 1::2]
    while x.shape[-1] > threads:
        left, right = np.split(x, 2, axis=-1)
        x = left + right
    if x.shape[-1] <= WARP:
        return _halved(x)
    return _halved(_halved(x.reshape(*x.shape[:-1], -1, WARP)))


def _padded(x: Floats, length: int, value: float = 0.0) -> Floats:
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])], constant_values=value)


def rms_norm(
    x: Floats, weight: Floats | None, eps: float, residual: Floats | None, reduction: Any, adds_one: bool = False
) -> tuple[Floats, Floats]:
    """z * (1 / sqrt(mean(z**2) + eps)), rounded to bf16, * weight, rounded again, of z = x + residual unrounded; and z
    in bf16.

    Args:
        reduction: a ``NormReduction`` on a GPU, of rows that a program holds.
        adds_one: whether it is multiplied with 1 + weight instead, and rounded once.
    """
    z = x if residual is None else x + residual
    squares = _padded(z * z, reduction.block)
    if reduction.halves_first:
        left, right = np.split(squares, 2, axis=-1)
        squares = left + right
    total = row_sums(squares, WARP * reduction.num_warps)
    rstd = fp32(1) / np.sqrt(total / fp32(z.shape[-1]) + fp32(eps))
    normalised = z * rstd[..., None]
    if adds_one:
        return bf16(normalised * (weight + fp32(1))), bf16(z)
    made = bf16(normalised)
    return (made if weight is None else bf16(made * weight)), bf16(z)


def silu_and_mul(x: Floats, tables: Tables) -> Floats:
    """g / (1 + e**-g), rounded to bf16, * u in bf16, of the halves g and u of each row."""
    gate, up = np.split(x, 2, axis=-1)
    with np.errstate(over="ignore"):
        activated = divide(gate, fp32(1) + ex2(gate * MINUS_LOG2_E, tables), tables)
    return bf16(bf16(activated) * up)


def gelu_and_mul(x: Floats, tables: Tables) -> Floats:
    """g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g**3))), rounded to bf16, * u in bf16, of the halves g and u of
    each row: vLLM's kernel, which adds 0 to u.
    """
    gate, up = np.split(x, 2, axis=-1)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        inner = fma(gate * (gate * gate), GELU_CUBE, gate) * GELU_SLOPE
        activated = gate * fp32(0.5) * (tanh(inner, tables) + fp32(1))
        return bf16(bf16(activated) * (up + fp32(0)))


def capped(logits: Floats, soft_cap: float, tables: Tables) -> Floats:
    """soft_cap * tanh(x / soft_cap), each of three operations of PyTorch in bf16."""
    shrunk = bf16(logits * (fp32(1) / fp32(soft_cap)))  # PyTorch divides by a number by its reciprocal
    return bf16(bf16(tanh(shrunk, tables)) * fp32(soft_cap))


def route(logits: Floats, top_k: int, renormalise: bool, reduction: Any, tables: Tables) -> tuple[Floats, Integers]:
    """([tokens, top_k] weights, [tokens, top_k] experts) by e**(x - max) / sum of a router's logits [tokens, experts]:
    the highest first, of equal ones the lowest expert. Renormalised ones are divided by their sum from the first on.

    Args:
        reduction: a ``SoftmaxReduction`` on a GPU, of fp32, of rows that a program holds.
    """
    p = exp(_padded(logits, reduction.block, -np.inf) - logits.max(-1, keepdims=True), tables)
    scores = divide(p, row_sums(p, WARP * reduction.num_warps)[:, None], tables)[:, : logits.shape[-1]]
    experts = np.argsort(-scores, kind="stable", axis=-1)[:, :top_k]
    chosen = np.take_along_axis(scores, experts, -1)
    return (chosen / in_order(chosen.T)[:, None] if renormalise else chosen), experts


def log_softmax(
    logits: Floats, reduction: Any, tables: Tables, exp: Callable[[Floats, Tables], Floats] = exp
) -> Floats:
    """(x - max) - ln(sum of e**(x - max)) in fp32; a row in chunks adds each relative to its own maximum, and then
    these, rescaled.

    Args:
        logits: [rows, vocabulary].
        reduction: a ``SoftmaxReduction`` on a GPU, of fp32.
    """
    threads = WARP * reduction.num_warps
    if reduction.chunk is None:
        m = logits.max(-1, keepdims=True)
        total = row_sums(exp(_padded(logits, reduction.block, -np.inf) - m, tables), threads)
    else:
        chunks = _padded(logits, reduction.num_chunks * reduction.chunk, -np.inf)
        chunks = chunks.reshape(len(logits), reduction.num_chunks, reduction.chunk)
        own = chunks.max(-1)
        finite = np.where(np.isneginf(own), fp32(0), own)
        sums = row_sums(exp(chunks - finite[..., None], tables), threads)
        m = own.max(-1, keepdims=True)
        rescaled = sums * exp(own - m, tables)
        total = row_sums(_padded(rescaled, reduction.padded_chunks), threads)
    return (logits - m) - ln(total)[:, None]


def inverse_frequencies(head_size: int, base: float, scaling: Mapping[str, Any], tables: Tables) -> Floats:
    """[head_size / 2]: 1 / base**(2 i / head_size) as PyTorch computes it on the GPU, by libdevice's ``powf``; of a
    Llama 3 changed as its configuration says.
    """
    exponents = np.arange(0, head_size, 2).astype(fp32) / fp32(head_size)
    found = fp32(1) / power(np.full_like(exponents, base), exponents, tables)
    kind = rope_type(scaling)
    if kind == "llama3":
        length, factor = fp32(scaling["original_max_position_embeddings"]), fp32(1) / fp32(scaling["factor"])
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        wave = fp32(1) / found * fp32(2 * math.pi)  # PyTorch divides by a number, and a number, by reciprocals
        smooth = (fp32(1) / wave * length - fp32(low)) * (fp32(1) / fp32(high - low))
        between = (fp32(1) - smooth) * found * factor + smooth * found
        longer = np.where(wave > fp32(length / low), found * factor, between)
        found = np.where(wave < fp32(length / high), found, longer)
    return found


def power(x: Floats, y: Floats, tables: Tables) -> Floats:
    """libdevice's ``powf`` of a normal positive x, where the result is normal: 2**(y * log2 x), log2 x in two parts."""
    bits = np.ascontiguousarray(x, fp32).view(np.int32)
    scale = (bits - np.int32(0x3F3504F3)) & np.int32(-(1 << 23))
    m = (bits - scale).view(fp32)
    k = scale.astype(fp32) * fp32(2.0**-23)
    reciprocal = rcp(m + fp32(1), tables)
    less = m - fp32(1)
    r = reciprocal * (less + less)
    square = r * r
    p0, p1, p2, p3 = _fp32(0x3A2C32E4, 0x3B52E7DB, 0x3C93BB73, 0x3DF6384F)
    series = fma(fma(fma(p0, square, p1), square, p2), square, p3) * square
    log2_e, log2_e_low = _fp32(0x3FB8AA3B, 0x32A55E34)
    high = fma(r, log2_e, k)
    rest = less - r
    low = reciprocal * fma(-r, less, rest + rest)
    tail = fma(low, log2_e, fma(r, log2_e, k - high))
    tail = fma(series * fp32(3), low, fma(r, log2_e_low, tail))
    tail = fma(series, r, tail)
    total = high + tail
    tail = tail - (total - high)
    product = total * y
    rest = fma(tail, y, fma(total, y, -product))
    whole = np.rint(product)
    fraction = (product - whole) + rest
    value = np.full_like(fraction, _fp32(0x391FCB8E)[0])
    for coefficient in _fp32(0x3AAF85ED, 0x3C1D9856, 0x3D6357BB, 0x3E75FDEC, 0x3F317218, 0x3F800000):
        value = fma(value, fraction, coefficient)
    return np.ldexp(value, whole.astype(np.int32)).astype(fp32)


def rotary_table(positions: int, frequencies: Floats, factor: float = 1.0) -> Floats:
    """[positions, head_size] in bf16: the cosines of each position's angles, then the sines; positions are divided by a
    factor first.
    """
    angles = (np.arange(positions).astype(fp32) * (fp32(1) / fp32(factor)))[:, None] * frequencies
    return bf16(np.concatenate((cosine(angles), cosine(angles, 0)), -1))


def rotate(x: Floats, table: Floats) -> Floats:
    """Each head's halves (a, b) turned: a * cos - b * sin and b * cos + a * sin, in bf16. Products are exact.

    Args:
        x: [tokens, heads, head_size].
        table: [tokens, head_size].
    """
    (a, b), (cos, sin) = np.split(x, 2, axis=-1), np.split(table[:, None], 2, axis=-1)
    return bf16(np.concatenate((a * cos - b * sin, b * cos + a * sin), -1))


# Attention.


def _below(m: Floats) -> Floats:
    return np.where(np.isneginf(m), fp32(0), m)


def _score_tanh(x: Floats, tables: Tables) -> Floats:
    """tanh by a power of two."""
    e = ex2_ftz(np.abs(x) * -TWICE_LOG2_E, tables)
    return divide(np.where(x < 0, e - fp32(1), fp32(1) - e), fp32(1) + e, tables)


def attention(
    q: Floats,
    k: Floats,
    v: Floats,
    scale: float,
    tables: Tables,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Floats:
    """Causal attention of a sequence's last rows over its keys, in bf16.

    A split's tiles of 64 keys are steps of an online softmax: with s = q @ k and c = scale * log2 e in fp32,
    m' = max(m, max(s) * c), p = 2**fma(s, c, -m') in bf16, a = 2**(m - m'); l' = l * a and acc' = acc * a, to which the
    tensor core adds p @ 1 and p @ v. Splits are merged in ascending order: both sides shrink by 2**(m - m'), and the
    second product is added to the first by :func:`fma`. The result is acc / l. With a soft cap s becomes
    C * tanh(s * c / C), C = soft_cap * log2 e, and c is 1 from there on.

    Args:
        q: [rows, heads, head_size], at the last positions.
        k: [keys, kv_heads, head_size].
        v: as k.
        scale: of the scores.
        window: keys that a row sees, its own among them; all if None.
        soft_cap: see above; none if None.
    """
    rows, keys, group, size = len(q), len(k), q.shape[1] // k.shape[1], q.shape[2]
    position = np.arange(keys - rows, keys).repeat(group)
    factor = fp32(scale * math.log2(math.e))
    cap = None if soft_cap is None else fp32(soft_cap * math.log2(math.e))
    unit = factor if cap is None else fp32(1)
    ones = np.ones((8, KEY_TILE), fp32)
    out = np.empty_like(q)
    for kv_head in range(k.shape[1]):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        mine = np.ascontiguousarray(q[:, heads].reshape(rows * group, size))
        whole_m, whole_l = np.full(len(mine), -np.inf, fp32), np.zeros(len(mine), fp32)
        whole = np.zeros((len(mine), size), fp32)
        for split in splits(keys, SPLITS):
            m, l = np.full(len(mine), -np.inf, fp32), np.zeros(len(mine), fp32)
            acc = np.zeros((len(mine), size), fp32)
            for start in range(split.start, split.stop, KEY_TILE):
                at = np.arange(start, min(start + KEY_TILE, split.stop))
                seeing = (position >= start) & (position - at[-1] < (window or keys))
                theirs, values = np.ascontiguousarray(k[at, kv_head]), np.ascontiguousarray(v[at, kv_head].T)
                s = mma(mine[seeing], theirs, None)
                if cap is not None:
                    s = _score_tanh(divide(s * factor, cap, tables), tables) * cap
                distance = position[seeing][:, None] - at
                s = np.where((distance >= 0) & (distance < (window or keys)), s, fp32(-np.inf))
                before = m[seeing]
                m_new = np.maximum(before, s.max(-1) * unit)
                p = bf16(ex2_ftz(fma(s, unit, -_below(m_new)[:, None]), tables))
                shrink = ex2_ftz(before - _below(m_new), tables)
                sums = np.repeat((l[seeing] * shrink)[:, None], len(ones), 1)
                l[seeing] = mma(p, ones[:, : len(at)], sums)[:, 0]
                acc[seeing] = mma(p, values, acc[seeing] * shrink[:, None])
                m[seeing] = m_new
            m_new = np.maximum(whole_m, m)
            of_whole, of_split = (ex2_ftz(one - _below(m_new), tables) for one in (whole_m, m))
            whole_l = fma(whole_l, of_whole, l * of_split)
            whole = fma(whole, of_whole[:, None], acc * of_split[:, None])
            whole_m = m_new
        found = divide(whole, np.where(whole_l == 0, fp32(1), whole_l)[:, None], tables)
        out[:, heads] = bf16(found).reshape(rows, group, size)
    return out
