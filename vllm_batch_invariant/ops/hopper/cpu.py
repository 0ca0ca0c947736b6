"""What takes time of :mod:`.definition`, in numba: the same bits, by vectors of sixteen columns and on many threads.

Where an exponent is so large or so small that vectors do not serve, or an operand is no number, integers are
added, one column at a time.
"""

import math
import warnings
from typing import Any

import numpy as np
import torch
from numba import prange, types
from numpy.typing import NDArray

from ..common.numba_exact_math import bits_of_float
from ..common.numba_math import float_of_bits, fma
from ..common.numba_rows import RowKernel, compiled
from ..common.numba_simd import WIDTH, load, store
from ..common.numba_tensor_core import NO_NUMBER, ZERO, are_usual, instruction
from ..exact.definition import Floats, splits, to_bits
from . import definition
from .definition import (
    FRACTION,
    GELU_CUBE,
    GELU_SLOPE,
    K_STEP,
    KEY_TILE,
    LARGE,
    LOG2_E,
    MINUS_LOG2_E,
    SMALLEST_NORMAL,
    TANH,
    TANH_BY_EX2,
    TANH_IS_1,
    TWICE_LOG2_E,
    WARP,
)
from .tables import Tables

largest_exponents, add_products = instruction(K_STEP, FRACTION, kept=23)
_TANH_0, _TANH_1, _TANH_2, _TANH_3, _ = TANH
_BLOCK_K = 256
"""Elements of K of a panel of sixteen columns that lies in the first cache."""
_BLOCK_ROWS = 64
"""Rows of a head that a thread computes attention of."""
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
    if abs(np.float64(near)) > abs(exact) and abs(exact) < 2.0**128:
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


def _chain(c, x, x_exponents, at, depth, b, b_exponents, panel):
    """c and ``depth`` products of x from ``at`` on with sixteen columns, rows of b from ``panel`` on."""
    for i in range(0, depth, K_STEP):
        e = largest_exponents(c, x_exponents, at + i, b_exponents, panel + i)
        if are_usual(e):
            c = add_products(c, e, x, at + i, b, panel + i)
        else:
            columns = np.empty(WIDTH, np.float32)
            store(c, columns, 0)
            for column in range(WIDTH):
                columns[column] = _one_step(x, at + i, b, panel + i, column, columns[column])
            c = load(columns, 0)
    return c


_chain = compiled(_chain)


def _bf16(x):
    """x rounded to bf16, to nearest even."""
    if x != x:
        return np.float32(np.nan)
    bits = bits_of_float(x)
    return float_of_bits((bits + np.int32(0x7FFF) + (bits >> np.int32(16) & np.int32(1))) & np.int32(-65536))


_bf16 = compiled(_bf16)


def _multiply_kernel(a, a_exponents, weight, bias, is_rounded, out, first_column):
    """out[:, first_column:] [M, N] += a @ weight.T + bias, or where it is rounded to bf16, that without what was there.

    Args:
        a: [M, K] fp32, K a multiple of 16.
        weight: [N, K], bits of bf16.
        bias: [N] fp32, or none.
    """
    rows, k = a.shape
    columns = weight.shape[0]
    panels, blocks = (columns + WIDTH - 1) // WIDTH, (rows + _BLOCK_M - 1) // _BLOCK_M
    for part in prange(panels * blocks):
        b, sums = np.zeros(_BLOCK_K * WIDTH, np.float32), np.zeros(_BLOCK_M * WIDTH, np.float32)
        b_exponents = np.empty(_BLOCK_K * WIDTH, np.int16)
        first, first_row = part // blocks * WIDTH, part % blocks * _BLOCK_M
        width, count = min(WIDTH, columns - first), min(_BLOCK_M, rows - first_row)
        if not is_rounded:
            for row in range(count):
                for column in range(width):
                    sums[row * WIDTH + column] = out[first_row + row, first_column + first + column]
        for start in range(0, k, _BLOCK_K):
            depth = min(_BLOCK_K, k - start)
            for column in range(width):
                for i in range(depth):
                    b[i * WIDTH + column] = float_of_bits(np.int32(weight[first + column, start + i]) << np.int32(16))
            for i in range(depth * WIDTH):
                b_exponents[i] = _exponent_of(b[i])
            for row in range(count):
                x, x_exponents, c = a[first_row + row], a_exponents[first_row + row], load(sums, row * WIDTH)
                store(_chain(c, x, x_exponents, start, depth, b, b_exponents, 0), sums, row * WIDTH)
        for row in range(count):
            for column in range(width):
                c = sums[row * WIDTH + column]
                if len(bias):
                    c += bias[first + column]
                out[first_row + row, first_column + first + column] = _bf16(c) if is_rounded else c


_multiply = RowKernel(_multiply_kernel)


