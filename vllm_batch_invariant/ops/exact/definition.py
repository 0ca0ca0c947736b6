"""The format X16.1 in numpy: every operation of a layer, with the bits that each implementation of it must have.

Sums are sums of integers, whose order cannot matter. What is left is +, -, *, / and sqrt of IEEE 754, each rounded to
nearest even, in the order written here; there is no fused multiply-add, which numpy, JavaScript and old CPUs lack.
Numbers are fp32 unless a name says otherwise, bf16 values are held in fp32, and an array's last dimension is a row. A
row with an infinity or NaN gives NaN.

Integers of rows on power-of-two grids, multiplied by digits: Ootomo et al., "DGEMM on integer matrix multiplication
unit" (arXiv:2306.11975). Nothing is dropped here, so digits, tiles and libraries are schedules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.integer]
fp32 = np.float32

TWO_DIGITS = 127 * 257
"""The largest integer of two signed digits of base 256 within int8, of either sign."""
THREE_DIGITS = 127 * 65_793
LOWEST_EXPONENT = -60
"""Of a row's grid: products of two rows are then far from subnormal numbers."""
MEAN_BITS = 8
"""The grid of a row of activations is no coarser than its mean magnitude / 2**8: what is larger has a third digit."""
LARGEST_K = 65_535
"""Of a product: two int8 products an element then stay within an int32."""
SEGMENTS = 8
"""Parts of K, with grids and sums of their own, in layers whose K tensor-parallel workers may share."""
SEGMENT_STEP = 32
"""Elements by which such a part must be divisible; else K is one part."""
KEY_TILE = 64
"""Keys whose weights have a common grid, from positions that are multiples of it."""
SPLITS = ((0, 256), (2048, 512), (32_768, 1024))
"""(first position, keys) of the splits of attention, ascending: each is a number of tiles."""
WEIGHT_ONE = 127 * 256
"""The integer of a weight of 1 in attention, of two digits."""
NEXT_KEY = 0xD1B54A32D192ED03
"""How far apart the keys of the noise of two positions are: no seeds that people choose are multiples of it apart."""
MASS_BITS = 40
"""Fraction bits of a token's weight in a softmax over the vocabulary."""

LOG2_E = fp32(float.fromhex("0x1.715476p+0"))
LN_2 = fp32(float.fromhex("0x1.62e430p-1"))
LN_2_FP64 = float.fromhex("0x1.62e42fefa39efp-1")
EXP2 = tuple(
    fp32(float.fromhex(c))
    for c in (
        *("0x1p+0", "0x1.62e430p-1", "0x1.ebfbdcp-3", "0x1.c6aee8p-5"),
        *("0x1.3b2d4cp-7", "0x1.5f3e52p-10", "0x1.41fbbcp-13"),
    )
)
"""Of f**0 to f**6: 2**f for f from -1/2 to 1/2, with a relative error of at most 1.1e-7 in these operations."""
ATANH = tuple(
    fp32(float.fromhex(c)) for c in ("0x1p+0", "0x1.555556p-2", "0x1.99999ap-3", "0x1.24924ap-3", "0x1.c71c72p-4")
)
"""Of t**0, t**2, ... of atanh(t) / t, for t from -0.1716 to 0.1716."""
ATANH_FP64 = tuple(1.0 / k for k in range(1, 22, 2))
"""The same, each quotient rounded once."""
TANH = tuple(
    fp32(float.fromhex(c))
    for c in (
        *("0x1p+0", "-0x1.555532p-2", "0x1.110726p-3"),
        *("-0x1.b83c5ap-5", "0x1.52269ap-6", "-0x1.75e1c4p-8"),
    )
)
"""Of x**0, x**2, ... of tanh(x) / x, for x from -:data:`TANH_BY_EXP2` to that."""
TANH_BY_EXP2 = fp32(0.625)
"""From here on tanh is 1 - 2 / (1 + 2**(2 x log2 e)), whose rounding is no more than that of the polynomial."""
GELU = fp32(float.fromhex("-0x1.26aec2p+1")), fp32(float.fromhex("-0x1.a5a7dp-4"))
"""-2 sqrt(2 / pi) log2 e, and that times 0.044715: of x and x**3 in the power of two of GELU."""
SQRT_2 = fp32(float.fromhex("0x1.6a09e6p+0"))
SQRT_2_FP64 = float.fromhex("0x1.6a09e667f3bcdp+0")
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
RADIANS = float.fromhex("0x1.921fb54442d18p-62")
"""2 * pi / 2**64: of a turn's 2**-64."""
SIN = tuple(1.0 / f for f in (1.0, -6.0, 120.0, -5040.0, 362880.0, -39916800.0, 6227020800.0, -1307674368000.0))
"""Of x**0, x**2, ... of sin(x) / x, for x from -pi / 4 to pi / 4; each quotient rounded once."""
COS = tuple(
    1.0 / f for f in (1.0, -2.0, 24.0, -720.0, 40320.0, -3628800.0, 479001600.0, -87178291200.0, 20922789888000.0)
)


