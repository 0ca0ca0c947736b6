"""The numba kernel of paged attention on the CPU.

A row, a token and one of its query heads, sees keys k. Over the splits of keys at fixed positions, ascending:

    s = qk_scale * q . k, then soft cap and ALiBi
    m_split = max(s),  p = exp(s - m_split),  l_split = sum(p),  acc_split = sum(p * v)
    m' = max(m, m_split),  alpha = exp(m - m'),  alpha_split = exp(m_split - m')
    l' = l alpha + l_split alpha_split,  acc' = acc alpha + acc_split alpha_split

and at the end ``out = acc / l``. A sink is one more split: ``m_split = sink``, ``l_split = 1``, ``acc_split = 0``.
Where keys and values are codes, q, k and v are still numbers, those of the codes: ``qk_scale`` has the scale of the
keys as a factor, and ``out`` that of the values, of all heads or of the row's own. Where each token has a scale in each
head, ``qk_scale`` of a key has that of its own as a factor, and ``acc_split = sum((p * scale) * v)``.

The order of every sum is written out (see :mod:`..common.numba_simd`), so tiles, rows that share a tile, threads and
vector width move no bit. A row walks exactly the keys it sees: nothing is masked by a zero weight, so what other rows
see cannot reach it.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from ..common.numba_math import exp32
from ..common.numba_rows import compiled
from ..common.numba_simd import (
    add,
    add_product,
    larger,
    largest_lane,
    load,
    load_bf16,
    load_e4m3,
    load_fp16,
    load_fp32,
    load_splat,
    prefetch,
    splat,
    store,
    store_four_sums,
    store_sixteen_sums,
    sum_lanes,
)
from .params import AttentionSpec

SERVES = ("sliding_window", "logits_soft_cap", "alibi_slopes", "sinks", "causal")
READS_E4M3 = READS_PACKED = READS_LATENT = SEES_RANGES = True
_MINUS_INFINITY = np.float32(-np.inf)
_LINE = 64
"""Bytes of a cache line."""
_VALUES_AT_A_TIME = 16
"""Of one token's rows: as many as all of its rows are multiplied with while they are in the first-level cache."""


class Cache(NamedTuple):
    """The keys or the values of all pages."""

    data: np.ndarray
    """uint8, the elements of the cache as they lie in memory."""
    strides: np.ndarray
    """[3] of page, KV head and slot, in elements."""
    element_size: int
    """1 of codes in e4m3."""
    is_half: bool
    """fp16, when the element size is 2; else bf16."""


class Scales(NamedTuple):
    """Of the keys' codes, or of the values'."""

    data: np.ndarray
    """fp32, as they lie in memory; 1 of numbers that are no codes."""
    stride_page: int
    """0 along what has one, and so the next ones."""
    stride_head: int
    stride_slot: int
    of_tokens: bool


class ScoreMod(NamedTuple):
    """What makes a score of the dot of a query and a key, and which scores a row has."""

    qk_scale: np.float32
    """Without that of the keys' codes."""
    soft_cap: np.float32
    """0 for none."""
    alibi_slopes: np.ndarray
    """[query_heads] fp32, 0 for none."""
    window: int
    """0 for none."""
    sinks: np.ndarray
    """[query_heads] fp32, empty for none."""
    causal: bool
    """Else a window reaches as far after a position as before it."""

    @classmethod
    def of(cls, spec: AttentionSpec, heads: int) -> "ScoreMod":
        """That of a layer of so many query heads."""
        slopes, sinks = spec.alibi_slopes, spec.sinks
        return cls(
            np.float32(spec.scale),
            np.float32(spec.logits_soft_cap or 0.0),
            np.zeros(heads, np.float32) if slopes is None else slopes.float().contiguous().numpy(),
            spec.sliding_window or 0,
            np.empty(0, np.float32) if sinks is None else sinks.detach().float().contiguous().numpy(),
            spec.causal,
        )


class Work(NamedTuple):
    """The work items of a call, dealt out to threads."""

    items: np.ndarray
    """[items, 7] int64: request, first token in the query, tokens, position of the first of them, KV head, and the
    first and the last + 1 key that one of them sees.
    """
    indptr: np.ndarray
    """[threads + 1] int64, the first item of each thread."""