def _multiplied(
    a: Floats, bits: NDArray[np.uint16], bias: Floats | None, is_rounded: bool, out: Floats, first_column: int = 0
) -> None:
    """:func:`_multiply_kernel` of any K."""
    if missing := -a.shape[1] % K_STEP:
        a, bits = (np.pad(one, ((0, 0), (0, missing))) for one in (a, bits))
    a, bias = np.ascontiguousarray(a), np.empty(0, np.float32) if bias is None else bias
    exponents = np.empty(a.shape, np.int16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # of a file's weights
        weight = torch.from_numpy(np.ascontiguousarray(bits))
    _exponents(a.size, a, exponents)
    _multiply(a.size * len(bits), a, exponents, weight, bias, is_rounded, out, first_column)


def mma(a: Floats, b: Floats | NDArray[np.uint16], c: Floats | None = None) -> Floats:
    """:func:`.definition.mma`, also of the bits of b."""
    out = np.zeros((len(a), len(b)), np.float32) if c is None else c.copy()
    _multiplied(a, b if b.dtype == np.uint16 else to_bits(b), None, False, out)
    return out


def linear(
    x: Floats, bits: NDArray[np.uint16], bias: Floats | None, k_slices: int, out: Floats, first_column: int
) -> None:
    """:func:`.decoder.linear`."""
    if k_slices == 1:
        _multiplied(x, bits, bias, True, out, first_column)
    else:
        out[:, first_column : first_column + len(bits)] = definition.linear(x, bits, bias, k_slices, mma)


def _rows(x: Floats) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x.reshape(-1, x.shape[-1])))


def _row_sum(x, count, threads):
    """:func:`.definition.row_sums` of the first elements of x, which it overwrites."""
    for _ in range(3):
        if count > 1:
            count //= 2
            for i in range(count):
                x[i] = x[2 * i] + x[2 * i + 1]
    while count > threads:
        count //= 2
        for i in range(count):
            x[i] += x[i + count]
    if count > WARP:
        count //= WARP
        for warp in range(count):
            half = WARP // 2
            while half:
                for lane in range(half):
                    x[warp * WARP + lane] += x[warp * WARP + lane + half]
                half //= 2
            x[warp] = x[warp * WARP]
    while count > 1:
        count //= 2
        for i in range(count):
            x[i] += x[i + count]
    return x[0]


_row_sum = compiled(_row_sum)


def _norm_kernel(x, weight, adds_one, eps, residual, block, halves_first, threads, out, z):
    """out and z [rows, size], as :func:`.definition.rms_norm` has them; weight and residual may be empty."""
    rows, size = x.shape
    for row in prange(rows):
        squares = np.zeros(block, np.float32)
        for i in range(size):
            z[row, i] = x[row, i] + residual[row, i] if len(residual) else x[row, i]
            squares[i] = z[row, i] * z[row, i]
        count = block
        if halves_first:
            count //= 2
            for i in range(count):
                squares[i] += squares[i + count]
        total = _row_sum(squares, count, threads)
        rstd = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            made = z[row, i] * rstd
            if not adds_one:
                made = _bf16(made)
            if len(weight):
                made *= weight[i] + np.float32(1) if adds_one else weight[i]
            out[row, i] = _bf16(made)
            z[row, i] = _bf16(z[row, i])


_norm = RowKernel(_norm_kernel)


def rms_norm(
    x: Floats, weight: Floats | None, eps: float, residual: Floats | None, reduction: Any, adds_one: bool = False
) -> tuple[Floats, Floats]:
    """:func:`.definition.rms_norm`."""
    rows = _rows(x)
    weight = np.empty(0, np.float32) if weight is None else weight
    residual = torch.empty(0, 0) if residual is None else _rows(residual)
    out, z = torch.empty_like(rows), torch.empty_like(rows)
    how = reduction.block, reduction.halves_first, WARP * reduction.num_warps
    _norm(x.size, rows, weight, adds_one, np.float32(eps), residual, *how, out, z)
    return out.numpy().reshape(x.shape), z.numpy().reshape(x.shape)


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
    if at < 0 and at & 0x7FFFFF:
        at -= 1
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


def _reciprocal(x, table):
    """:func:`.definition.rcp` of one number."""
    bits = bits_of_float(x)
    field, fraction = bits >> np.int32(23) & np.int32(255), bits & np.int32(0x7FFFFF)
    if field == 0:
        reciprocal = np.float32(np.inf)
    elif field == 255:
        reciprocal = np.float32(np.nan) if fraction else np.float32(0)
    else:
        reciprocal = np.float32(np.ldexp(np.float64(table[fraction]), 103 - field))
    return -reciprocal if bits < 0 else reciprocal


_reciprocal = compiled(_reciprocal)


