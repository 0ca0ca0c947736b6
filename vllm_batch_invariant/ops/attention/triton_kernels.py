"""Triton kernels of paged attention: the list of work, and one kernel that serves prefill and decode.

A row's bits follow from its own keys by construction: masked keys weigh exactly 0, a tile without a visible key changes
nothing, weights are summed by the tensor cores like the values they weigh, splits are merged ascending by one function,
and products and sums of vectors are fused only where the source says so. What is measured and not constructed: that
tensor cores give a row the same bits in blocks of 16, 64 and 128 rows.
Online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867; tiles as in FlashAttention, Dao et al. 2022,
arXiv:2205.14135; splits as in Flash-Decoding, pytorch.org/blog/flash-decoding.
"""

import triton
import triton.language as tl

_ONES = tl.constexpr(16)
"""Equal columns of the sums of weights: a matrix product has at least so many."""
ENTRY = 8
"""Numbers in an entry of the list of work: request, first row of the block, first split, number of splits, slot of
partial results that split 0 of the block would have (-1: none, the entry is all of the block), first row of the request
in the query, its tokens, and its keys before them.
"""
_CHUNK = tl.constexpr(1024)
"""Requests that the planning kernel looks at in a step."""


@triton.jit
def _split_of(key, split: tl.constexpr, early_size: tl.constexpr, early_keys: tl.constexpr):
    """The split that a key is in: ``AttentionReduction.split_of``."""
    late: tl.constexpr = early_keys // early_size
    return tl.where(key < early_keys, key // early_size, late + (key - early_keys) // split)


@triton.jit
def _start_of(number, split: tl.constexpr, early_size: tl.constexpr, early_keys: tl.constexpr):
    """The first key of a split: ``AttentionReduction.start_of``."""
    late: tl.constexpr = early_keys // early_size
    return tl.where(number < late, number * early_size, early_keys + (number - late) * split)


@triton.jit
def _shape_of_work(
    query_start_loc, seq_lens, index, exists, group: tl.constexpr, split: tl.constexpr, early_size: tl.constexpr,
    early_keys: tl.constexpr, few: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """Of requests: whether each is small, its blocks of rows, and its splits."""
    start = tl.load(query_start_loc + index, mask=exists, other=0)
    rows = (tl.load(query_start_loc + index + 1, mask=exists, other=0) - start).to(tl.int32) * group
    small = (rows > 0) & (rows <= few)
    blocks = tl.where(small, 1, tl.cdiv(rows, block_rows))
    length = tl.load(seq_lens + index, mask=exists, other=0).to(tl.int32)
    splits = _split_of(length - 1, split, early_size, early_keys) + 1
    return small, blocks, tl.where((rows > 0) & (length > 0), splits, 0)


@triton.jit
def _run(splits, room, programs, kv_heads: tl.constexpr):
    """Splits in an entry: as many as keep every program busy for two entries; all of them if partial results would
    have no room.
    """
    run = tl.maximum(tl.cdiv(splits * kv_heads, 2 * programs), 1)
    return tl.where(splits <= room, run, 1 << 30)


@triton.jit(do_not_specialize=["requests", "room_small", "room_large", "programs"])
def plan_kernel(
    query_start_loc,
    seq_lens,
    counts,
    small_list,
    large_list,
    requests,
    room_small,
    room_large,
    programs,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    split: tl.constexpr,
    early_size: tl.constexpr,
    early_keys: tl.constexpr,
    few: tl.constexpr,
    block_rows: tl.constexpr,
    step: tl.constexpr,
):
    """Writes the entries of one request, of ``few`` rows or of more. Every program adds up what comes before it, so
    that one launch suffices.

    Args:
        room_small, room_large: slots for partial results of the requests of few rows and of more.
        programs: how many work at the same time.
    """
    request = tl.program_id(0)
    lanes = tl.arange(0, _CHUNK)
    nothing = tl.zeros((_CHUNK,), tl.int32)
    small_splits, large_splits, small_slots, large_slots = nothing, nothing, nothing, nothing
    for first in range(0, requests, _CHUNK):
        index = first + lanes
        small, blocks, splits = _shape_of_work(
            query_start_loc, seq_lens, index, index < requests, group, split, early_size, early_keys, few, block_rows
        )
        before = index < request
        small_splits += tl.where(small, splits, 0)
        large_splits += tl.where(small, 0, blocks * splits)
        small_slots += tl.where(before & small, splits, 0)
        large_slots += tl.where(before & (small == 0), blocks * splits, 0)
    small_run = _run(tl.sum(small_splits), room_small, programs, kv_heads)
    large_run = _run(tl.sum(large_splits), room_large, programs, kv_heads)

    small_items, large_items, small_before, large_before = nothing, nothing, nothing, nothing
    for first in range(0, requests, _CHUNK):
        index = first + lanes
        small, blocks, splits = _shape_of_work(
            query_start_loc, seq_lens, index, index < requests, group, split, early_size, early_keys, few, block_rows
        )
        before = index < request
        of_small = tl.where(small, tl.cdiv(splits, small_run), 0)
        of_large = tl.where(small, 0, blocks * tl.cdiv(splits, large_run))
        small_items += of_small
        large_items += of_large
        small_before += tl.where(before, of_small, 0)
        large_before += tl.where(before, of_large, 0)
    if request == 0:
        tl.store(counts, tl.sum(small_items))
        tl.store(counts + 1, tl.sum(large_items))

    small, blocks, splits = _shape_of_work(
        query_start_loc, seq_lens, request, request < requests, group, split, early_size, early_keys, few, block_rows
    )
    run = tl.where(small, small_run, large_run)
    each = tl.cdiv(splits, run)
    first_slot = tl.where(small, tl.sum(small_slots), tl.sum(large_slots))
    entries = large_list + tl.sum(large_before) * 8
    if small:
        entries = small_list + tl.sum(small_before) * 8
    start = tl.load(query_start_loc + request).to(tl.int32)
    tokens = tl.load(query_start_loc + request + 1).to(tl.int32) - start
    past = tl.load(seq_lens + request).to(tl.int32) - tokens
    for first in range(0, blocks * each, step):
        number = first + tl.arange(0, step)
        mask = number < blocks * each
        # The blocks with the most keys first.
        block = blocks - 1 - number // each
        place = entries + number * 8
        begin = number % each * run
        tl.store(place, tl.zeros((step,), tl.int32) + request, mask=mask)
        tl.store(place + 1, block * block_rows, mask=mask)
        tl.store(place + 2, begin, mask=mask)
        tl.store(place + 3, tl.minimum(run, splits - begin), mask=mask)
        tl.store(place + 4, tl.where(each > 1, first_slot + block * splits, -1), mask=mask)
        tl.store(place + 5, tl.zeros((step,), tl.int32) + start, mask=mask)
        tl.store(place + 6, tl.zeros((step,), tl.int32) + tokens, mask=mask)
        tl.store(place + 7, tl.zeros((step,), tl.int32) + past, mask=mask)


@triton.jit
def _finite(top):
    """The number to subtract before exp2: 0 where nothing was visible, so that -inf gives a weight of 0 and not NaN."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def _merge_splits(top, weight, acc, split_top, split_weight, split_acc):
    """The running result and one more split; a split without a visible key weighs exactly 0."""
    new_top = tl.maximum(top, split_top)
    old, new = tl.exp2(top - _finite(new_top)), tl.exp2(split_top - _finite(new_top))
    weight = tl.fma(weight, old, split_weight * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), split_acc * new[:, None])
    return new_top, weight, acc


@triton.jit
def _finished(top, weight, acc, sink, has_sinks: tl.constexpr):
    """The result of a row: its weighted values over its weights, to which a sink adds one that weighs no value."""
    if has_sinks:
        new_top = tl.maximum(top, sink)
        old = tl.exp2(top - new_top)
        weight = tl.fma(weight, old, tl.exp2(sink - new_top))
        acc = acc * old[:, None]
    return acc / tl.where(weight == 0.0, 1.0, weight)[:, None]


@triton.jit
def _tanh(x):
    """tanh from exp2 alone, off by at most an ulp of 1."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    return tl.where(x < 0, e - 1.0, 1.0 - e) / (1.0 + e)


@triton.jit
def _pages(
    table, tile_start, first_key, stop, by_descriptor: tl.constexpr, tile: tl.constexpr, page_size: tl.constexpr
):  # fmt: skip
    """The physical pages of a tile's keys, or the page if it is one. Asked for a tile ahead: loads whose addresses wait
    for other loads would not be pipelined.
    """
    if by_descriptor:
        page = tl.load(table + tile_start // page_size, mask=tile_start < stop, other=0)
    else:
        keys = tile_start + tl.arange(0, tile)
        needed = (keys >= first_key) & (keys < stop)
        page = tl.load(table + keys // page_size, mask=needed, other=0).to(tl.int64)
    return page


@triton.jit
def _tile_of_keys(
    q, keys_at, values_at, page, kv_head, tile_start, first_key, stop, position, slope, scale, soft_cap, window,
    stride_k_page, stride_k_head, stride_k_slot, stride_v_page, stride_v_head, stride_v_slot,
    top, weight, acc, dims, in_head,
    masked: tl.constexpr, by_descriptor: tl.constexpr, has_soft_cap: tl.constexpr, has_slopes: tl.constexpr,
    has_window: tl.constexpr, tile: tl.constexpr, page_size: tl.constexpr, padded_size: tl.constexpr,
    whole_head: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax; ``masked`` where some row does not see all of the tile's keys."""
    keys = tile_start + tl.arange(0, tile)
    if by_descriptor:
        slot = tile_start % page_size
        k = keys_at.load([page, kv_head, slot, 0]).reshape(tile, padded_size)
        v = values_at.load([page, kv_head, slot, 0]).reshape(tile, padded_size)
        if masked:
            # Unwritten slots may hold anything, NaN included.
            v = tl.where((keys < stop)[:, None], v, 0.0)
        k = k.T
    else:
        slot = keys % page_size
        at_k = page * stride_k_page + kv_head.to(tl.int64) * stride_k_head + slot * stride_k_slot
        at_v = page * stride_v_page + kv_head.to(tl.int64) * stride_v_head + slot * stride_v_slot
        if masked:
            needed = (keys >= first_key) & (keys < stop)
            k = tl.load(keys_at + at_k[None, :] + dims[:, None], mask=needed[None, :] & in_head[:, None], other=0.0)
            v = tl.load(values_at + at_v[:, None] + dims[None, :], mask=needed[:, None] & in_head[None, :], other=0.0)
        elif whole_head:
            k = tl.load(keys_at + at_k[None, :] + dims[:, None])
            v = tl.load(values_at + at_v[:, None] + dims[None, :])
        else:
            k = tl.load(keys_at + at_k[None, :] + dims[:, None], mask=in_head[:, None], other=0.0)
            v = tl.load(values_at + at_v[:, None] + dims[None, :], mask=in_head[None, :], other=0.0)

    # In units of log2(e), which the arguments bring along.
    score = tl.dot(q, k, input_precision="ieee")
    factor = scale
    if has_soft_cap or has_slopes:
        score = score * scale
        factor = 1.0
    if has_soft_cap:
        score = soft_cap * _tanh(score / soft_cap)
    distance = position[:, None] - keys[None, :]
    if has_slopes:
        score -= slope[:, None] * distance.to(tl.float32)
    if masked:
        visible = distance >= 0
        if has_window:
            visible &= distance < window
        score = tl.where(visible, score, -float("inf"))
    new_top = tl.maximum(top, tl.max(score, 1) * factor)
    zero = _finite(new_top)
    p = tl.exp2(tl.fma(score, tl.full(score.shape, factor, tl.float32), tl.broadcast_to(-zero[:, None], score.shape)))
    p = p.to(v.dtype)
    old = tl.exp2(top - zero)[:, None]
    ones = tl.full((tile, _ONES), 1.0, v.dtype)
    weight = tl.dot(p, ones, weight * old, input_precision="ieee")
    acc = tl.dot(p, v, acc * old, input_precision="ieee")
    return new_top, weight, acc


@triton.jit
def _end_of_split(
    top, weight, acc, split_top, split_weight, split_acc, slot, number, kv_head, keep, partial_top, partial_weight,
    partial_acc, dims, in_head, may_keep: tl.constexpr, kv_heads: tl.constexpr, kept_rows: tl.constexpr,
    block_rows: tl.constexpr, padded_size: tl.constexpr,
):  # fmt: skip
    """A finished split goes among the partial results, or straight into the result of its rows."""
    # All columns are equal, so the largest is any of them.
    summed = tl.max(split_weight, 1)
    if may_keep:
        if slot >= 0:
            place = ((slot + number).to(tl.int64) * kv_heads + kv_head) * kept_rows + tl.arange(0, block_rows)
            tl.store(partial_top + place, split_top, mask=keep)
            tl.store(partial_weight + place, summed, mask=keep)
            keep_row = keep[:, None] & in_head[None, :]
            tl.store(partial_acc + place[:, None] * padded_size + dims[None, :], split_acc, mask=keep_row)
        else:
            top, weight, acc = _merge_splits(top, weight, acc, split_top, summed, split_acc)
    else:
        top, weight, acc = _merge_splits(top, weight, acc, split_top, summed, split_acc)
    return top, weight, acc


@triton.jit
def _merge_kept(
    out, partial_top, partial_weight, partial_acc, sinks, first_place, splits, first_row, start, tokens, kv_head,
    stride_o_token, stride_o_head, has_sinks: tl.constexpr, kv_heads: tl.constexpr, group: tl.constexpr,
    head_size: tl.constexpr, padded_size: tl.constexpr, kept_rows: tl.constexpr, kept_block: tl.constexpr,
):  # fmt: skip
    """Merges the partial results of a block of rows, in ascending order, and writes the result."""
    kept = tl.arange(0, kept_block)
    dims = tl.arange(0, padded_size)
    token = (first_row + kept) // group
    keep = (kept < kept_rows) & (token < tokens)
    keep_row = keep[:, None] & (dims < head_size)[None, :]
    head = kv_head * group + (first_row + kept) % group
    top = tl.full((kept_block,), -float("inf"), tl.float32)
    weight = tl.zeros((kept_block,), tl.float32)
    acc = tl.zeros((kept_block, padded_size), tl.float32)
    place = first_place + kept
    # Many loads at once: each waits for memory as long as all.
    for _ in tl.range(0, splits, loop_unroll_factor=(64 // kept_block if kept_block <= 32 else 1)):
        split_top = tl.load(partial_top + place, mask=keep, other=-float("inf"), cache_modifier=".cg")
        split_weight = tl.load(partial_weight + place, mask=keep, other=0.0, cache_modifier=".cg")
        split_acc = tl.load(
            partial_acc + place[:, None] * padded_size + dims[None, :], mask=keep_row, other=0.0, cache_modifier=".cg"
        )
        top, weight, acc = _merge_splits(top, weight, acc, split_top, split_weight, split_acc)
        place += kv_heads * kept_rows
    sink = tl.zeros((kept_block,), tl.float32)
    if has_sinks:
        sink = tl.load(sinks + head)
    row = (start + token).to(tl.int64)
    tl.store(
        out + row[:, None] * stride_o_token + head[:, None] * stride_o_head + dims[None, :],
        _finished(top, weight, acc, sink, has_sinks).to(out.dtype.element_ty),
        mask=keep_row,
    )


@triton.jit(do_not_specialize=["table_stride", "window"])
def attention_kernel(
    query,
    keys_at,
    values_at,
    out,
    table,
    count,
    work,
    partial_top,
    partial_weight,
    partial_acc,
    arrived,
    slopes,
    sinks,
    scale,
    soft_cap,
    window,
    table_stride,
    stride_q_token,
    stride_q_head,
    stride_k_page,
    stride_k_head,
    stride_k_slot,
    stride_v_page,
    stride_v_head,
    stride_v_slot,
    stride_o_token,
    stride_o_head,
    by_descriptor: tl.constexpr,
    has_soft_cap: tl.constexpr,
    has_slopes: tl.constexpr,
    has_window: tl.constexpr,
    has_sinks: tl.constexpr,
    many_rows: tl.constexpr,
    may_keep: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
    page_size: tl.constexpr,
    split: tl.constexpr,
    early_size: tl.constexpr,
    early_keys: tl.constexpr,
    tile: tl.constexpr,
    block_rows: tl.constexpr,
    kept_rows: tl.constexpr,
    kept_block: tl.constexpr,
):
    """Works on every entry of ``work`` and every KV head. Programs that share the splits of a block of rows leave them
    among the partial results; the last one to arrive merges them all, in ascending order.

    ``many_rows``: tiles that every row sees are not masked, which changes no bit, and the loop over tiles is within one
    over splits, where the tensor cores limit the speed; else one loop keeps memory busy across the ends of splits.
    ``may_keep``: some block is shared.
    """
    dims = tl.arange(0, padded_size)
    in_head = dims < head_size
    whole_head: tl.constexpr = head_size == padded_size
    total = tl.load(count) * kv_heads
    for place in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        kv_head = place % kv_heads
        entry = work + place // kv_heads * 8
        request = tl.load(entry).to(tl.int64)
        first_row = tl.load(entry + 1)
        first_split = tl.load(entry + 2)
        run = tl.load(entry + 3)
        slot = tl.load(entry + 4)
        start = tl.load(entry + 5)
        tokens = tl.load(entry + 6)
        past = tl.load(entry + 7)
        own_table = table + request * table_stride

        # Keys that some row of the block sees, and those that every row sees.
        stop = past + min((first_row + block_rows - 1) // group, tokens - 1) + 1
        first_key = 0
        seen_by_all = (past + first_row // group + 1) // tile * tile
        if has_window:
            first_key = max(past + first_row // group - window + 1, 0)
            seen_by_all = 0
        begin = max(first_split, _split_of(first_key, split, early_size, early_keys))
        end = min(first_split + run, _split_of(stop - 1, split, early_size, early_keys) + 1)
        tile_start = max(_start_of(begin, split, early_size, early_keys), first_key // tile * tile)
        tile_stop = min(_start_of(end, split, early_size, early_keys), stop)

        rows = first_row + tl.arange(0, block_rows)
        token = rows // group
        head = kv_head * group + rows % group
        position = past + token
        exists = token < tokens
        keep = exists & (tl.arange(0, block_rows) < kept_rows)
        row = (start + token).to(tl.int64)
        q = tl.load(
            query + row[:, None] * stride_q_token + head[:, None] * stride_q_head + dims[None, :],
            mask=exists[:, None] & in_head[None, :],
            other=0.0,
        )
        slope = tl.zeros((block_rows,), tl.float32)
        if has_slopes:
            slope = tl.load(slopes + head)

        top = tl.full((block_rows,), -float("inf"), tl.float32)
        weight = tl.zeros((block_rows,), tl.float32)
        acc = tl.zeros((block_rows, padded_size), tl.float32)
        if many_rows:
            for number in range(begin, end):
                split_top = tl.full((block_rows,), -float("inf"), tl.float32)
                split_weight = tl.zeros((block_rows, _ONES), tl.float32)
                split_acc = tl.zeros((block_rows, padded_size), tl.float32)
                split_stop = min(_start_of(number + 1, split, early_size, early_keys), tile_stop)
                split_start = max(_start_of(number, split, early_size, early_keys), tile_start)
                masked_start = max(min(seen_by_all, split_stop), split_start)
                page = _pages(own_table, split_start, first_key, stop, by_descriptor, tile, page_size)
                for at in range(split_start, masked_start, tile):
                    next_page = _pages(own_table, at + tile, first_key, stop, by_descriptor, tile, page_size)
                    split_top, split_weight, split_acc = _tile_of_keys(
                        q, keys_at, values_at, page, kv_head, at, first_key, stop, position, slope, scale, soft_cap,
                        window, stride_k_page, stride_k_head, stride_k_slot, stride_v_page, stride_v_head,
                        stride_v_slot, split_top, split_weight, split_acc, dims, in_head, False, by_descriptor,
                        has_soft_cap, has_slopes, has_window, tile, page_size, padded_size, whole_head,
                    )  # fmt: skip
                    page = next_page
                for at in range(masked_start, split_stop, tile):
                    next_page = _pages(own_table, at + tile, first_key, stop, by_descriptor, tile, page_size)
                    split_top, split_weight, split_acc = _tile_of_keys(
                        q, keys_at, values_at, page, kv_head, at, first_key, stop, position, slope, scale, soft_cap,
                        window, stride_k_page, stride_k_head, stride_k_slot, stride_v_page, stride_v_head,
                        stride_v_slot, split_top, split_weight, split_acc, dims, in_head, True, by_descriptor,
                        has_soft_cap, has_slopes, has_window, tile, page_size, padded_size, whole_head,
                    )  # fmt: skip
                    page = next_page
                top, weight, acc = _end_of_split(
                    top, weight, acc, split_top, split_weight, split_acc, slot, number, kv_head, keep, partial_top,
                    partial_weight, partial_acc, dims, in_head, may_keep, kv_heads, kept_rows, block_rows, padded_size,
                )  # fmt: skip
        else:
            split_top = tl.full((block_rows,), -float("inf"), tl.float32)
            split_weight = tl.zeros((block_rows, _ONES), tl.float32)
            split_acc = tl.zeros((block_rows, padded_size), tl.float32)
            page = _pages(own_table, tile_start, first_key, stop, by_descriptor, tile, page_size)
            for at in range(tile_start, tile_stop, tile):
                next_page = _pages(own_table, at + tile, first_key, stop, by_descriptor, tile, page_size)
                split_top, split_weight, split_acc = _tile_of_keys(
                    q, keys_at, values_at, page, kv_head, at, first_key, stop, position, slope, scale, soft_cap, window,
                    stride_k_page, stride_k_head, stride_k_slot, stride_v_page, stride_v_head, stride_v_slot,
                    split_top, split_weight, split_acc, dims, in_head, True, by_descriptor, has_soft_cap, has_slopes,
                    has_window, tile, page_size, padded_size, whole_head,
                )  # fmt: skip
                page = next_page
                size = tl.where(at < early_keys, early_size, split)
                if ((at + tile) % size == 0) | (at + tile >= tile_stop):
                    number = _split_of(at, split, early_size, early_keys)
                    top, weight, acc = _end_of_split(
                        top, weight, acc, split_top, split_weight, split_acc, slot, number, kv_head, keep, partial_top,
                        partial_weight, partial_acc, dims, in_head, may_keep, kv_heads, kept_rows, block_rows,
                        padded_size,
                    )  # fmt: skip
                    split_top = tl.full((block_rows,), -float("inf"), tl.float32)
                    split_weight = tl.zeros((block_rows, _ONES), tl.float32)
                    split_acc = tl.zeros((block_rows, padded_size), tl.float32)

        if may_keep:  # noqa: SIM102 - known when it is compiled
            if (slot >= 0) & (begin < end):
                own_first = _split_of(first_key, split, early_size, early_keys)
                splits = _split_of(stop - 1, split, early_size, early_keys) + 1 - own_first
                counter = arrived + slot * kv_heads + kv_head
                tl.debug_barrier()
                if tl.atomic_add(counter, end - begin, sem="acq_rel") == splits - (end - begin):
                    tl.debug_barrier()
                    tl.store(counter, 0)
                    first_place = ((slot + own_first).to(tl.int64) * kv_heads + kv_head) * kept_rows
                    _merge_kept(
                        out, partial_top, partial_weight, partial_acc, sinks, first_place, splits, first_row, start,
                        tokens, kv_head, stride_o_token, stride_o_head, has_sinks, kv_heads, group, head_size,
                        padded_size, kept_rows, kept_block,
                    )  # fmt: skip
        if slot < 0:
            sink = tl.zeros((block_rows,), tl.float32)
            if has_sinks:
                sink = tl.load(sinks + head)
            tl.store(
                out + row[:, None] * stride_o_token + head[:, None] * stride_o_head + dims[None, :],
                _finished(top, weight, acc, sink, has_sinks).to(out.dtype.element_ty),
                mask=exists[:, None] & in_head[None, :],
            )