class _Scratch(NamedTuple):
    """A thread's memory, fp32: rows of ``width`` elements, which is the head size padded to pairs of vectors, and of
    values ``value_width``, which may be less.
    """

    width: int
    value_width: int
    tile: np.ndarray
    """[BLOCK_N, width] keys, or [BLOCK_N, value_width] values."""
    q: np.ndarray
    """[rows, width]"""
    p: np.ndarray
    """[rows, split_size], scores, then weights."""
    split_acc: np.ndarray
    """[rows, value_width], weighted values of the split."""
    acc: np.ndarray
    """[rows, value_width], of all splits so far."""
    visible: np.ndarray
    """[rows, 2] int64: first and last + 1 key that a row sees of the split."""
    split_ml: np.ndarray
    """[rows, 2]: maximum of the scores and sum of the weights of the split."""
    ml: np.ndarray
    """[rows, 2]: of all splits so far."""
    k_factors: np.ndarray
    """[split_size], of the dots with each key."""
    v_factors: np.ndarray
    """[split_size], of the weights of each key's values."""
    starts: np.ndarray
    """[3, split_size] int64: first bytes of the keys of a split, of its values, and of the keys that are read next."""


@njit
def _load_widened(cache, element):
    if cache.element_size == 1:
        return load_e4m3(cache.data, element)
    if cache.element_size == 4:
        return load_fp32(cache.data, element * 4)
    if cache.is_half:
        return load_fp16(cache.data, element * 2)
    return load_bf16(cache.data, element * 2)


@njit
def _load_rows(cache, head, pages, page_size, begin, end, size, width, tile, first):
    """Widen positions begin to end - 1 of a KV head, of ``size`` elements, into rows ``first`` and following of a tile
    whose rows have ``width``.
    """
    page = begin // page_size
    slot = begin - page * page_size
    for key in range(first, first + end - begin):
        start = pages[page] * cache.strides[0] + head * cache.strides[1] + slot * cache.strides[2]
        for d in range(0, size, 16):
            store(_load_widened(cache, start + d), tile, key * width + d)
        slot += 1
        if slot == page_size:
            slot = 0
            page += 1


@njit
def _prefetch_rows(cache, head, pages, page_size, begin, end, size):
    """Ask for positions begin to end - 1 of a KV head, of ``size`` elements."""
    page = begin // page_size
    slot = begin - page * page_size
    for _ in range(begin, end):
        start = pages[page] * cache.strides[0] + head * cache.strides[1] + slot * cache.strides[2]
        for byte in range(0, size * cache.element_size, _LINE):
            prefetch(cache.data, start * cache.element_size + byte)
        slot += 1
        if slot == page_size:
            slot = 0
            page += 1


@njit
def _find_rows(cache, head, pages, page_size, begin, end, starts, first):
    """The first bytes of positions begin to end - 1 of a KV head, from ``starts[first]`` on; around them, as far as to
    multiples of four, those of the first and of the last.
    """
    idx = first
    while begin < end:
        page = begin // page_size
        slot = begin - page * page_size
        start = pages[page] * cache.strides[0] + head * cache.strides[1] + slot * cache.strides[2]
        count = min(page_size - slot, end - begin)
        for i in range(count):
            starts[idx + i] = (start + i * cache.strides[2]) * cache.element_size
        idx += count
        begin += count
    starts[first - first % 4 : first] = starts[first]
    starts[idx : idx + (-idx) % 4] = starts[idx - 1]


@njit
def _prefetch_found(data, starts, begin, end, size):
    """Ask for ``size`` bytes from ``starts[begin]`` to ``starts[end - 1]`` on."""
    for i in range(begin, end):
        for byte in range(0, size, _LINE):
            prefetch(data, starts[i] + byte)


@njit
def _keys_of_tile(tile_start, block_n, first_key, split_end):
    """The first and the last + 1 key that a tile holds: pages before the first visible one may be gone."""
    return max(tile_start, first_key), min(tile_start + block_n, split_end)


