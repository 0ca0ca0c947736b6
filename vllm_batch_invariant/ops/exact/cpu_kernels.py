"""Kernels of exact arithmetic for numba: rows on their grids, and what is computed of them."""

import numpy as np
from numba import njit, prange

from ..common.numba_exact_math import (
    activations,
    capped,
    exp2,
    exponent,
    gumbel,
    ln_of_integer,
    mass,
    power_of_two,
    three_digits,
    two_digits,
)
from ..common.numba_math import float_of_bits
from ..common.numba_rows import RowKernel
from .definition import GELU, KEY_TILE, LN_2_FP64, LOG2_E, MASS_BITS, WEIGHT_ONE

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LN_MASS_ONE = MASS_BITS * LN_2_FP64
_WEIGHT_ONE = np.float32(WEIGHT_ONE)
_MINUS_INFINITY = np.float32(-np.inf)
_GELU_1, _GELU_3 = GELU


def _activations_kernel(rows, integers, scale):
    for row in prange(rows.shape[0]):
        scale[row] = activations(rows[row], integers[row])


def _weights_kernel(rows, integers, scale):
    for row in prange(rows.shape[0]):
        scale[row] = two_digits(rows[row], integers[row])


def _products_kernel(x, weight, out):
    # x [M, K] int32, weight [N, K] int16, out [M, N] int64
    for n in prange(weight.shape[0]):
        w = weight[n]
        for m in range(x.shape[0]):
            row, total = x[m], np.int64(0)
            for k in range(w.size):
                total += np.int64(row[k]) * np.int64(w[k])
            out[m, n] = total


def _rms_norm_kernel(rows, out, eps):
    for row in prange(rows.shape[0]):
        z, y = rows[row], out[row]
        integers = np.empty(z.size, np.int32)
        scale = three_digits(z, integers)
        total = np.int64(0)
        for k in range(z.size):
            total += np.int64(integers[k]) * np.int64(integers[k])
        mean = np.float32(total) * scale * scale / np.float32(z.size)
        r = _ONE / np.sqrt(mean + np.float32(eps))
        for k in range(z.size):
            y[k] = z[k] * r


def _silu_and_mul_kernel(rows, out):
    for row in prange(rows.shape[0]):
        x, y = rows[row], out[row]
        for k in range(y.size):
            gate = x[k]
            y[k] = gate / (_ONE + exp2(-gate * LOG2_E)) * x[k + y.size]


def _gelu_and_mul_kernel(rows, out):
    for row in prange(rows.shape[0]):
        x, y = rows[row], out[row]
        for k in range(y.size):
            gate = x[k]
            y[k] = gate / (_ONE + exp2(gate * (_GELU_1 + _GELU_3 * (gate * gate)))) * x[k + y.size]


def _capped_kernel(rows, out, soft_cap):
    for row in prange(rows.shape[0]):
        x, y = rows[row], out[row]
        for k in range(y.size):
            y[k] = capped(x[k], np.float32(soft_cap))


@njit(error_model="numpy")
def _top_and_mass(x):
    top, is_nan = x[0], False
    for i in range(x.size):
        is_nan |= x[i] != x[i]
        top = max(top, x[i])
    if is_nan or abs(top) == np.inf:
        return np.float32(np.nan), np.int64(1)
    total = np.int64(0)
    for i in range(x.size):
        total += mass(x[i] - top)
    return top, total


def _softmax_kernel(rows, out):
    for row in prange(rows.shape[0]):
        x, y = rows[row], out[row]
        top, total = _top_and_mass(x)
        for i in range(x.size):
            y[i] = top if top != top else np.float32(mass(x[i] - top)) / np.float32(total)


def _log_softmax_kernel(rows, out):
    for row in prange(rows.shape[0]):
        x, y = rows[row], out[row]
        top, total = _top_and_mass(x)
        log = np.float32(ln_of_integer(total) - _LN_MASS_ONE)
        for i in range(x.size):
            y[i] = (x[i] - top) - log