def bf16(x: Floats) -> Floats:
    """x rounded to bf16, to nearest even."""
    bits = np.ascontiguousarray(x, fp32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), fp32(np.nan), rounded.view(fp32))


def from_bits(bits: NDArray[np.uint16]) -> Floats:
    """The bf16 values that have the bits."""
    return (bits.astype(np.uint32) << 16).view(fp32)


def to_bits(x: Floats) -> NDArray[np.uint16]:
    """The bits of bf16 values."""
    return (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)


def exponent(x: Floats) -> Integers:
    """The e of |x| = m * 2**e with 1 <= m < 2, and no less than :data:`LOWEST_EXPONENT`."""
    bits = np.ascontiguousarray(x, fp32).view(np.int32)
    return np.maximum((bits >> 23 & 255) - 127, LOWEST_EXPONENT)


def power_of_two(n: Integers) -> Floats:
    """2**n, and 0 for n below -126; n is at most 127."""
    n = np.asarray(n, np.int32)
    return np.where(n < -126, fp32(0), (np.maximum(n, -126) + 127 << 23).view(fp32))


def polynomial(x: NDArray, coefficients: tuple) -> NDArray:
    """Horner's rule from the highest power on: a product and a sum, each rounded."""
    value = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


def exp2(x: Floats) -> Floats:
    """2**x: 0 below -126, and 2**127 from 127 on."""
    inside = np.clip(x, fp32(-126), fp32(127))
    n = np.rint(inside)
    power = power_of_two(np.where(np.isnan(n), fp32(0), n).astype(np.int32))
    return np.where(x < fp32(-126), fp32(0), polynomial(inside - n, EXP2) * power)


def tanh(x: Floats) -> Floats:
    """tanh(x): a polynomial of x**2 times x below :data:`TANH_BY_EXP2`, and from there on of 2**x, with x's sign."""
    large = fp32(1) - fp32(2) / (fp32(1) + exp2(np.abs(x) * (LOG2_E + LOG2_E)))
    is_small = np.abs(x) < TANH_BY_EXP2
    small = np.where(is_small, x, fp32(0))
    return np.where(is_small, small * polynomial(small * small, TANH), np.where(x < 0, -large, large))


def capped(x: Floats, soft_cap: float) -> Floats:
    """tanh(x / soft_cap) * soft_cap."""
    return tanh(x / fp32(soft_cap)) * fp32(soft_cap)


def ln(x: Floats) -> Floats:
    """ln(x) of a positive normal x: k * ln 2 + 2 * atanh((m - 1) / (m + 1)) of x = m * 2**k with m about 1."""
    bits = np.ascontiguousarray(x, fp32).view(np.int32)
    k, m = (bits >> 23) - 127, (bits & 0x7FFFFF | 0x3F800000).view(fp32)
    k, m = np.where(m > SQRT_2, k + 1, k), np.where(m > SQRT_2, m * fp32(0.5), m)
    t = (m - fp32(1)) / (m + fp32(1))
    return k.astype(fp32) * LN_2 + (t + t) * polynomial(t * t, ATANH)


def ln_of_integer(s: Integers) -> NDArray[np.float64]:
    """ln(s) of a positive int64, in fp64 and as :func:`ln`."""
    bits = s.astype(np.float64).view(np.int64)
    k, m = (bits >> 52) - 1023, (bits & (1 << 52) - 1 | 1023 << 52).view(np.float64)
    k, m = np.where(m > SQRT_2_FP64, k + 1, k), np.where(m > SQRT_2_FP64, m * 0.5, m)
    t = (m - 1.0) / (m + 1.0)
    return k.astype(np.float64) * LN_2_FP64 + (t + t) * polynomial(t * t, ATANH_FP64)