@njit
def _scale_of(scales, page, head, slot):
    return scales.data[page * scales.stride_page + head * scales.stride_head + slot * scales.stride_slot]


@njit
def _load_factors(scales, head, pages, page_size, begin, end, factor, factors, first):
    """``factor`` times the scales of tokens at positions begin to end - 1, from ``factors[first]`` on."""
    page = begin // page_size
    slot = begin - page * page_size
    for key in range(first, first + end - begin):
        factors[key] = factor * _scale_of(scales, pages[page], head, slot)
        slot += 1
        if slot == page_size:
            slot = 0
            page += 1


@njit
def _multiply(p, factors, low, high):
    """What keys low to high - 1 have, in place."""
    seen, own = p[low:high], factors[low:high]
    for key in range(seen.size):
        seen[key] *= own[key]


@njit
def _score_pair(q, row, width, head_size, tile, keys, s, idx, stride_row):
    """Dots of two rows with the keys of a tile: lane i sums d = i, i + 16, ... in order, then lanes by halving."""
    zero = splat(np.float32(0.0))
    for key in range(0, keys, 4):
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zero
        for d in range(0, head_size, 16):
            qa = load(q, row * width + d)
            qb = load(q, (row + 1) * width + d)
            k0 = load(tile, key * width + d)
            k1 = load(tile, (key + 1) * width + d)
            k2 = load(tile, (key + 2) * width + d)
            k3 = load(tile, (key + 3) * width + d)
            a0 = add_product(a0, qa, k0)
            a1 = add_product(a1, qa, k1)
            a2 = add_product(a2, qa, k2)
            a3 = add_product(a3, qa, k3)
            b0 = add_product(b0, qb, k0)
            b1 = add_product(b1, qb, k1)
            b2 = add_product(b2, qb, k2)
            b3 = add_product(b3, qb, k3)
        store_four_sums(a0, a1, a2, a3, s, idx + key)
        store_four_sums(b0, b1, b2, b3, s, idx + stride_row + key)


@njit
def _add_products(x0, x1, x2, x3, a, b0, b1, b2, b3):
    return add_product(x0, a, b0), add_product(x1, a, b1), add_product(x2, a, b2), add_product(x3, a, b3)


@njit
def _score_bf16(q, rows, width, head_size, keys, k_starts, low, high, s, stride_row, values, v_starts, value_bytes):
    """:func:`_score_pair` of rows in fours with keys low to high - 1 of a split as they lie in the cache, in bf16. Asks
    for their values meanwhile.
    """
    zero = splat(np.float32(0.0))
    for key in range(low - low % 4, high, 4):
        start0, start1, start2, start3 = k_starts[key], k_starts[key + 1], k_starts[key + 2], k_starts[key + 3]
        for row in range(0, rows, 4):
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zero
            c0 = c1 = c2 = c3 = e0 = e1 = e2 = e3 = zero
            for d in range(0, head_size, 16):
                k0 = load_bf16(keys, start0 + 2 * d)
                k1 = load_bf16(keys, start1 + 2 * d)
                k2 = load_bf16(keys, start2 + 2 * d)
                k3 = load_bf16(keys, start3 + 2 * d)
                qa = load(q, row * width + d)
                qb = load(q, (row + 1) * width + d)
                qc = load(q, (row + 2) * width + d)
                qe = load(q, (row + 3) * width + d)
                a0, a1, a2, a3 = _add_products(a0, a1, a2, a3, qa, k0, k1, k2, k3)
                b0, b1, b2, b3 = _add_products(b0, b1, b2, b3, qb, k0, k1, k2, k3)
                c0, c1, c2, c3 = _add_products(c0, c1, c2, c3, qc, k0, k1, k2, k3)
                e0, e1, e2, e3 = _add_products(e0, e1, e2, e3, qe, k0, k1, k2, k3)
            sums = (a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, e0, e1, e2, e3)
            store_sixteen_sums(sums, s, row * stride_row + key, stride_row)
        _prefetch_found(values, v_starts, key, key + 4, value_bytes)


