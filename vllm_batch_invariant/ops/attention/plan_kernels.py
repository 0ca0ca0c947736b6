"""The lists of work of paged attention on a GPU, made there once a step: who computes which splits of which rows.

Requests of few rows are laid in one line, head after head and key after key. Every program gets a part of the line of
the same length, moved to the nearest end of a split or of a head: a part is contiguous, so a head is shared by
neighbours, and all of them end at about the same time.

Requests of many rows are blocks of rows. Many blocks are computed whole, those with the most keys first; if there are
few, such as a chunk behind a long context has, the splits of each are cut into parts of about the same length. Nothing
here can move a bit.
"""

import triton
import triton.language as tl

from .splits import split_of, start_of
from .work import WORK_SIZE, store_work

_CHUNK = tl.constexpr(1024)
"""Requests that a program looks at in a step."""
_HEAD_COST = tl.constexpr(2)
"""What it takes to begin a head, and to share one, in tiles of keys."""


@triton.jit
def _shape_of_work(
    query_start_loc, seq_lens, index, exists, group: tl.constexpr, levels: tl.constexpr, few: tl.constexpr,
    block_rows: tl.constexpr,
):  # fmt: skip
    """Of requests: whether each has few rows, its blocks of rows, its splits, its keys, and the parts that each of its
    blocks can be cut into.
    """
    start = tl.load(query_start_loc + index, mask=exists, other=0)
    rows = (tl.load(query_start_loc + index + 1, mask=exists, other=0) - start).to(tl.int32) * group
    length = tl.load(seq_lens + index, mask=exists, other=0).to(tl.int32)
    works = (rows > 0) & (length > 0)
    small = works & (rows <= few)
    blocks = tl.where(small, 1, tl.cdiv(rows, block_rows))
    splits = split_of(length - 1, levels) + 1
    # Every part of every block is as long as a split, so that there is the end of one in it.
    shortest = length - rows // group + tl.minimum(block_rows // group, rows // group)
    longest_split = start_of(splits, levels) - start_of(splits - 1, levels)
    parts = tl.maximum(shortest // longest_split, 1)
    return small, blocks, tl.where(works, splits, 0), length, parts


@triton.jit
def _most_parts(blocks, splits, room, items, kv_heads: tl.constexpr):
    """Parts of a block of many rows: as many as keep ``items`` programs busy, or 1 without room for partial results."""
    parts = tl.maximum(items // tl.maximum(blocks * kv_heads, 1), 1)
    return tl.where(splits <= room, parts, 1)


@triton.jit
def _first_part(at, line, parts):
    """The first of the equal parts of a line that begins at a place of it or later."""
    return tl.cdiv(at * parts, line).to(tl.int32)


@triton.jit
def _cut(
    part, line, parts, begin, each, splits, length, may_cut, levels: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """The split of its head that a part begins with; ``splits`` for what follows the head. ``begin`` is where the heads
    of the request begin on the line, and ``each`` how long one is.
    """
    tiles = tl.cdiv(length, tile)
    at = tl.maximum((part.to(tl.int64) * line // parts - begin) % each - _HEAD_COST, 0).to(tl.int32)
    number = split_of(at * tile, levels)
    before = at - start_of(number, levels) // tile
    after = tl.minimum(start_of(number + 1, levels) // tile, tiles) - at
    nearest = tl.where(before < after, number, number + 1)
    # A head that is cut is more work, so its ends are nearer than they seem.
    reach = tl.minimum(before, after) + _HEAD_COST
    nearest = tl.where(tiles - at <= reach, splits, nearest)
    nearest = tl.where((at <= reach) & (at <= tiles - at), 0, nearest)
    return tl.where(may_cut, nearest, tl.where(2 * at < tiles, 0, splits))


@triton.jit
def _store_few_rows(
    small_list, first_entries, request, splits, length, start, tokens, past, whole, begin, first_head, slot, may_cut,
    parts, kv_heads: tl.constexpr, padded_kv_heads: tl.constexpr, levels: tl.constexpr, tile: tl.constexpr,
    step: tl.constexpr,
):  # fmt: skip
    """The entries of a request on the line, which is ``whole`` long, the request's heads from ``begin`` on."""
    each = tl.cdiv(length, tile).to(tl.int64) + _HEAD_COST
    # The entry that begins with a head belongs to the part before the first one that begins in it.
    head = tl.arange(0, padded_kv_heads)
    part = _first_part(begin + head * each, whole, parts)
    run = _cut(part, whole, parts, begin, each, splits, length, may_cut, levels, tile)
    run = tl.where(part < _first_part(begin + (head + 1) * each, whole, parts), run, splits)
    place = small_list + (first_head + head + part).to(tl.int64) * WORK_SIZE
    own_slot = tl.where(run < splits, slot, -1)
    store_work(place, request, head, head * 0, run, own_slot, start, tokens, past, head < kv_heads)

    stop = _first_part(begin + kv_heads * each, whole, parts)
    for first in range(_first_part(begin, whole, parts), stop, step):
        later = first + tl.arange(0, step)
        mask = later < stop
        of_head = ((later.to(tl.int64) * whole // parts - begin) // each).to(tl.int32)
        cut = _cut(later, whole, parts, begin, each, splits, length, may_cut, levels, tile)
        end = _cut(later + 1, whole, parts, begin, each, splits, length, may_cut, levels, tile)
        end = tl.where(later + 1 < _first_part(begin + (of_head + 1) * each, whole, parts), end, splits)
        entry = first_head + of_head + later + 1
        at = small_list + entry.to(tl.int64) * WORK_SIZE
        cut_slot = tl.where(end - cut < splits, slot, -1)
        store_work(at, request, of_head, cut, end - cut, cut_slot, start, tokens, past, mask)
        tl.store(first_entries + later, entry, mask=mask)


@triton.jit
def _blocks_beyond(tiles, tokens, past, blocks, group: tl.constexpr, block_rows: tl.constexpr, tile: tl.constexpr):
    """How many blocks of requests of many rows have more than so many tiles of keys."""
    last_token = tl.maximum(tiles * tile - past, 0)
    first_block = tl.maximum(tl.cdiv(last_token * group + 1, block_rows) - 1, 0)
    return tl.where(last_token < tokens, tl.maximum(blocks - first_block, 0), 0)


@triton.jit
def _store_ranked(
    large_list, request, blocks, splits, start, tokens, past, all_blocks, all_tokens, all_past, lanes,
    group: tl.constexpr, block_rows: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """The entries of a request's blocks, each block whole, at their places among those of all requests by falling
    numbers of keys, so that programs that take turns end together.
    """
    for number in range(blocks):
        block = blocks - 1 - number
        tiles = tl.cdiv(past + tl.minimum((block * block_rows + block_rows - 1) // group, tokens - 1) + 1, tile)
        more = _blocks_beyond(tiles, all_tokens, all_past, all_blocks, group, block_rows, tile)
        as_many = _blocks_beyond(tiles - 1, all_tokens, all_past, all_blocks, group, block_rows, tile) - more
        before = tl.where(lanes < request, as_many, 0)
        own_more = tl.sum(tl.where(lanes == request, more, 0))
        rank = tl.sum(more) + tl.sum(before) + number - own_more
        zero = tl.arange(0, 1)
        place = large_list + rank.to(tl.int64) * WORK_SIZE + zero
        store_work(place, request, block * block_rows, zero, splits, -1, start, tokens, past, zero == 0)


@triton.jit
def _end_of_part(part, parts, keys, splits, levels: tl.constexpr):
    """The split that a part of a block begins with: the nearest to an equal share of the block's keys."""
    key = (keys.to(tl.int64) * part // parts).to(tl.int32)
    number = split_of(key, levels)
    nearer = key - start_of(number, levels) < start_of(number + 1, levels) - key
    return tl.where(part < parts, tl.where(nearer, number, number + 1), splits)


@triton.jit
def _store_many_rows(
    entries, request, blocks, splits, start, tokens, past, parts, first_slot,
    group: tl.constexpr, levels: tl.constexpr, block_rows: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """The entries of a request's blocks, each block in parts."""
    for first in range(0, blocks * parts, step):
        number = first + tl.arange(0, step)
        block = blocks - 1 - number // parts
        part = number % parts
        keys = past + tl.minimum((block * block_rows + block_rows - 1) // group, tokens - 1) + 1
        begin = _end_of_part(part, parts, keys, splits, levels)
        end = _end_of_part(part + 1, parts, keys, splits, levels)
        slot = tl.where(parts > 1, first_slot + block * splits, -1)
        mask = number < blocks * parts
        row = block * block_rows
        store_work(entries + number * WORK_SIZE, request, row, begin, end - begin, slot, start, tokens, past, mask)


@triton.jit
def _clear(counters, most, step: tl.constexpr):
    """Zero this program's share of the counters. Attention leaves them 0, but memory that a sleeping engine gave away
    comes back with anything in it.
    """
    for first in range(tl.program_id(0) * step, most, tl.num_programs(0) * step):
        index = first + tl.arange(0, step)
        tl.store(counters + index, index * 0, mask=index < most)


@triton.jit(do_not_specialize=["requests", "counters", "room_small", "room_large", "parts", "items"])
def plan_kernel(
    query_start_loc,
    seq_lens,
    first_entries,
    small_list,
    count,
    large_list,
    arrived,
    requests,
    counters,
    room_small,
    room_large,
    parts,
    items,
    kv_heads: tl.constexpr,
    padded_kv_heads: tl.constexpr,
    group: tl.constexpr,
    levels: tl.constexpr,
    tile: tl.constexpr,
    few: tl.constexpr,
    block_rows: tl.constexpr,
    step: tl.constexpr,
):
    """Writes the entries of one request, of ``few`` rows or of more. Every program adds up what comes before it, so
    that one launch suffices.

    Args:
        first_entries: of each part of ``small_list``, and the end.
        count: entries of ``large_list``.
        arrived: so many ``counters`` of finished splits, which the step's attention finds at 0.
        room_small, room_large: slots for partial results of the requests of few rows and of more.
        parts: programs that work on few rows at the same time.
        items: programs that work on blocks of many rows at the same time, each for one KV head.
    """
    request = tl.program_id(0)
    lanes = tl.arange(0, _CHUNK)
    _clear(arrived, counters, _CHUNK)
    nothing = tl.zeros((_CHUNK,), tl.int32)
    small_splits, large_splits, small_slots, large_slots = nothing, nothing, nothing, nothing
    line, line_before, small_before = nothing.to(tl.int64), nothing.to(tl.int64), nothing
    small_count, large_blocks = nothing, nothing
    for first in range(0, requests, _CHUNK):
        index = first + lanes
        small, blocks, splits, length, _ = _shape_of_work(
            query_start_loc, seq_lens, index, index < requests, group, levels, few, block_rows
        )
        before = index < request
        of_small = tl.where(small, splits, 0)
        of_large = tl.where(small, 0, blocks * splits)
        on_line = tl.where(small, tl.cdiv(length, tile) + _HEAD_COST, 0)
        small_splits += of_small
        large_splits += of_large
        large_blocks += tl.where(small | (splits == 0), 0, blocks)
        small_slots += tl.where(before, of_small, 0)
        large_slots += tl.where(before, of_large, 0)
        line += on_line
        line_before += tl.where(before, on_line, 0)
        small_count += small.to(tl.int32)
        small_before += tl.where(before, small.to(tl.int32), 0)
    most_parts = _most_parts(tl.sum(large_blocks), tl.sum(large_splits), room_large, items, kv_heads)

    entries, entries_before = nothing, nothing
    for first in range(0, requests, _CHUNK):
        index = first + lanes
        small, blocks, splits, length, can = _shape_of_work(
            query_start_loc, seq_lens, index, index < requests, group, levels, few, block_rows
        )
        of_large = tl.where(small | (splits == 0), 0, blocks * tl.minimum(can, most_parts))
        entries += of_large
        entries_before += tl.where(index < request, of_large, 0)
    all_small = tl.sum(small_count)
    if request == 0:
        tl.store(count, tl.sum(entries))
        tl.store(first_entries + parts, all_small * kv_heads + tl.where(all_small == 0, 0, parts))
        if all_small == 0:
            for first in range(0, parts, step):
                part = first + tl.arange(0, step)
                tl.store(first_entries + part, part * 0, mask=part < parts)

    small, blocks, splits, length, can = _shape_of_work(
        query_start_loc, seq_lens, request, request < requests, group, levels, few, block_rows
    )
    start = tl.load(query_start_loc + request).to(tl.int32)
    tokens = tl.load(query_start_loc + request + 1).to(tl.int32) - start
    if small:
        _store_few_rows(
            small_list, first_entries, request, splits, length, start, tokens, length - tokens, tl.sum(line) * kv_heads,
            tl.sum(line_before) * kv_heads, tl.sum(small_before) * kv_heads, tl.sum(small_slots),
            tl.sum(small_splits) <= room_small, parts, kv_heads, padded_kv_heads, levels, tile,
            step,
        )  # fmt: skip
    elif (most_parts == 1) & (requests <= _CHUNK):
        begins = tl.load(query_start_loc + lanes, mask=lanes < requests, other=0)
        their_tokens = (tl.load(query_start_loc + lanes + 1, mask=lanes < requests, other=0) - begins).to(tl.int32)
        is_small, their_blocks, their_splits, their_lengths, _ = _shape_of_work(
            query_start_loc, seq_lens, lanes, lanes < requests, group, levels, few, block_rows
        )
        their_blocks = tl.where(is_small | (their_splits == 0), 0, their_blocks)
        _store_ranked(
            large_list, request, tl.where(splits > 0, blocks, 0), splits, start, tokens, length - tokens, their_blocks,
            their_tokens, their_lengths - their_tokens, lanes, group, block_rows, tile,
        )  # fmt: skip
    else:
        _store_many_rows(
            large_list + tl.sum(entries_before) * WORK_SIZE, request, tl.where(splits > 0, blocks, 0), splits, start,
            tokens, length - tokens, tl.minimum(can, most_parts), tl.sum(large_slots), group, levels, block_rows, step,
        )  # fmt: skip