def _divide(a, b, table):
    """:func:`.definition.divide` of two numbers."""
    size = abs(b)
    factor = np.float32(1)
    if size > LARGE:
        factor = np.float32(0.25)
    elif size < SMALLEST_NORMAL:
        factor = np.float32(16777216.0)
    return (a * factor) * _reciprocal(b * factor, table)


_divide = compiled(_divide)


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


def _tanh(x, exp2, rcp):
    """:func:`.definition.tanh` of one number."""
    size = abs(x)
    if size >= TANH_IS_1:
        return np.float32(1) if x > 0 else np.float32(-1)
    if size >= TANH_BY_EX2:
        reciprocal = _reciprocal(_ex2_ftz(size * TWICE_LOG2_E, exp2) + np.float32(1), rcp)
        large = fma(reciprocal, np.float32(-2), np.float32(1))
        return large if x > 0 else -large
    square, value = x * x, _TANH_0
    value = fma(square, value, _TANH_1)
    value = fma(square, value, _TANH_2)
    value = fma(square, value, _TANH_3)
    return fma(x, fma(square, value, np.float32(0)), x)


_tanh = compiled(_tanh)


def _gelu_kernel(x, exp2, rcp, out):
    size = out.shape[1]
    for row in prange(x.shape[0]):
        for i in range(size):
            gate = x[row, i]
            inner = fma(gate * (gate * gate), GELU_CUBE, gate) * GELU_SLOPE
            activated = gate * np.float32(0.5) * (_tanh(inner, exp2, rcp) + np.float32(1))
            out[row, i] = _bf16(_bf16(activated) * (x[row, size + i] + np.float32(0)))


_exps, _silu, _gelu = RowKernel(_exp_kernel), RowKernel(_silu_kernel), RowKernel(_gelu_kernel)


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


