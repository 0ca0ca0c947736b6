"""The compiled kernel of paged attention on the CPU.

The order of every sum is written out (see :mod:`.lanes`), so tiles, rows that share a tile, threads and vector width
move no bit. A row walks exactly the keys it sees: nothing is masked by a zero weight, so what other rows see cannot
reach it.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from ..common.numba_math import exp32
from ..common.numba_rows import compiled
from .cpu_simd import (
    add,
    add_product,
    larger,
    largest_lane,
    load,
    load_bf16,
    load_fp16,
    load_fp32,
    splat,
    store,
    store_four_sums,
    sum_lanes,
)

_MINUS_INFINITY = np.float32(-np.inf)


class Cache(NamedTuple):
    """The keys or the values of all pages."""

    data: np.ndarray
    """uint8, the elements of the cache as they lie in memory."""
    strides: np.ndarray
    """[3] of page, KV head and slot, in elements."""
    element_size: int
    is_half: bool
    """fp16, when the element size is 2; else bf16."""


class Scoring(NamedTuple):
    """What a score is."""

    scale: np.float32
    soft_cap: np.float32
    """0 for none."""
    slopes: np.ndarray
    """[query_heads] fp32, 0 for none."""
    window: int
    """0 for none."""


class _Scratch(NamedTuple):
    """A thread's memory: rows of ``width`` elements, which is the head size padded to pairs of lane vectors."""

    width: int
    tile: np.ndarray
    """[keys, width] fp32 keys or values."""
    queries: np.ndarray
    scores: np.ndarray
    """[rows, split_size]."""
    partial: np.ndarray
    """Weighted values of the split."""
    total: np.ndarray
    """Of all splits so far."""
    visible: np.ndarray
    """[rows, 2] int64: first and last + 1 key that a row sees of the split."""
    split: np.ndarray
    """[rows, 2]: maximum and sum of weights of the split."""
    running: np.ndarray
    """[rows, 2]: of all splits so far."""


@njit
def _load_widened(cache, element):
    if cache.element_size == 4:
        return load_fp32(cache.data, element * 4)
    if cache.is_half:
        return load_fp16(cache.data, element * 2)
    return load_bf16(cache.data, element * 2)


@njit
def _load_rows(cache, head, pages, page_size, begin, end, head_size, scratch, first):
    """Widen positions begin to end - 1 of a KV head into rows ``first`` and following of the scratch tile."""
    page = begin // page_size
    slot = begin - page * page_size
    for key in range(first, first + end - begin):
        start = pages[page] * cache.strides[0] + head * cache.strides[1] + slot * cache.strides[2]
        for d in range(0, head_size, 16):
            store(_load_widened(cache, start + d), scratch.tile, key * scratch.width + d)
        slot += 1
        if slot == page_size:
            slot = 0
            page += 1


@njit
def _score_pair(query, row, width, head_size, tile, keys, scores, into, row_stride):
    """Dots of two rows with the keys of a tile: lane i sums d = i, i + 16, ... in order, then lanes by halving."""
    zero = splat(np.float32(0.0))
    for key in range(0, keys, 4):
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = zero
        for d in range(0, head_size, 16):
            qa = load(query, row * width + d)
            qb = load(query, (row + 1) * width + d)
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
        store_four_sums(a0, a1, a2, a3, scores, into + key)
        store_four_sums(b0, b1, b2, b3, scores, into + row_stride + key)


@njit
def _softmax(row, low, high, scoring, slope, distance):
    """Turn the dots ``row`` [split_size] into weights exp(score - max) in place; returns (max, sum of the weights).

    Keys low to high - 1 are visible. Key k counts in lane k % 16, then the lanes are summed by halving. ``distance`` is
    the position of key 0 minus that of the query.
    """
    seen = row[low:high]
    for key in range(seen.size):
        seen[key] *= scoring.scale
    soft_cap = scoring.soft_cap
    if soft_cap > np.float32(0.0):
        for key in range(seen.size):
            twice = np.float32(2.0) * (seen[key] / soft_cap)
            seen[key] = soft_cap * (np.float32(1.0) - np.float32(2.0) / (exp32(twice) + np.float32(1.0)))
    if slope != np.float32(0.0):
        for key in range(seen.size):
            seen[key] += slope * np.float32(distance + low + key)
    # Whole lane vectors from here on: a hidden key is -inf, then exactly 0.
    begin = low - low % 16
    end = high + (-high) % 16
    row[begin:low] = _MINUS_INFINITY
    row[high:end] = _MINUS_INFINITY
    lanes = splat(_MINUS_INFINITY)
    for key in range(begin, end, 16):
        lanes = larger(lanes, load(row, key))
    top = largest_lane(lanes)
    shift = np.float32(0.0) if top == _MINUS_INFINITY else top
    weights = row[begin:end]
    for key in range(weights.size):
        weights[key] = exp32(weights[key] - shift)
    lanes = splat(np.float32(0.0))
    for key in range(begin, end, 16):
        lanes = add(lanes, load(row, key))
    return top, sum_lanes(lanes)