def _draw_kernel(rows, keys, tokens):
    for row in prange(rows.shape[0]):
        x, best, chosen = rows[row], _MINUS_INFINITY, 0
        for token in range(x.size):
            if x[token] > _MINUS_INFINITY:
                score = x[token] + gumbel(keys[row], token)
                if score > best:
                    best, chosen = score, token
        tokens[row] = chosen


to_activations = RowKernel(_activations_kernel)
to_weights = RowKernel(_weights_kernel)
products = RowKernel(_products_kernel)
normalise = RowKernel(_rms_norm_kernel)
silu_and_mul = RowKernel(_silu_and_mul_kernel)
gelu_and_mul = RowKernel(_gelu_and_mul_kernel)
cap = RowKernel(_capped_kernel)
softmax = RowKernel(_softmax_kernel)
log_softmax = RowKernel(_log_softmax_kernel)
draw = RowKernel(_draw_kernel)


@njit(error_model="numpy")
def _factor(exponent, common):
    """2**(exponent - common) of a part that has a visible key, or -inf."""
    if exponent == _MINUS_INFINITY:
        return np.float32(0.0)
    difference = exponent - common
    return difference if difference != difference else power_of_two(np.int32(max(difference, np.float32(-127.0))))


@njit(error_model="numpy")
def _larger(a, b):
    """The larger one, NaN if one is NaN."""
    return a if a != a or a > b else b


@njit(error_model="numpy")
def _merge(ml, e_acc, later_ml, later_e_acc, row):
    """Merge one row's partial result with that of later keys, in place: (m, l), and e followed by acc."""
    m, e = _larger(ml[row, 0], later_ml[row, 0]), _larger(e_acc[row, 0], later_e_acc[row, 0])
    ml[row, 1] = ml[row, 1] * _factor(ml[row, 0], m) + later_ml[row, 1] * _factor(later_ml[row, 0], m)
    old, new = _factor(e_acc[row, 0], e), _factor(later_e_acc[row, 0], e)
    for d in range(1, e_acc.shape[1]):
        e_acc[row, d] = e_acc[row, d] * old + later_e_acc[row, d] * new
    ml[row, 0], e_acc[row, 0] = m, e