@njit
def _softmax(p, low, high, qk_scale, score_mod, alibi_slope, distance):
    """Turn the dots ``p`` [split_size] into weights exp(s - m) in place; returns (m, l).

    Keys low to high - 1 are visible. Key k counts in lane k % 16, then the lanes are summed by halving. ``distance`` is
    the position of key 0 minus that of the query.
    """
    seen = p[low:high]
    for key in range(seen.size):
        seen[key] *= qk_scale
    soft_cap = score_mod.soft_cap
    if soft_cap > np.float32(0.0):
        for key in range(seen.size):
            twice = np.float32(2.0) * (seen[key] / soft_cap)
            seen[key] = soft_cap * (np.float32(1.0) - np.float32(2.0) / (exp32(twice) + np.float32(1.0)))
    if alibi_slope != np.float32(0.0):
        for key in range(seen.size):
            seen[key] += alibi_slope * np.float32(distance + low + key)
    # Whole vectors from here on: a hidden key is -inf, then exactly 0.
    begin = low - low % 16
    end = high + (-high) % 16
    p[begin:low] = _MINUS_INFINITY
    p[high:end] = _MINUS_INFINITY
    lanes = splat(_MINUS_INFINITY)
    for key in range(begin, end, 16):
        lanes = larger(lanes, load(p, key))
    m = largest_lane(lanes)
    shift = np.float32(0.0) if m == _MINUS_INFINITY else m
    weights = p[begin:end]
    for key in range(weights.size):
        weights[key] = exp32(weights[key] - shift)
    lanes = splat(np.float32(0.0))
    for key in range(begin, end, 16):
        lanes = add(lanes, load(p, key))
    return m, sum_lanes(lanes)


@njit
def _add_values(p, idx, tile, low, high, width, acc, row):
    """acc[row] += p * v for keys low to high - 1 of the tile, ascending."""
    for d in range(0, width, 32):
        a0 = load(acc, row * width + d)
        a1 = load(acc, row * width + d + 16)
        for key in range(low, high):
            p_key = splat(p[idx + key])
            a0 = add_product(a0, p_key, load(tile, key * width + d))
            a1 = add_product(a1, p_key, load(tile, key * width + d + 16))
        store(a0, acc, row * width + d)
        store(a1, acc, row * width + d + 16)


@njit
def _add_values_pair(p, idx, stride_row, tile, low, high, width, acc, row):
    """:func:`_add_values` for two rows that see the same keys, operation by operation the same."""
    for d in range(0, width, 32):
        a0 = load(acc, row * width + d)
        a1 = load(acc, row * width + d + 16)
        b0 = load(acc, (row + 1) * width + d)
        b1 = load(acc, (row + 1) * width + d + 16)
        for key in range(low, high):
            v0 = load(tile, key * width + d)
            v1 = load(tile, key * width + d + 16)
            p_a = splat(p[idx + key])
            p_b = splat(p[idx + stride_row + key])
            a0 = add_product(a0, p_a, v0)
            a1 = add_product(a1, p_a, v1)
            b0 = add_product(b0, p_b, v0)
            b1 = add_product(b1, p_b, v1)
        store(a0, acc, row * width + d)
        store(a1, acc, row * width + d + 16)
        store(b0, acc, (row + 1) * width + d)
        store(b1, acc, (row + 1) * width + d + 16)


@njit
def _load_four(array, idx):
    return load(array, idx), load(array, idx + 16), load(array, idx + 32), load(array, idx + 48)


@njit
def _store_four(x0, x1, x2, x3, array, idx):
    store(x0, array, idx)
    store(x1, array, idx + 16)
    store(x2, array, idx + 32)
    store(x3, array, idx + 48)