@dataclass(frozen=True)
class Rows:
    """Rows of integers, each times a power of two: [..., K] int32, and [...] fp32, NaN for a row that is not finite."""

    integers: Integers
    scale: Floats


def _on_grid(a: Floats, e: Integers) -> Rows:
    finite = np.isfinite(a).all(-1)
    scale = np.where(finite, power_of_two(e), fp32(np.nan))
    values = np.where(finite[..., None], a, fp32(0)) * power_of_two(-e)[..., None]
    return Rows(np.rint(values).astype(np.int32), scale)


def _finest(a: Floats, bits: int, limit: int) -> tuple[Integers, Integers]:
    """The exponent of a row's largest magnitude, and of the finest grid on which that is at most ``limit``, which has
    ``bits`` bits.
    """
    top = np.abs(np.where(np.isfinite(a), a, fp32(0))).max(-1)
    e = exponent(top)
    fits = np.rint(top * power_of_two(bits - 1 - e)) <= limit
    return e, np.where(fits, e, e + 1) - (bits - 1)


def two_digits(a: Floats) -> Rows:
    """Rows of weights, queries, keys and values: on the finest grid on which the row's maximum has two digits."""
    return _on_grid(a, np.maximum(_finest(a, 15, TWO_DIGITS)[1], LOWEST_EXPONENT))


def three_digits(a: Floats) -> Rows:
    """Rows whose squares are added: on the finest grid on which the row's maximum has three digits."""
    return _on_grid(a, np.maximum(_finest(a, 23, THREE_DIGITS)[1], LOWEST_EXPONENT))