@njit(error_model="numpy")
def _key_rows(cache, pages, head, start, stop, page_size, held, integers, scale):
    """The integers and scales of the positions from ``start`` to ``stop`` of a cache of bf16 bits."""
    for position in range(start, stop):
        bits = cache[pages[position // page_size], head, position % page_size]
        for d in range(held.size):
            held[d] = float_of_bits(np.int32(bits[d]) << np.int32(16))
        scale[position - start] = two_digits(held, integers[position - start])


@njit(error_model="numpy")
def _tile(q, q_scale, k, k_scale, v, v_scale, first, last, factor, soft_cap, s, u, total, ml, e_acc, row):
    """One row's attention over the keys from ``first`` to ``last`` of a tile."""
    m, e = _MINUS_INFINITY, _MINUS_INFINITY
    for j in range(first, last):
        t = np.int64(0)
        for d in range(q.size):
            t += np.int64(q[d]) * np.int64(k[j, d])
        s[j] = np.float32((t + 128) >> 8) * factor * (k_scale[j] * np.float32(256.0)) * q_scale
        if soft_cap > _ZERO:
            s[j] = capped(s[j], soft_cap) * LOG2_E
        above = np.ceil(s[j])
        m = _larger(m, above)
        e = _larger(e, above + (v_scale[j] if v_scale[j] != v_scale[j] else np.float32(exponent(v_scale[j]))))
    ml[row, 0], e_acc[row, 0] = m, e
    l = np.int64(0)
    total[:] = 0
    if m == m and e == e:
        for j in range(first, last):
            w = exp2(s[j] - m)
            l += np.int64(np.rint(w * _WEIGHT_ONE))
            shift = m - e + np.float32(exponent(v_scale[j]))
            shift = min(max(shift, np.float32(-127.0)), np.float32(126.0))
            u[j] = np.rint(w * power_of_two(np.int32(shift)) * _WEIGHT_ONE)
        for j in range(first, last):
            weight = np.int64(u[j])
            for d in range(total.size):
                total[d] += weight * np.int64(v[j, d])
    ml[row, 1] = np.float32(l)
    for d in range(total.size):
        e_acc[row, d + 1] = np.float32((total[d] + 128) >> 8)


def _attend(query, q_scale, out, keys, values, table, page_size, work, factor, soft_cap, window, group, segments):
    """Attention of work items (request, KV head, first row, last row, position of the first row, keys).

    query [tokens, heads, head_size] int32, q_scale [tokens, heads], out as query in fp32, keys and values [pages,
    kv_heads, page_size, head_size] bits of bf16, segments [n, 2] (first position, keys) of splits; soft_cap and
    window are 0 where there is none.
    """
    head_size = query.shape[2]
    for item in prange(work.shape[0]):
        request, kv_head, first_row, last_row, position, length = work[item]
        rows = (last_row - first_row) * group
        held, s, u = np.empty(head_size, np.float32), np.empty(KEY_TILE, np.float32), np.empty(KEY_TILE, np.int32)
        k, v = np.empty((KEY_TILE, head_size), np.int32), np.empty((KEY_TILE, head_size), np.int32)
        k_scale, v_scale = np.empty(KEY_TILE, np.float32), np.empty(KEY_TILE, np.float32)
        total = np.empty(head_size, np.int64)
        ml = np.empty((rows, 2), np.float32)
        part_ml, tile_ml = np.empty_like(ml), np.empty_like(ml)
        acc = np.empty((rows, head_size + 1), np.float32)
        part_acc, tile_acc = np.empty_like(acc), np.empty_like(acc)
        lowest = max(0, position - window + 1) if window > 0 else 0
        highest = position + last_row - first_row
        ml[:, 0], ml[:, 1], acc[:] = _MINUS_INFINITY, 0, 0
        acc[:, 0] = _MINUS_INFINITY
        start = 0
        for segment in range(segments.shape[0]):
            end = segments[segment + 1, 0] if segment + 1 < segments.shape[0] else length
            while start < min(end, highest):
                split_end = start + segments[segment, 1]
                if split_end > lowest:
                    part_ml[:, 0], part_ml[:, 1], part_acc[:] = _MINUS_INFINITY, 0, 0
                    part_acc[:, 0] = _MINUS_INFINITY
                    for tile in range(start, min(split_end, highest), KEY_TILE):
                        stop = min(tile + KEY_TILE, split_end, highest)
                        if stop <= lowest:
                            continue
                        low = max(tile, lowest)
                        _key_rows(keys, table[request], kv_head, low, stop, page_size, held, k, k_scale)
                        _key_rows(values, table[request], kv_head, low, stop, page_size, held, v, v_scale)
                        for row in range(rows):
                            token, head = first_row + row // group, kv_head * group + row % group
                            at = position + row // group
                            last = min(stop, at + 1)
                            first = max(low, at - window + 1) if window > 0 else low
                            if first < last:
                                _tile(
                                    query[token, head], q_scale[token, head], k, k_scale, v, v_scale,
                                    first - low, last - low, factor, soft_cap, s, u, total, tile_ml, tile_acc, row,
                                )  # fmt: skip
                                _merge(part_ml, part_acc, tile_ml, tile_acc, row)
                    for row in range(rows):
                        if part_ml[row, 0] != _MINUS_INFINITY:
                            _merge(ml, acc, part_ml, part_acc, row)
                start = split_end
        for row in range(rows):
            y = out[first_row + row // group, kv_head * group + row % group]
            difference = acc[row, 0] - ml[row, 0]
            shift = (
                difference
                if difference != difference
                else power_of_two(np.int32(min(max(difference, np.float32(-127.0)), np.float32(119.0))) + np.int32(8))
            )
            for d in range(head_size):
                y[d] = acc[row, d + 1] / ml[row, 1] * shift


attend = RowKernel(_attend)