@njit
def _add_values_four(p, idx, stride_row, values, starts, low, high, size, width, acc, row):
    """:func:`_add_values` for four rows with values as they lie in the cache, in bf16."""
    a, b, c, e = row * width, (row + 1) * width, (row + 2) * width, (row + 3) * width
    whole = size // 64 * 64
    for d in range(0, whole, 64):
        a0, a1, a2, a3 = _load_four(acc, a + d)
        b0, b1, b2, b3 = _load_four(acc, b + d)
        c0, c1, c2, c3 = _load_four(acc, c + d)
        e0, e1, e2, e3 = _load_four(acc, e + d)
        for key in range(low, high):
            start = starts[key] + 2 * d
            v0, v1 = load_bf16(values, start), load_bf16(values, start + 32)
            v2, v3 = load_bf16(values, start + 64), load_bf16(values, start + 96)
            at = idx + key
            a0, a1, a2, a3 = _add_products(a0, a1, a2, a3, load_splat(p, at), v0, v1, v2, v3)
            b0, b1, b2, b3 = _add_products(b0, b1, b2, b3, load_splat(p, at + stride_row), v0, v1, v2, v3)
            c0, c1, c2, c3 = _add_products(c0, c1, c2, c3, load_splat(p, at + 2 * stride_row), v0, v1, v2, v3)
            e0, e1, e2, e3 = _add_products(e0, e1, e2, e3, load_splat(p, at + 3 * stride_row), v0, v1, v2, v3)
        _store_four(a0, a1, a2, a3, acc, a + d)
        _store_four(b0, b1, b2, b3, acc, b + d)
        _store_four(c0, c1, c2, c3, acc, c + d)
        _store_four(e0, e1, e2, e3, acc, e + d)
    for d in range(whole, size, 16):
        a0, b0, c0, e0 = load(acc, a + d), load(acc, b + d), load(acc, c + d), load(acc, e + d)
        for key in range(low, high):
            v = load_bf16(values, starts[key] + 2 * d)
            at = idx + key
            a0 = add_product(a0, load_splat(p, at), v)
            b0 = add_product(b0, load_splat(p, at + stride_row), v)
            c0 = add_product(c0, load_splat(p, at + 2 * stride_row), v)
            e0 = add_product(e0, load_splat(p, at + 3 * stride_row), v)
        store(a0, acc, a + d)
        store(b0, acc, b + d)
        store(c0, acc, c + d)
        store(e0, acc, e + d)


@njit
def _add_values_bf16(
    p, rows, stride_row, values, v_starts, low, high, size, width, acc, keys, k_starts, next_keys, key_bytes
):
    """:func:`_add_values_four` for all rows. Asks for the next keys meanwhile."""
    for begin in range(low, high, _VALUES_AT_A_TIME):
        end = min(begin + _VALUES_AT_A_TIME, high)
        for row in range(0, rows, 4):
            _add_values_four(p, row * stride_row, stride_row, values, v_starts, begin, end, size, width, acc, row)
        _prefetch_found(keys, k_starts, begin - low, min(end - low, next_keys) if end < high else next_keys, key_bytes)


@njit
def _merge_splits(acc, split_acc, row, width, ml, split_ml):
    """Add a row's split to what it has so far."""
    new_m = max(ml[0], split_ml[0])
    shift = np.float32(0.0) if new_m == _MINUS_INFINITY else new_m
    alpha = exp32(ml[0] - shift)
    split_alpha = exp32(split_ml[0] - shift)
    for d in range(row * width, (row + 1) * width):
        acc[d] = acc[d] * alpha + split_acc[d] * split_alpha
    ml[0] = new_m
    ml[1] = ml[1] * alpha + split_ml[1] * split_alpha


@njit
def _merge_sink(acc, row, width, ml, sink):
    """Add a score that has no value to all splits of a row."""
    new_m = max(ml[0], sink)
    shift = np.float32(0.0) if new_m == _MINUS_INFINITY else new_m
    alpha = exp32(ml[0] - shift)
    for d in range(row * width, (row + 1) * width):
        acc[d] = acc[d] * alpha
    ml[0] = new_m
    ml[1] = ml[1] * alpha + exp32(sink - shift)


@njit
def _clip(position, low, high):
    return min(max(position, low), high)


@njit
def _score_rows(scratch, head_size, first, keys, rows, split_size):
    """Dots of all rows with a tile that begins at key ``first`` of the split; a pair that sees none is skipped."""
    q, width, tile, p, visible = scratch.q, scratch.width, scratch.tile, scratch.p, scratch.visible
    for row in range(0, rows, 2):
        if first < visible[row + 1, 1] and visible[row, 0] < first + keys:
            _score_pair(q, row, width, head_size, tile, keys, p, row * split_size + first, split_size)


