"""Triton kernels around FlexAttention on a GPU: they write its block mask from the block table, gather the query rows
that it attends with, and merge its partial results.

A block is some query rows of one request: (token, head of the group) pairs, the same for every KV head. An entry is a
block and one split of keys that it sees: a query block of FlexAttention.
"""

import triton
import triton.language as tl

from ..splits import merge_splits, normalize, split_of, start_of

BLOCK = 8
"""Numbers in the description of a block: request, first row, first split, splits, rows of the request, its first row in
the query, its keys before the query, and its keys.
"""
ENTRY = 4
"""Numbers in the description of an entry: block, last tile of its request if it holds keys that are not written (-1:
none), and how many of that tile are written.
"""
_AT_ONCE = tl.constexpr(1024)
"""Requests, or blocks, that a program looks at in a step."""
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _blocks_of(query_start_loc, index, exists, group: tl.constexpr, block_rows: tl.constexpr):
    """How many blocks each request has."""
    start = tl.load(query_start_loc + index, mask=exists, other=0)
    tokens = (tl.load(query_start_loc + index + 1, mask=exists, other=0) - start).to(tl.int32)
    return tl.cdiv(tokens * group, block_rows)


@triton.jit(do_not_specialize=["requests", "most_blocks"])
def list_blocks(
    query_start_loc,
    seq_lens,
    blocks,
    requests,
    most_blocks,
    group: tl.constexpr,
    block_rows: tl.constexpr,
    levels: tl.constexpr,
    window: tl.constexpr,
):
    """Writes the blocks of one request, those of all requests in order; the rest of the list gets no splits."""
    request = tl.program_id(0)
    lanes = tl.arange(0, _AT_ONCE)
    before, total = tl.zeros((_AT_ONCE,), tl.int32), tl.zeros((_AT_ONCE,), tl.int32)
    for first in range(0, requests, _AT_ONCE):
        index = first + lanes
        count = _blocks_of(query_start_loc, index, index < requests, group, block_rows)
        total += count
        before += tl.where(index < request, count, 0)
    start = tl.load(query_start_loc + request).to(tl.int32)
    rows = (tl.load(query_start_loc + request + 1).to(tl.int32) - start) * group
    keys = tl.load(seq_lens + request).to(tl.int32)
    past = keys - rows // group
    count = tl.cdiv(rows, block_rows)
    first_block = tl.sum(before)
    for first in range(0, count, _AT_ONCE):
        number = first + lanes
        place = blocks + (first_block + number) * 8
        exists = number < count
        row = number * block_rows
        last = past + (tl.minimum(row + block_rows, rows) - 1) // group
        first_key = row * 0
        if window > 0:
            first_key = tl.maximum(past + row // group - window + 1, 0)
        first_split = split_of(first_key, levels)
        splits = split_of(last, levels) + 1 - first_split
        tl.store(place, row * 0 + request, mask=exists)
        tl.store(place + 1, row, mask=exists)
        tl.store(place + 2, first_split, mask=exists)
        tl.store(place + 3, splits, mask=exists)
        tl.store(place + 4, row * 0 + rows, mask=exists)
        tl.store(place + 5, row * 0 + start, mask=exists)
        tl.store(place + 6, row * 0 + past, mask=exists)
        tl.store(place + 7, row * 0 + keys, mask=exists)
    used = tl.sum(total)
    for first in range(used + request * _AT_ONCE, most_blocks, requests * _AT_ONCE):
        number = first + lanes
        tl.store(blocks + number * 8 + 3, number * 0, mask=number < most_blocks)


@triton.jit(do_not_specialize=["most_blocks", "most_entries", "page_tiles", "stride_page_tiles", "all_tiles", "stride"])
def list_entries(
    table,
    blocks,
    first_entries,
    entries,
    key_blocks,
    key_tiles,
    positions,
    members,
    first_keys,
    most_blocks,
    most_entries,
    page_tiles,
    stride_page_tiles,
    all_tiles,
    stride,
    group: tl.constexpr,
    block_rows: tl.constexpr,
    tile: tl.constexpr,
    most_tiles: tl.constexpr,
    levels: tl.constexpr,
    window: tl.constexpr,
):
    """Writes the entries of one block, those of all blocks in order; the rest of the list gets no keys.

    Args:
        table: [requests, pages], ``stride`` apart.
        first_entries: [blocks], the first entry of each.
        key_blocks: [entries], FlexAttention's kv_num_blocks.
        key_tiles: [entries, most_tiles], its kv_indices: physical tiles, in the order of the positions.
        positions: [entries * block_rows], of each row; -1 where there is none.
        members: the same, its head in the group.
        first_keys: [all_tiles], the position of the first key of each physical tile that is in the list.
        page_tiles: tiles of a page.
        stride_page_tiles: tiles from one page to the next, those of other heads between them.
    """
    block = tl.program_id(0)
    lanes = tl.arange(0, _AT_ONCE)
    before, total = tl.zeros((_AT_ONCE,), tl.int32), tl.zeros((_AT_ONCE,), tl.int32)
    for first in range(0, most_blocks, _AT_ONCE):
        index = first + lanes
        count = tl.load(blocks + index * 8 + 3, mask=index < most_blocks, other=0)
        total += count
        before += tl.where(index < block, count, 0)
    first_entry = tl.sum(before)
    tl.store(first_entries + block, first_entry)
    for first in range(tl.sum(total) + block * _AT_ONCE, most_entries, most_blocks * _AT_ONCE):
        index = first + lanes
        tl.store(key_blocks + index, index * 0, mask=index < most_entries)

    splits = tl.load(blocks + block * 8 + 3)
    if splits > 0:
        request = tl.load(blocks + block * 8)
        first_row = tl.load(blocks + block * 8 + 1)
        first_split = tl.load(blocks + block * 8 + 2)
        rows = tl.load(blocks + block * 8 + 4)
        past = tl.load(blocks + block * 8 + 6)
        keys = tl.load(blocks + block * 8 + 7)
        stop = past + (tl.minimum(first_row + block_rows, rows) - 1) // group + 1
        first_key = past * 0
        if window > 0:
            first_key = tl.maximum(past + first_row // group - window + 1, 0)
        row = first_row + tl.arange(0, block_rows)
        position = tl.where(row < rows, past + row // group, -1)
        # Never more than the memory holds, if lengths on the host were others.
        for number in range(tl.minimum(splits, most_entries - first_entry)):
            entry = first_entry + number
            start = start_of(first_split + number, levels)
            end = tl.minimum(start_of(first_split + number + 1, levels), stop)
            first_tile = tl.maximum(start, first_key) // tile
            count = tl.cdiv(end, tile) - first_tile
            lane = tl.arange(0, most_tiles)
            logical = first_tile + lane
            page = tl.load(
                table + request.to(tl.int64) * stride + logical // page_tiles, mask=lane < count, other=0
            ).to(tl.int32)
            physical = page * stride_page_tiles + logical % page_tiles
            inside = (lane < count) & (physical >= 0) & (physical < all_tiles)
            tl.store(first_keys + physical, logical * tile, mask=inside)
            tl.store(key_tiles + entry.to(tl.int64) * most_tiles + lane, tl.where(inside, physical, 0))
            tl.store(key_blocks + entry, count)
            last = tl.sum(tl.where(lane == count - 1, physical, 0))
            unwritten = (tl.cdiv(end, tile) * tile > keys) & (keys % tile > 0)
            tl.store(entries + entry * 4, block)
            tl.store(entries + entry * 4 + 1, tl.where(unwritten, last, -1))
            tl.store(entries + entry * 4 + 2, keys % tile)
            place = entry.to(tl.int64) * block_rows + tl.arange(0, block_rows)
            tl.store(positions + place, position)
            tl.store(members + place, row % group)


@triton.jit(do_not_specialize=["first_entry"])
def gather_rows(
    query,
    values,
    packed,
    blocks,
    entries,
    key_blocks,
    first_entry,
    stride_q_token,
    stride_q_head,
    stride_v_slot,
    stride_v_head,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
    block_rows: tl.constexpr,
    tile: tl.constexpr,
):
    """Copies the query rows of an entry for one KV head to ``packed`` [entries, block_rows, kv_heads, head_size]; rows
    that do not exist are left as they are.

    Values that nobody wrote and that are not finite become 0: FlexAttention weighs them by 0, which is no help against
    a NaN.
    """
    number, kv_head = tl.program_id(0), tl.program_id(1)
    entry = first_entry + number
    if tl.load(key_blocks + entry) > 0:
        block = tl.load(entries + entry * 4)
        first_row = tl.load(blocks + block * 8 + 1)
        rows = tl.load(blocks + block * 8 + 4)
        start = tl.load(blocks + block * 8 + 5)
        dims = tl.arange(0, padded_size)
        place = tl.arange(0, block_rows)
        row = first_row + place
        live = (row < rows)[:, None] & (dims < head_size)[None, :]
        token = (start + row // group).to(tl.int64)
        at = token * stride_q_token + (kv_head * group + row % group) * stride_q_head
        taken = tl.load(query + at[:, None] + dims[None, :], mask=live, other=0.0)
        to = ((number * block_rows + place).to(tl.int64) * kv_heads + kv_head) * head_size
        tl.store(packed + to[:, None] + dims[None, :], taken, mask=live)
        last = tl.load(entries + entry * 4 + 1)
        if last >= 0:
            slot = tl.arange(0, tile)
            unwritten = slot >= tl.load(entries + entry * 4 + 2)
            begin = (last.to(tl.int64) * tile + slot) * stride_v_slot + kv_head.to(tl.int64) * stride_v_head
            mask = unwritten[:, None] & (dims < head_size)[None, :]
            held = tl.load(values + begin[:, None] + dims[None, :], mask=mask, other=0.0)
            finite = tl.abs(held.to(tl.float32)) < float("inf")
            tl.store(values + begin[:, None] + dims[None, :], tl.zeros_like(held), mask=mask & (finite == 0))


@triton.jit(do_not_specialize=["first_entry", "count", "stride_lse"])
def merge_entries(
    out,
    partial,
    lses,
    kept_top,
    kept_weight,
    kept_acc,
    blocks,
    first_entries,
    first_entry,
    count,
    stride_o_token,
    stride_o_head,
    stride_p_row,
    stride_p_head,
    stride_lse,
    wave: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
    block_rows: tl.constexpr,
    rows_at_once: tl.constexpr,
):
    """Merges the entries ``first_entry`` to ``first_entry + count - 1`` into the rows of a block, ascending, for one
    KV head. A block that begins before them goes on where the last wave left it; one that ends after them is kept.

    Args:
        partial: normalised results, row ``e * block_rows + i`` of entry ``first_entry + e``.
        lses: [kv_heads, rows], natural.
        kept_top, kept_weight, kept_acc: [2, kv_heads, block_rows(, padded_size)]; ``wave`` says which is read.
    """
    block, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(first_entries + block)
    end = begin + tl.load(blocks + block * 8 + 3)
    low, high = tl.maximum(begin, first_entry), tl.minimum(end, first_entry + count)
    if low < high:
        first_row = tl.load(blocks + block * 8 + 1)
        rows = tl.load(blocks + block * 8 + 4)
        start = tl.load(blocks + block * 8 + 5)
        place = part * rows_at_once + tl.arange(0, rows_at_once)
        dims = tl.arange(0, padded_size)
        row = first_row + place
        live = (row < rows) & (place < block_rows)
        live_row = live[:, None] & (dims < head_size)[None, :]
        top = tl.full((rows_at_once,), -float("inf"), tl.float32)
        weight = tl.zeros((rows_at_once,), tl.float32)
        acc = tl.zeros((rows_at_once, padded_size), tl.float32)
        if low > begin:
            kept = (wave * kv_heads + kv_head) * block_rows + place
            top = tl.load(kept_top + kept, mask=live, other=-float("inf"))
            weight = tl.load(kept_weight + kept, mask=live, other=0.0)
            acc = tl.load(kept_acc + kept[:, None] * padded_size + dims[None, :], mask=live_row, other=0.0)
        for entry in range(low, high):
            at = (entry - first_entry).to(tl.int64) * block_rows + place
            lse = tl.load(lses + kv_head * stride_lse + at, mask=live, other=-float("inf"))
            result = tl.load(
                partial + at[:, None] * stride_p_row + kv_head * stride_p_head + dims[None, :], mask=live_row, other=0.0
            ).to(tl.float32)
            one = tl.full((rows_at_once,), 1.0, tl.float32)
            top, weight, acc = merge_splits(top, weight, acc, lse * _LOG2_E, one, result)
        if high == end:
            head = kv_head * group + row % group
            at = (start + row // group).to(tl.int64) * stride_o_token + head * stride_o_head
            result = normalize(top, weight, acc, top, False)
            tl.store(out + at[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=live_row)
        else:
            kept = ((1 - wave) * kv_heads + kv_head) * block_rows + place
            tl.store(kept_top + kept, top, mask=live)
            tl.store(kept_weight + kept, weight, mask=live)
            tl.store(kept_acc + kept[:, None] * padded_size + dims[None, :], acc, mask=live_row)