@njit
def _add_values(weights, at, tile, low, high, width, partial, row):
    """partial[row] += weight * value for keys low to high - 1 of the tile, ascending."""
    for d in range(0, width, 32):
        a0 = load(partial, row * width + d)
        a1 = load(partial, row * width + d + 16)
        for key in range(low, high):
            weight = splat(weights[at + key])
            a0 = add_product(a0, weight, load(tile, key * width + d))
            a1 = add_product(a1, weight, load(tile, key * width + d + 16))
        store(a0, partial, row * width + d)
        store(a1, partial, row * width + d + 16)


@njit
def _add_values_pair(weights, at, row_stride, tile, low, high, width, partial, row):
    """:func:`_add_values` for two rows that see the same keys, operation by operation the same."""
    for d in range(0, width, 32):
        a0 = load(partial, row * width + d)
        a1 = load(partial, row * width + d + 16)
        b0 = load(partial, (row + 1) * width + d)
        b1 = load(partial, (row + 1) * width + d + 16)
        for key in range(low, high):
            v0 = load(tile, key * width + d)
            v1 = load(tile, key * width + d + 16)
            weight_a = splat(weights[at + key])
            weight_b = splat(weights[at + row_stride + key])
            a0 = add_product(a0, weight_a, v0)
            a1 = add_product(a1, weight_a, v1)
            b0 = add_product(b0, weight_b, v0)
            b1 = add_product(b1, weight_b, v1)
        store(a0, partial, row * width + d)
        store(a1, partial, row * width + d + 16)
        store(b0, partial, (row + 1) * width + d)
        store(b1, partial, (row + 1) * width + d + 16)


@njit
def _merge(total, partial, row, width, running, split):
    """Add a row's split to what it has so far, as in online softmax."""
    top = max(running[0], split[0])
    shift = np.float32(0.0) if top == _MINUS_INFINITY else top
    keep = exp32(running[0] - shift)
    take = exp32(split[0] - shift)
    for d in range(row * width, (row + 1) * width):
        total[d] = total[d] * keep + partial[d] * take
    running[0] = top
    running[1] = running[1] * keep + split[1] * take


@njit
def _clip(position, low, high):
    return min(max(position, low), high)


@njit
def _score_rows(scratch, head_size, first, keys, rows, split_size):
    """Dots of all rows with a tile that begins at key ``first`` of the split; a pair that sees none is skipped."""
    visible = scratch.visible
    for row in range(0, rows, 2):
        if first < visible[row + 1, 1] and visible[row, 0] < first + keys:
            into = row * split_size + first
            _score_pair(
                scratch.queries, row, scratch.width, head_size, scratch.tile, keys, scratch.scores, into, split_size
            )


@njit
def _add_values_rows(scratch, first, keys, rows, split_size):
    """:func:`_add_values` for all rows, over a tile that begins at key ``first`` of the split."""
    tile, width, weights, partial = scratch.tile, scratch.width, scratch.scores, scratch.partial
    for row in range(0, rows, 2):
        at = row * split_size + first
        low_a = _clip(scratch.visible[row, 0] - first, 0, keys)
        high_a = _clip(scratch.visible[row, 1] - first, 0, keys)
        low_b = _clip(scratch.visible[row + 1, 0] - first, 0, keys)
        high_b = _clip(scratch.visible[row + 1, 1] - first, 0, keys)
        # What a row sees begins and ends no earlier than for the row before: first alone, together, second alone.
        both = min(low_b, high_a)
        _add_values(weights, at, tile, low_a, both, width, partial, row)
        _add_values_pair(weights, at, split_size, tile, both, high_a, width, partial, row)
        _add_values(weights, at + split_size, tile, max(high_a, low_b), high_b, width, partial, row + 1)