@njit
def _add_values_rows(scratch, first, keys, rows, split_size):
    """:func:`_add_values` for all rows, over a tile that begins at key ``first`` of the split."""
    tile, width, p, acc, visible = scratch.tile, scratch.value_width, scratch.p, scratch.split_acc, scratch.visible
    for row in range(0, rows, 2):
        idx = row * split_size + first
        low_a = _clip(visible[row, 0] - first, 0, keys)
        high_a = _clip(visible[row, 1] - first, 0, keys)
        low_b = _clip(visible[row + 1, 0] - first, 0, keys)
        high_b = _clip(visible[row + 1, 1] - first, 0, keys)
        # What a row sees begins and ends no earlier than for the row before, which ranges keep: first alone, together,
        # second alone.
        both = min(low_b, high_a)
        if low_a < both:
            _add_values(p, idx, tile, low_a, both, width, acc, row)
        if both < high_a:
            _add_values_pair(p, idx, split_size, tile, both, high_a, width, acc, row)
        if max(high_a, low_b) < high_b:
            _add_values(p, idx + split_size, tile, max(high_a, low_b), high_b, width, acc, row + 1)


@njit
def _attend_item(
    query, out, keys, values, k_scales, v_scales, pages, page_size, score_mod, ranges, split_size, item, following,
    queries_per_kv, scratch,
):  # fmt: skip
    """Rows are the item's query tokens, each with the ``queries_per_kv`` query heads of its KV head. Those of one token
    see the same keys, and read them from the cache where they are in bf16; else keys and values are widened in tiles.
    Memory is asked for what comes next, at the end for the first keys of the item that follows.
    """
    query_start, query_len, q_pos, kv_head, first_key, kv_end = item
    head_size, width, value_size, value_width = query.shape[2], scratch.width, out.shape[2], scratch.value_width
    visible, split_ml, ml = scratch.visible, scratch.split_ml, scratch.ml
    one, of_tokens = np.float32(1.0), k_scales.of_tokens
    qk_scale, v_scale = one, one  # where each token has its own, dots and weights are multiplied before
    if not of_tokens:
        qk_scale = score_mod.qk_scale * _scale_of(k_scales, 0, kv_head, 0)
        v_scale = _scale_of(v_scales, 0, kv_head, 0)
    rows = query_len * queries_per_kv
    even_rows, four_rows = rows + rows % 2, rows + (-rows) % 4
    window = score_mod.window
    block_n = scratch.tile.size // width
    q, scores, split_acc, acc = scratch.q, scratch.p, scratch.split_acc, scratch.acc
    k_starts, v_starts, next_starts = scratch.starts[0], scratch.starts[1], scratch.starts[2]
    is_token = query_len == 1 and keys.element_size == 2 and not keys.is_half
    for row in range(rows):
        for d in range(head_size):
            q[row * width + d] = query[
                query_start + row // queries_per_kv, kv_head * queries_per_kv + row % queries_per_kv, d
            ]
    acc[: rows * value_width] = np.float32(0.0)
    ml[:, 0] = _MINUS_INFINITY
    ml[:, 1] = np.float32(0.0)

    for start in range(first_key - first_key % split_size, kv_end, split_size):
        split_end = min(start + split_size, kv_end)
        for row in range(even_rows):
            # An odd last row is paired with a copy of its own range, whose result nobody reads.
            token = min(row, rows - 1) // queries_per_kv
            row_pos = q_pos + token
            row_first = row_pos - window + 1 if window > 0 else 0
            row_end = row_pos + 1
            if not score_mod.causal:
                row_end = row_pos + window if window > 0 else kv_end
            if ranges.size > 0:
                row_first = min(row_first, ranges[query_start + token, 0])
                row_end = max(row_end, ranges[query_start + token, 1] + 1)
            visible[row, 0] = _clip(row_first - start, 0, split_end - start)
            visible[row, 1] = _clip(row_end - start, 0, split_end - start)
        first_seen = max(start, first_key)
        first, last = first_seen - start, split_end - start  # of the split's
        first_tile = start + first // block_n * block_n
        if of_tokens:
            _load_factors(
                k_scales, kv_head, pages, page_size, first_seen, split_end, score_mod.qk_scale, scratch.k_factors, first
            )
            _load_factors(v_scales, kv_head, pages, page_size, first_seen, split_end, one, scratch.v_factors, first)

        if is_token:
            _find_rows(keys, kv_head, pages, page_size, first_seen, split_end, k_starts, first)
            _find_rows(values, kv_head, pages, page_size, first_seen, split_end, v_starts, first)
            _score_bf16(
                q, four_rows, width, head_size, keys.data, k_starts, first, last, scores, split_size, values.data,
                v_starts, value_size * 2,
            )  # fmt: skip
        else:
            for tile_start in range(first_tile, split_end, block_n):
                begin, end = _keys_of_tile(tile_start, block_n, first_key, split_end)
                row = begin - tile_start
                _prefetch_rows(values, kv_head, pages, page_size, begin, end, value_size)
                _load_rows(keys, kv_head, pages, page_size, begin, end, head_size, width, scratch.tile, row)
                _score_rows(scratch, head_size, tile_start - start, end - tile_start, even_rows, split_size)

        for row in range(rows):
            low, high = visible[row]
            if low < high:
                p = scores[row * split_size : (row + 1) * split_size]
                alibi_slope = score_mod.alibi_slopes[kv_head * queries_per_kv + row % queries_per_kv]
                distance = start - (q_pos + row // queries_per_kv)
                if of_tokens:
                    _multiply(p, scratch.k_factors, low, high)
                split_ml[row, 0], split_ml[row, 1] = _softmax(p, low, high, qk_scale, score_mod, alibi_slope, distance)
                if of_tokens:
                    _multiply(p, scratch.v_factors, low, high)

        split_acc[: four_rows * value_width] = np.float32(0.0)
        if is_token:
            next_pages, next_head, begin, end = following
            if split_end < kv_end:
                next_pages, next_head, begin, end = pages, kv_head, split_end, kv_end
            next_keys = min(end, begin - begin % split_size + split_size) - begin
            _find_rows(keys, next_head, next_pages, page_size, begin, begin + next_keys, next_starts, 0)
            _add_values_bf16(
                scores, four_rows, split_size, values.data, v_starts, first, last, value_size, value_width, split_acc,
                keys.data, next_starts, next_keys, head_size * 2,
            )  # fmt: skip
        else:
            for tile_start in range(first_tile, split_end, block_n):
                begin, end = _keys_of_tile(tile_start, block_n, first_key, split_end)
                row, next_end = begin - tile_start, min(end + split_size, kv_end)
                _prefetch_rows(keys, kv_head, pages, page_size, begin + split_size, next_end, head_size)
                _load_rows(values, kv_head, pages, page_size, begin, end, value_size, value_width, scratch.tile, row)
                _add_values_rows(scratch, tile_start - start, end - tile_start, even_rows, split_size)

        for row in range(rows):
            if visible[row, 0] < visible[row, 1]:
                _merge_splits(acc, split_acc, row, value_width, ml[row], split_ml[row])

    if score_mod.sinks.size > 0:
        for row in range(rows):
            sink = score_mod.sinks[kv_head * queries_per_kv + row % queries_per_kv]
            _merge_sink(acc, row, value_width, ml[row], sink)

    for row in range(rows):
        out_row = out[query_start + row // queries_per_kv, kv_head * queries_per_kv + row % queries_per_kv]
        for d in range(value_size):
            out_row[d] = acc[row * value_width + d] / ml[row, 1] * v_scale


@njit
def _new_scratch(block_m, head_size, value_size, block_n, split_size):
    width, value_width = (head_size + 31) // 32 * 32, (value_size + 31) // 32 * 32
    return _Scratch(
        width,
        value_width,
        np.zeros(block_n * width, dtype=np.float32),
        np.zeros(block_m * width, dtype=np.float32),
        np.zeros(block_m * split_size, dtype=np.float32),
        np.zeros(block_m * value_width, dtype=np.float32),
        np.zeros(block_m * value_width, dtype=np.float32),
        np.zeros((block_m, 2), dtype=np.int64),
        np.zeros((block_m, 2), dtype=np.float32),
        np.zeros((block_m, 2), dtype=np.float32),
        np.zeros(split_size, dtype=np.float32),
        np.zeros(split_size, dtype=np.float32),
        np.zeros((3, split_size), dtype=np.int64),
    )


def _attend(
    query, out, keys, values, k_scales, v_scales, block_table, page_size, score_mod, ranges, split_size,
    queries_per_kv, block_m, block_n, work,
):  # fmt: skip
    """Each thread works through its share of the work items with scratch of its own.

    query and out: [tokens, query_heads, size of keys and of values] fp32; ranges: [tokens, 2] int64, or empty; work
    from :func:`deal`; ``block_m`` is a multiple of 4.
    """
    for thread in prange(work.indptr.size - 1):
        scratch = _new_scratch(block_m, query.shape[2], out.shape[2], block_n, split_size)
        end = work.indptr[thread + 1]
        for i in range(work.indptr[thread], end):
            request, query_start, query_len, q_pos, kv_head, first_key, kv_end = work.items[i]
            item = query_start, query_len, q_pos, kv_head, first_key, kv_end
            next_request, _, _, _, next_head, next_key, next_end = work.items[min(i + 1, end - 1)]
            following = block_table[next_request], next_head, next_key, next_end if i + 1 < end else next_key
            _attend_item(
                query, out, keys, values, k_scales, v_scales, block_table[request], page_size, score_mod, ranges,
                split_size, item, following, queries_per_kv, scratch,
            )  # fmt: skip


def _deal(starts, lengths, ranges, kv_heads, tile_tokens, window, causal, threads, serial_below):
    """The :class:`Work` of a call.

    The items are dealt out from the longest to the shortest, there and back, so that shares are about equal; all to one
    thread if there are fewer than ``serial_below`` (query token, key, KV head) triples.
    """
    count = 0
    for request in range(lengths.size):
        count += (starts[request + 1] - starts[request] + tile_tokens - 1) // tile_tokens * kv_heads
    items = np.empty((count, 7), dtype=np.int64)
    cost = np.empty(count, dtype=np.int64)
    i = 0
    for request in range(lengths.size):
        end = starts[request + 1]
        for query_start in range(starts[request], end, tile_tokens):
            query_len = min(tile_tokens, end - query_start)
            q_pos = lengths[request] - (end - query_start)
            kv_end = q_pos + query_len
            if not causal:
                kv_end = min(lengths[request], kv_end - 1 + window) if window > 0 else lengths[request]
            if ranges.size > 0:
                kv_end = max(kv_end, ranges[query_start + query_len - 1, 1] + 1)
            first_key = max(0, q_pos - window + 1) if window > 0 else 0
            if ranges.size > 0:
                first_key = min(first_key, ranges[query_start, 0])
            kv_len = kv_end
            if window > 0:
                kv_len = min(kv_len, kv_end - q_pos + window - 1)
            for kv_head in range(kv_heads):
                items[i, 0] = request
                items[i, 1] = query_start
                items[i, 2] = query_len
                items[i, 3] = q_pos
                items[i, 4] = kv_head
                items[i, 5] = first_key
                items[i, 6] = kv_end
                cost[i] = -kv_len * query_len
                i += 1
    if -cost.sum() < serial_below:
        threads = 1
    order = np.argsort(cost, kind="mergesort")
    indptr = np.zeros(threads + 1, dtype=np.int64)
    dealt = np.empty_like(items)
    num_dealt = 0
    for thread in range(threads):
        for idx in range(count):
            turn = idx % (2 * threads)
            if min(turn, 2 * threads - 1 - turn) == thread:
                dealt[num_dealt] = items[order[idx]]
                num_dealt += 1
        indptr[thread + 1] = num_dealt
    return Work(dealt, indptr)


attend = compiled(_attend, parallel=True)
deal = compiled(_deal)