def activations(a: Floats) -> Rows:
    """Rows of activations: as :func:`two_digits`, but no coarser than their mean magnitude / 2**:data:`MEAN_BITS`."""
    (e, two), (_, three) = _finest(a, 15, TWO_DIGITS), _finest(a, 23, THREE_DIGITS)
    magnitudes = np.rint(np.abs(np.where(np.isfinite(a), a, fp32(0))) * power_of_two(22 - e)[..., None])
    mean = np.maximum(magnitudes.astype(np.int64).sum(-1) // a.shape[-1], 1)
    by_mean = np.frexp(mean.astype(np.float64))[1] - 1 + e - 22 - MEAN_BITS
    return _on_grid(a, np.maximum(np.maximum(np.minimum(two, by_mean), three), LOWEST_EXPONENT))


def segments(k: int, shared: bool) -> int:
    """Parts of K with grids of their own; ``shared``: whether tensor-parallel workers may share K (row-parallel)."""
    return SEGMENTS if shared and k % (SEGMENTS * SEGMENT_STEP) == 0 else 1


def in_segments(a: Floats, parts: int) -> Floats:
    """[..., parts, K / parts] of [..., K]."""
    return a.reshape(*a.shape[:-1], parts, a.shape[-1] // parts)


def linear(x: Floats, weight: Rows, bias: Floats | None = None) -> Floats:
    """x @ weight.T + bias, in fp32 and rounded once to bf16; bias [N] bf16 values."""
    total = unrounded_linear(x, weight)
    return bf16(total if bias is None else total + bias)


def unrounded_linear(x: Floats, weight: Rows) -> Floats:
    """x @ weight.T in fp32: each segment's product T of integers as fp32(T) * weight's scale * x's scale; the segments
    by a tree of neighbours.

    Args:
        x: [M, K] bf16 values.
        weight: integers [N, segments, K / segments] of :func:`two_digits`, scale [N, segments].
    """
    parts = weight.integers.shape[1]
    rows = activations(in_segments(x, parts))
    sums = []
    for part in range(parts):
        # Every partial sum is an integer below 2**53, so a product in fp64 is exact in any order.
        t = rows.integers[:, part].astype(np.float64) @ weight.integers[:, part].astype(np.float64).T
        sums.append(t.astype(fp32) * weight.scale[:, part] * rows.scale[:, part, None])
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def rms_norm(x: Floats, weight: Floats | None, eps: float, residual: Floats | None = None) -> tuple[Floats, Floats]:
    """z * (1 / sqrt(mean(z**2) + eps)) * weight in bf16, of z = x + residual unrounded; and z in bf16."""
    z = x if residual is None else x + residual
    rows = three_digits(z)
    s = (rows.integers.astype(np.int64) ** 2).sum(-1)
    mean = s.astype(fp32) * rows.scale * rows.scale / fp32(z.shape[-1])
    normalised = z * (fp32(1) / np.sqrt(mean + fp32(eps)))[..., None]
    return bf16(normalised if weight is None else normalised * weight), bf16(z)


def silu_and_mul(x: Floats) -> Floats:
    """g / (1 + 2**(-g * log2 e)) * u in bf16, of the halves g and u of each row."""
    gate, up = np.split(x, 2, axis=-1)
    return bf16(gate / (fp32(1) + exp2(-gate * LOG2_E)) * up)


def gelu_and_mul(x: Floats) -> Floats:
    """g / (1 + 2**(g * (:data:`GELU`[0] + :data:`GELU`[1] * (g * g)))) * u in bf16, of the halves g and u of each row:
    GELU by its approximation with tanh.
    """
    gate, up = np.split(x, 2, axis=-1)
    return bf16(gate / (fp32(1) + exp2(gate * (GELU[0] + GELU[1] * (gate * gate)))) * up)


def scaled(x: Floats, factor: float) -> Floats:
    """x * factor in bf16, the factor rounded to fp32: embeddings, and what a model multiplies besides."""
    return bf16(x * fp32(factor))


def route(logits: Floats, top_k: int, renormalise: bool) -> tuple[Floats, Integers]:
    """([tokens, top_k] weights, [tokens, top_k] experts) by :func:`softmax` of a router's logits [tokens, experts]: the
    highest first, of equal ones the lowest expert. Renormalised ones are divided by their sum from the first on.
    """
    scores = softmax(logits)
    experts = np.argsort(-scores, kind="stable", axis=-1)[:, :top_k]
    chosen = np.take_along_axis(scores, experts, -1)
    return (chosen / in_order(chosen.T)[:, None] if renormalise else chosen), experts


def in_order(terms: Floats) -> Floats:
    """0 + terms[0] + terms[1] + ..., each sum rounded to fp32."""
    total = np.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total


def expert_sum(made: Floats, weights: Floats) -> Floats:
    """What a token's experts make of it, in the order of :func:`route`, times their weights, in bf16.

    Args:
        made: [tokens, top_k, hidden], each of :func:`unrounded_linear`.
        weights: [tokens, top_k].
    """
    return bf16(in_order((made * weights[..., None]).swapaxes(0, 1)))


def turns(head_size: int, base: float, scaling: dict[str, float] | None = None) -> NDArray[np.uint64]:
    """[head_size / 2], by how many 2**-64 of a turn each pair of elements is turned a position. In radians that is
    base**(-2 i / head_size), computed in decimal arithmetic of 50 digits.

    Args:
        scaling: by their names in a configuration, the factors of Llama 3, or the one factor by which every angle is
            divided.
    """
    with localcontext() as context:
        context.prec = 50
        frequencies = [(-Decimal(2 * i) / head_size * Decimal(base).ln()).exp() for i in range(head_size // 2)]
        if scaling is not None:
            scale = _llama_3 if "low_freq_factor" in scaling else _linear
            frequencies = [scale(frequency, scaling) for frequency in frequencies]
        return np.array([int((f / (2 * PI) * 2**64).to_integral_value()) for f in frequencies], np.uint64)


def _linear(frequency: Decimal, scaling: dict[str, float]) -> Decimal:
    return frequency / Decimal(scaling["factor"])


def _llama_3(frequency: Decimal, scaling: dict[str, float]) -> Decimal:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, length = (Decimal(scaling[name]) for name in names)
    cycles = length * frequency / (2 * PI)
    if cycles > high:
        return frequency
    if cycles < low:
        return frequency / factor
    smooth = (cycles - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def rotary_table(positions: int, per_position: NDArray[np.uint64], first: int = 0) -> Floats:
    """[positions, head_size] in bf16, from position ``first`` on: the cosines of its angles, then the sines."""
    angles = np.arange(first, first + positions, dtype=np.uint64)[:, None] * per_position  # modulo a turn
    quarter = angles + np.uint64(1 << 61) >> np.uint64(62)
    x = (angles - (quarter << np.uint64(62))).view(np.int64).astype(np.float64) * RADIANS
    sine, cosine = x * polynomial(x * x, SIN), polynomial(x * x, COS)
    sines = np.choose(quarter.astype(np.int64), (sine, cosine, -sine, -cosine))
    cosines = np.choose(quarter.astype(np.int64), (cosine, -sine, -cosine, sine))
    return bf16(np.concatenate((cosines, sines), -1).astype(fp32))


def rotate(x: Floats, table: Floats) -> Floats:
    """Each head's halves (a, b) turned: a * cos - b * sin and b * cos + a * sin, in bf16.

    Args:
        x: [tokens, heads, head_size].
        table: [tokens, head_size], the rows of :func:`rotary_table` at the tokens' positions.
    """
    (a, b), (cosine, sine) = np.split(x, 2, axis=-1), np.split(table[:, None], 2, axis=-1)
    return bf16(np.concatenate((a * cosine - b * sine, b * cosine + a * sine), -1))


@dataclass(frozen=True)
class Partial:
    """Attention of query rows over some keys: their weights add up to l * 2**m, the weighted values to acc * 2**e, in
    units of 1 / :data:`WEIGHT_ONE`, and of 2**8 of them. m and e are integers held in fp32, -inf for a row that sees
    none of the keys.
    """

    m: Floats
    l: Floats
    e: Floats
    acc: Floats

    def merge(self, later: "Partial") -> "Partial":
        """Both, the one with earlier keys first."""
        m, e = np.maximum(self.m, later.m), np.maximum(self.e, later.e)
        l = self.l * _factor(self.m, m) + later.l * _factor(later.m, m)
        acc = self.acc * _factor(self.e, e)[:, None] + later.acc * _factor(later.e, e)[:, None]
        return Partial(m, l, e, acc)


def _factor(exponent: Floats, common: Floats) -> Floats:
    """2**(exponent - common), 0 for rows that see no key."""
    none = np.isneginf(exponent)
    difference = np.where(none, fp32(-127), exponent - np.where(none, fp32(0), common))
    power = power_of_two(np.maximum(np.nan_to_num(difference), -127))
    return np.where(np.isnan(difference), fp32(np.nan), power)


def attention_tile(
    q: Rows, k: Rows, v: Rows, visible: NDArray[np.bool_], scale: np.float32, soft_cap: float | None = None
) -> Partial:
    """Attention over one tile of keys of a KV head.

    The score s of a query and a key is their product of integers, 8 bits rounded off, times ``scale`` and theirs; with
    a soft cap, of that :func:`capped`, times log2 e.
    m is the largest of ceil(s), and a weight is w = 2**(s - m). Weights add up as integers w * :data:`WEIGHT_ONE`. A
    value with the scale 2**i has the weight w * 2**(m + i - e), where e is the largest of ceil(s) + i; as an integer,
    times the value's integers, 8 bits of the sum rounded off.

    Args:
        q: [rows, head_size].
        k: [keys, head_size].
        v: as k.
        visible: [rows, keys].
        scale: of the scores; without a soft cap, times log2 e.
        soft_cap: of the scores.
    """
    t = q.integers.astype(np.float64) @ k.integers.astype(np.float64).T
    s = np.floor((t + 128) / 256).astype(fp32) * scale * (k.scale * fp32(256)) * q.scale[:, None]
    if soft_cap is not None:
        s = capped(s, soft_cap) * LOG2_E
    i = np.where(np.isnan(v.scale), fp32(np.nan), exponent(v.scale).astype(fp32))
    above = np.where(visible, np.ceil(s), fp32(-np.inf))
    m, e = above.max(-1), np.where(visible, above + i, fp32(-np.inf)).max(-1)
    seen = ~np.isneginf(m)
    w = np.where(visible, exp2(s - np.where(seen, m, fp32(0))[:, None]), fp32(0))
    l = np.rint(np.nan_to_num(w) * fp32(WEIGHT_ONE)).astype(np.int64).sum(-1)
    shift = (np.where(seen, m, fp32(0)) - np.where(seen, e, fp32(0)))[:, None] + i
    w = w * power_of_two(np.clip(np.nan_to_num(shift), -127, 126))
    u = np.rint(np.nan_to_num(w) * fp32(WEIGHT_ONE)).astype(np.float64)
    acc = np.floor((u @ v.integers.astype(np.float64) + 128) / 256)
    return Partial(m, l.astype(fp32), e, acc.astype(fp32))


def attention(
    q: Floats, k: Floats, v: Floats, scale: float, window: int | None = None, soft_cap: float | None = None
) -> Floats:
    """Causal attention of a sequence's last rows over its keys: the tiles of each split, and then the splits, merged in
    ascending order; acc / l * 2**(e - m), in bf16.

    Args:
        q: [rows, heads, head_size], at the last positions.
        k: [keys, kv_heads, head_size].
        v: as k.
        scale: of the scores.
        window: how many keys a row sees, up to its own; None for all.
        soft_cap: of the scores; None for none.
    """
    rows, keys, group = len(q), len(k), q.shape[1] // k.shape[1]
    position = np.arange(keys - rows, keys)
    factor = fp32(scale) * LOG2_E if soft_cap is None else fp32(scale)
    out = np.empty_like(q)
    for kv_head in range(k.shape[1]):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        mine = two_digits(q[:, heads].reshape(rows * group, -1))
        theirs = two_digits(k[:, kv_head]), two_digits(v[:, kv_head])
        whole = None
        for split in splits(keys):
            part = None
            for start in range(split.start, split.stop, KEY_TILE):
                at = np.arange(start, min(start + KEY_TILE, split.stop))
                visible = at <= position[:, None]
                if window is not None:
                    visible &= at > position[:, None] - window
                tile = [Rows(held.integers[at], held.scale[at]) for held in theirs]
                one = attention_tile(mine, *tile, visible.repeat(group, 0), factor, soft_cap)
                part = one if part is None else part.merge(one)
            whole = part if whole is None else whole.merge(part)
        shift = whole.e - whole.m
        power = power_of_two(np.nan_to_num(np.clip(shift, -127, 119)) + 8)
        found = whole.acc / whole.l[:, None] * np.where(np.isnan(shift), fp32(np.nan), power)[:, None]
        out[:, heads] = bf16(found).reshape(rows, group, -1)
    return out


def splits(keys: int, sizes: Sequence[tuple[int, int]] = SPLITS) -> list[slice]:
    """The positions of each split of so many keys, ascending, of sizes by the first position that has them."""
    found, start = [], 0
    while start < keys:
        size = max(split for split in sizes if split[0] <= start)[1]
        found.append(slice(start, min(start + size, keys)))
        start += size
    return found


def weights(logits: Floats) -> Integers:
    """Softmax weights of a row as integers: 2**((x - max) * log2 e) * 2**:data:`MASS_BITS`, int64. A row whose largest
    logit is not finite has none.
    """
    top = logits.max(-1, keepdims=True)
    logits = np.where(np.isfinite(top), logits, fp32(-np.inf))
    top = np.where(np.isfinite(top), top, fp32(0))
    return np.rint(exp2((logits - top) * LOG2_E) * fp32(2.0**MASS_BITS)).astype(np.int64)


def softmax(logits: Floats) -> Floats:
    """Each weight / the sum of weights, both rounded to fp32."""
    mass = weights(logits)
    total = mass.sum(-1, keepdims=True)
    return np.where(total > 0, mass.astype(fp32) / np.maximum(total, 1).astype(fp32), fp32(np.nan))


def log_softmax(logits: Floats) -> Floats:
    """(x - max) - ln(sum of weights): the logarithm in fp64, rounded once to fp32."""
    top = logits.max(-1, keepdims=True)
    total = weights(logits).sum(-1, keepdims=True)
    log = ln_of_integer(np.maximum(total, 1)) - MASS_BITS * LN_2_FP64
    finite = np.where(total > 0, top, fp32(0))
    return np.where(total > 0, (logits - finite) - log.astype(fp32), fp32(np.nan))


def top_k_top_p(logits: Floats, k: int, p: float) -> Floats:
    """Logits with -inf for all but the k largest (k = 0: all), and of these for all but the first whose weights add up
    to p of their sum, rounded up to an integer: the largest first, of equal ones the lowest token.
    """
    order = np.argsort(-logits, kind="stable", axis=-1)
    kept = np.take_along_axis(logits, order, -1)
    if k:
        kept = np.where(np.arange(kept.shape[-1]) < k, kept, fp32(-np.inf))
    if p < 1:
        mass = weights(kept)
        total = mass.sum(-1, keepdims=True)
        wanted = np.clip(np.ceil(np.float64(fp32(p)) * total.astype(np.float64)).astype(np.int64), 1, total)
        kept = np.where(mass.cumsum(-1) - mass < wanted, kept, fp32(-np.inf))
    out = np.empty_like(kept)
    np.put_along_axis(out, order, kept, -1)
    return out


def penalised(
    logits: Floats, in_prompt: NDArray[np.bool_], counts: Integers, repetition: float, frequency: float, presence: float
) -> Floats:
    """Logits after a request's penalties, in vLLM's order.

    Args:
        in_prompt: [vocabulary], whether the prompt has a token.
        counts: [vocabulary], how often the output has it.
        repetition: logits of tokens in either are divided by it (times its reciprocal) above 0, and multiplied below.
        frequency: is subtracted, times the count.
        presence: is subtracted from those of tokens in the output.
    """
    factor = np.where(in_prompt | (counts > 0), fp32(repetition), fp32(1))
    logits = logits * np.where(logits > 0, fp32(1) / factor, factor)
    logits = logits - fp32(frequency) * counts.astype(fp32)
    return logits - fp32(presence) * (counts > 0).astype(fp32)


def min_p(logits: Floats, p: float) -> Floats:
    """Logits with -inf for tokens whose probability is below the largest one's times p."""
    probability = softmax(logits)
    return np.where(probability < probability.max(-1, keepdims=True) * fp32(p), fp32(-np.inf), logits)


def key_of(seed: int, position: int) -> int:
    """What a token's noise is made of: that of the next position is this plus :data:`NEXT_KEY`, modulo 2**64."""
    return (seed + position * NEXT_KEY) % 2**64


def uniform(seed: int, position: int, tokens: NDArray[np.uint64]) -> Floats:
    """A number above 0 and below 1 for each token: 64 bits of a hash of seed, position and token, rounded to fp32.

    The hash is SplitMix64's (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), first of
    :func:`key_of`, then of that and the token.
    """
    held = np.full(1, key_of(seed, position), np.uint64)
    for number in (np.uint64(0), tokens):
        held = held + number + np.uint64(0x9E3779B97F4A7C15)
        held = (held ^ held >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        held = (held ^ held >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        held = held ^ held >> np.uint64(31)
    # Half a unit of 2**-62 keeps it above 0; what rounds to 1 becomes the number before it.
    u = (held >> np.uint64(2)).astype(np.int64).astype(fp32) * fp32(2.0**-62) + fp32(2.0**-63)
    return np.minimum(u, fp32(1 - 2.0**-24))


def gumbel(seed: int, position: int, tokens: NDArray[np.uint64]) -> Floats:
    """Noise -ln(-ln(1 - u)) of :func:`uniform`; where u is small, -ln(1 - u) is 2 * atanh(u / (2 - u))."""
    u = uniform(seed, position, tokens)
    t = u / (fp32(2) - u)
    exponential = np.where(u < fp32(0.25), (t + t) * polynomial(t * t, ATANH), -ln(fp32(1) - u))
    return -ln(exponential)


def draw(
    logits: Floats, temperature: float, k: int, p: float, seed: int, position: int, smallest_p: float = 0.0
) -> int:
    """The token that a request with a seed takes, given its row of logits.

    Args:
        logits: [vocabulary], after penalties and other changes.
        temperature: 0 takes the largest; else the row is divided by it.
        k: see :func:`top_k_top_p`.
        p: see :func:`top_k_top_p`.
        seed: of the request.
        position: of the token among the request's output.
        smallest_p: see :func:`min_p`.
    """
    if temperature == 0:
        return int(logits.argmax())
    heated = logits / fp32(temperature)
    kept = top_k_top_p(min_p(heated, smallest_p) if smallest_p > 0 else heated, k, p)
    return int((kept + gumbel(seed, position, np.arange(len(logits), dtype=np.uint64))).argmax())