def gelu_and_mul(x: Floats, tables: Tables) -> Floats:
    """:func:`.definition.gelu_and_mul`."""
    out = torch.empty(len(x), x.shape[-1] // 2)
    _gelu(x.size, _rows(x), torch.from_numpy(tables.exp2), torch.from_numpy(tables.rcp), out)
    return out.numpy()


def _below(m):
    """What is subtracted from scores whose largest is m."""
    return np.float32(0) if m == -np.inf else m


_below = compiled(_below)


def _capped(s, cap, exp2, rcp):
    """A score with a soft cap."""
    x = _divide(s, cap, rcp)
    e = _ex2_ftz(abs(x) * -TWICE_LOG2_E, exp2)
    return _divide(e - np.float32(1) if x < 0 else np.float32(1) - e, np.float32(1) + e, rcp) * cap


_capped = compiled(_capped)


def _attend_kernel(
    q, q_exponents, position, k, k_exponents, v, v_exponents, ones, ones_exponents, splits, keys, window, factor, cap,
    exp2, rcp, out,
):  # fmt: skip
    """out [kv_heads, rows, size], as :func:`.definition.attention`.

    Args:
        q: [kv_heads, rows, size] fp32, the heads of a token one after the other.
        position: [rows] of each row's token.
        k: panels [kv_heads, tiles, 4, size, 16], flat: sixteen keys side by side.
        v: panels [kv_heads, tiles, size / 16, 64, 16], flat: sixteen dimensions side by side.
        ones: a panel [64, 16].
        splits: [splits, 2], the first key and the end.
        cap: of the scores, times log2 e; 0 if they have none.
    """
    kv_heads, rows, size = q.shape
    unit = np.float32(1) if cap > 0 else factor
    blocks, tiles = (rows + _BLOCK_ROWS - 1) // _BLOCK_ROWS, (keys + KEY_TILE - 1) // KEY_TILE
    for part in prange(kv_heads * blocks):
        kv_head, first = part // blocks, part % blocks * _BLOCK_ROWS
        count = min(_BLOCK_ROWS, rows - first)
        all_m, all_l = np.full(count, -np.inf, np.float32), np.zeros(count, np.float32)
        all_acc, acc = np.zeros((count, size), np.float32), np.empty((count, size), np.float32)
        m, l = np.empty(count, np.float32), np.empty(count, np.float32)
        p, p_exponents = np.empty(KEY_TILE, np.float32), np.empty(KEY_TILE, np.int16)
        lanes = np.empty(WIDTH, np.float32)
        for split in range(len(splits)):
            m[:], l[:], acc[:] = -np.inf, 0, 0
            for start in range(splits[split, 0], splits[split, 1], KEY_TILE):
                tile = kv_head * tiles + start // KEY_TILE
                for row in range(count):
                    seen = min(position[first + row] - start + 1, splits[split, 1] - start, KEY_TILE)
                    unseen = max(position[first + row] - window + 1 - start, 0)
                    if seen <= unseen:
                        continue
                    x, x_exponents = q[kv_head, first + row], q_exponents[kv_head, first + row]
                    for group in range(KEY_TILE // WIDTH):
                        lanes[:] = 0
                        panel = (tile * (KEY_TILE // WIDTH) + group) * size
                        c = _chain(load(lanes, 0), x, x_exponents, 0, size, k, k_exponents, panel)
                        store(c, p, group * WIDTH)
                    if cap > 0:
                        for i in range(unseen, seen):
                            p[i] = _capped(p[i] * factor, cap, exp2, rcp)
                    largest = p[unseen]
                    for i in range(unseen + 1, seen):
                        largest = max(largest, p[i])
                    m_new = max(m[row], largest * unit)
                    for i in range(KEY_TILE):
                        weight = np.float32(0)
                        if unseen <= i < seen:
                            weight = _bf16(_ex2_ftz(fma(p[i], unit, -_below(m_new)), exp2))
                        p[i] = weight
                        p_exponents[i] = _exponent_of(weight)
                    shrink = _ex2_ftz(m[row] - _below(m_new), exp2)
                    lanes[:] = l[row] * shrink
                    store(_chain(load(lanes, 0), p, p_exponents, 0, KEY_TILE, ones, ones_exponents, 0), lanes, 0)
                    l[row], m[row] = lanes[0], m_new
                    for i in range(size):
                        acc[row, i] *= shrink
                    for group in range(size // WIDTH):
                        panel = (tile * (size // WIDTH) + group) * KEY_TILE
                        c = load(acc[row], group * WIDTH)
                        c = _chain(c, p, p_exponents, 0, KEY_TILE, v, v_exponents, panel)
                        store(c, acc[row], group * WIDTH)
            for row in range(count):
                m_new = max(all_m[row], m[row])
                of_all, of_split = _ex2_ftz(all_m[row] - _below(m_new), exp2), _ex2_ftz(m[row] - _below(m_new), exp2)
                all_l[row] = fma(all_l[row], of_all, l[row] * of_split)
                for i in range(size):
                    all_acc[row, i] = fma(all_acc[row, i], of_all, acc[row, i] * of_split)
                all_m[row] = m_new
        for row in range(count):
            divisor = np.float32(1) if all_l[row] == 0 else all_l[row]
            for i in range(size):
                out[kv_head, first + row, i] = _bf16(_divide(all_acc[row, i], divisor, rcp))


_attend = RowKernel(_attend_kernel)


def _panels(x: Floats) -> tuple[torch.Tensor, torch.Tensor]:
    """[kv_heads, columns, K] as panels [kv_heads, columns / 16, K, 16], flat, and their exponents."""
    kv_heads, columns, depth = x.shape
    panels = np.ascontiguousarray(x.reshape(kv_heads, columns // WIDTH, WIDTH, depth).swapaxes(2, 3)).reshape(1, -1)
    exponents = torch.empty(panels.shape, dtype=torch.int16)
    values = torch.from_numpy(panels)
    _exponents(panels.size, values, exponents)
    return values[0], exponents[0]


def attention(
    q: Floats,
    k: Floats,
    v: Floats,
    scale: float,
    tables: Tables,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Floats:
    """:func:`.definition.attention`."""
    (rows, heads, size), (keys, kv_heads, _) = q.shape, k.shape
    group, missing = heads // kv_heads, -keys % KEY_TILE
    k, v = (np.pad(one, ((0, missing), (0, 0), (0, 0))).transpose(1, 0, 2) for one in (k, v))
    tiles = v.reshape(kv_heads, -1, KEY_TILE, size).swapaxes(2, 3).reshape(kv_heads, -1, KEY_TILE)
    mine = np.ascontiguousarray(q.reshape(rows, kv_heads, group, size).transpose(1, 0, 2, 3))
    mine = torch.from_numpy(mine.reshape(kv_heads, rows * group, size))
    exponents = torch.empty(mine.shape, dtype=torch.int16)
    _exponents(q.size, mine.view(-1, size), exponents.view(-1, size))
    position = torch.arange(keys - rows, keys).repeat_interleave(group)
    ones = _panels(np.ones((1, WIDTH, KEY_TILE), np.float32))
    bounds = torch.tensor([[split.start, split.stop] for split in splits(keys, definition.SPLITS)])
    factors = [np.float32(one * math.log2(math.e)) for one in (scale, soft_cap or 0)]
    found = torch.empty_like(mine)
    _attend(
        q.size * keys, mine, exponents, position, *_panels(k), *_panels(tiles), *ones, bounds, keys, window or keys,
        *factors, torch.from_numpy(tables.exp2), torch.from_numpy(tables.rcp), found,
    )  # fmt: skip
    back = found.numpy().reshape(kv_heads, rows, group, size).transpose(1, 0, 2, 3)
    return np.ascontiguousarray(back).reshape(rows, heads, size)