@njit
def _attend_item(
    query,
    out,
    keys,
    values,
    pages,
    page_size,
    scoring,
    split_size,
    first_row,
    tokens,
    position,
    kv_head,
    group,
    scratch,
):
    """Rows are ``tokens`` query tokens from ``position`` on, each with the ``group`` query heads of one KV head."""
    head_size, width = query.shape[2], scratch.width
    visible, split, running = scratch.visible, scratch.split, scratch.running
    rows = tokens * group
    even_rows = rows + rows % 2
    stop = position + tokens
    window = scoring.window
    first_key = max(0, position - window + 1) if window > 0 else 0
    tile_keys = scratch.tile.size // width
    for row in range(rows):
        for d in range(head_size):
            scratch.queries[row * width + d] = query[first_row + row // group, kv_head * group + row % group, d]
    scratch.total[: even_rows * width] = np.float32(0.0)
    running[:, 0] = _MINUS_INFINITY
    running[:, 1] = np.float32(0.0)

    for start in range(first_key - first_key % split_size, stop, split_size):
        split_stop = min(start + split_size, stop)
        for row in range(even_rows):
            # An odd last row is paired with a copy of its own range, whose result nobody reads.
            row_position = position + min(row, rows - 1) // group
            visible[row, 0] = _clip(row_position - window + 1 - start, 0, split_stop - start) if window > 0 else 0
            visible[row, 1] = _clip(row_position + 1 - start, 0, split_stop - start)
        first_tile = start + max(0, first_key - start) // tile_keys * tile_keys

        for tile_start in range(first_tile, split_stop, tile_keys):
            # Pages before the first visible key may be gone.
            begin = max(tile_start, first_key)
            end = min(tile_start + tile_keys, split_stop)
            _load_rows(keys, kv_head, pages, page_size, begin, end, head_size, scratch, begin - tile_start)
            _score_rows(scratch, head_size, tile_start - start, end - tile_start, even_rows, split_size)

        for row in range(rows):
            low, high = visible[row]
            if low < high:
                scores = scratch.scores[row * split_size : (row + 1) * split_size]
                slope = scoring.slopes[kv_head * group + row % group]
                distance = start - (position + row // group)
                split[row, 0], split[row, 1] = _softmax(scores, low, high, scoring, slope, distance)

        scratch.partial[: even_rows * width] = np.float32(0.0)
        for tile_start in range(first_tile, split_stop, tile_keys):
            begin = max(tile_start, first_key)
            end = min(tile_start + tile_keys, split_stop)
            _load_rows(values, kv_head, pages, page_size, begin, end, head_size, scratch, begin - tile_start)
            _add_values_rows(scratch, tile_start - start, end - tile_start, even_rows, split_size)

        for row in range(rows):
            if visible[row, 0] < visible[row, 1]:
                _merge(scratch.total, scratch.partial, row, width, running[row], split[row])

    for row in range(rows):
        into = out[first_row + row // group, kv_head * group + row % group]
        for d in range(head_size):
            into[d] = scratch.total[row * width + d] / running[row, 1]


@njit
def _new_scratch(rows, head_size, tile_keys, split_size):
    width = (head_size + 31) // 32 * 32
    return _Scratch(
        width,
        np.zeros(tile_keys * width, dtype=np.float32),
        np.zeros(rows * width, dtype=np.float32),
        np.zeros(rows * split_size, dtype=np.float32),
        np.zeros(rows * width, dtype=np.float32),
        np.zeros(rows * width, dtype=np.float32),
        np.zeros((rows, 2), dtype=np.int64),
        np.zeros((rows, 2), dtype=np.float32),
        np.zeros((rows, 2), dtype=np.float32),
    )


def _attend(
    query, out, keys, values, block_table, page_size, scoring, split_size, group, tile_rows, tile_keys, items, shares
):
    """Each thread works through its share of the items with scratch of its own.

    query and out: [tokens, query_heads, head_size] fp32; items and shares from :func:`deal`; ``tile_rows`` is even.
    """
    for thread in prange(shares.size - 1):
        scratch = _new_scratch(tile_rows, query.shape[2], tile_keys, split_size)
        for item in range(shares[thread], shares[thread + 1]):
            request, first_row, tokens, position, kv_head = items[item]
            pages = block_table[request]
            _attend_item(
                query, out, keys, values, pages, page_size, scoring, split_size,
                first_row, tokens, position, kv_head, group, scratch,
            )  # fmt: skip


def _deal(starts, lengths, kv_heads, tile_tokens, window, threads, serial_below):
    """The work, [items, 5] of (request, first row, tokens, first position, KV head), and where threads begin in it.

    The items are dealt out from the longest to the shortest, there and back, so that shares are about equal; all to one
    thread if there are fewer than ``serial_below`` (query token, key, KV head) triples.
    """
    count = 0
    for request in range(lengths.size):
        count += (starts[request + 1] - starts[request] + tile_tokens - 1) // tile_tokens * kv_heads
    items = np.empty((count, 5), dtype=np.int64)
    cost = np.empty(count, dtype=np.int64)
    i = 0
    for request in range(lengths.size):
        stop = starts[request + 1]
        for row in range(starts[request], stop, tile_tokens):
            tokens = min(tile_tokens, stop - row)
            position = lengths[request] - (stop - row)
            keys = position + tokens
            if window > 0:
                keys = min(keys, window + tokens - 1)
            for kv_head in range(kv_heads):
                items[i, 0] = request
                items[i, 1] = row
                items[i, 2] = tokens
                items[i, 3] = position
                items[i, 4] = kv_head
                cost[i] = -keys * tokens
                i += 1
    if -cost.sum() < serial_below:
        threads = 1
    order = np.argsort(cost, kind="mergesort")
    shares = np.zeros(threads + 1, dtype=np.int64)
    dealt = np.empty_like(items)
    into = 0
    for thread in range(threads):
        for place in range(count):
            turn = place % (2 * threads)
            if min(turn, 2 * threads - 1 - turn) == thread:
                dealt[into] = items[order[place]]
                into += 1
        shares[thread + 1] = into
    return dealt, shares


attend = compiled(_attend, parallel=True)
deal = compiled(_deal)
