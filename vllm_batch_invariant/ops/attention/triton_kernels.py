"""The Triton kernel of paged attention, which serves prefill and decode.

A row's bits follow from its own keys by construction: masked keys weigh exactly 0, a tile without a visible key changes
nothing, weights are summed by the tensor cores like the values they weigh, splits are merged ascending by one function,
and products and sums of vectors are fused only where the source says so. What is measured and not constructed: that
tensor cores give a row the same bits in blocks of 16, 64 and 128 rows.
Online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867; tiles as in FlashAttention, Dao et al. 2022,
arXiv:2205.14135; splits as in Flash-Decoding, pytorch.org/blog/flash-decoding.
"""

import triton
import triton.language as tl

from .splits import finite_max, is_end_of_split, merge_splits, normalize, split_of, start_of

_ONES = tl.constexpr(16)
"""Equal columns of the sums of weights: a matrix product has at least so many."""


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
    zero = finite_max(new_top)
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
            top, weight, acc = merge_splits(top, weight, acc, split_top, summed, split_acc)
    else:
        top, weight, acc = merge_splits(top, weight, acc, split_top, summed, split_acc)
    return top, weight, acc


@triton.constexpr_function
def _splits_at_once(elements):
    """Partial results of so many elements that a program's registers hold."""
    return max(min(16384 // elements, 32), 1)


@triton.jit
def _merge_some(
    top, weight, acc, partial_top, partial_weight, partial_acc, place, keep, keep_row, dims, exist,
    stride: tl.constexpr, padded_size: tl.constexpr, at_once: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Merges the next ``at_once`` partial results; if ``masked``, only as many as ``exist`` says for each row."""
    tops, weights, accs = (), (), ()
    for number in tl.static_range(at_once):
        here = place + number * stride
        exists, exists_row = keep, keep_row
        if masked:
            exists, exists_row = keep & (number < exist), keep_row & (number < exist)[:, None]
        at_acc = partial_acc + here[:, None] * padded_size + dims[None, :]
        tops += (tl.load(partial_top + here, mask=exists, other=-float("inf"), cache_modifier=".cg"),)
        weights += (tl.load(partial_weight + here, mask=exists, other=0.0, cache_modifier=".cg"),)
        accs += (tl.load(at_acc, mask=exists_row, other=0.0, cache_modifier=".cg"),)
    for number in tl.static_range(at_once):
        new_top, new_weight, new_acc = merge_splits(top, weight, acc, tops[number], weights[number], accs[number])
        if masked:
            # An absent one adds a zero, which would make one of -0.
            new_top, new_weight = tl.where(number < exist, new_top, top), tl.where(number < exist, new_weight, weight)
            new_acc = tl.where((number < exist)[:, None], new_acc, acc)
        top, weight, acc = new_top, new_weight, new_acc
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
    at_once: tl.constexpr = _splits_at_once(kept_block * padded_size)
    few: tl.constexpr = min(at_once, 4)
    many = splits // at_once * at_once
    for _ in range(0, many, at_once):
        top, weight, acc = _merge_some(
            top, weight, acc, partial_top, partial_weight, partial_acc, place, keep, keep_row, dims, kept,
            kv_heads * kept_rows, padded_size, at_once, False,
        )  # fmt: skip
        place += at_once * kv_heads * kept_rows
    for done in range(many, splits, few):
        top, weight, acc = _merge_some(
            top, weight, acc, partial_top, partial_weight, partial_acc, place, keep, keep_row, dims,
            kept * 0 + splits - done, kv_heads * kept_rows, padded_size, few, True,
        )  # fmt: skip
        place += few * kv_heads * kept_rows
    sink = tl.zeros((kept_block,), tl.float32)
    if has_sinks:
        sink = tl.load(sinks + head)
    row = (start + token).to(tl.int64)
    tl.store(
        out + row[:, None] * stride_o_token + head[:, None] * stride_o_head + dims[None, :],
        normalize(top, weight, acc, sink, has_sinks).to(out.dtype.element_ty),
        mask=keep_row,
    )


@triton.jit(do_not_specialize=["table_stride", "window"])
def attention_kernel(
    query,
    keys_at,
    values_at,
    out,
    table,
    bounds,
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
    levels: tl.constexpr,
    tile: tl.constexpr,
    block_rows: tl.constexpr,
    kept_rows: tl.constexpr,
    kept_block: tl.constexpr,
):
    """Works on every entry of ``work``. Programs that share the splits of a block of rows leave them among the partial
    results; the last one to arrive merges them all, in ascending order.

    ``bounds``: the first entry of each program, and the end; for many rows the number of entries, each of them for all
    KV heads.
    ``many_rows``: tiles that every row sees are not masked, which changes no bit, and the loop over tiles is within one
    over splits, where the tensor cores limit the speed; else one loop keeps memory busy across the ends of splits.
    ``may_keep``: some block is shared.
    """
    dims = tl.arange(0, padded_size)
    in_head = dims < head_size
    whole_head: tl.constexpr = head_size == padded_size
    first_item, stop_item, next_item = tl.program_id(0), 0, 1
    if many_rows:
        stop_item, next_item = tl.load(bounds) * kv_heads, tl.num_programs(0)
    else:
        stop_item = tl.load(bounds + first_item + 1)
        first_item = tl.load(bounds + first_item)
    for place in tl.range(first_item, stop_item, next_item):
        if many_rows:
            kv_head = place % kv_heads
            entry = work + place // kv_heads * 8
            first_row = tl.load(entry + 1)
        else:
            entry = work + place * 8
            kv_head = tl.load(entry + 1)
            first_row = 0
        request = tl.load(entry).to(tl.int64)
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
        begin = max(first_split, split_of(first_key, levels))
        end = min(first_split + run, split_of(stop - 1, levels) + 1)
        tile_start = max(start_of(begin, levels), first_key // tile * tile)
        tile_stop = min(start_of(end, levels), stop)

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
                split_stop = min(start_of(number + 1, levels), tile_stop)
                split_start = max(start_of(number, levels), tile_start)
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
                if is_end_of_split(at + tile, levels) | (at + tile >= tile_stop):
                    number = split_of(at, levels)
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
                own_first = split_of(first_key, levels)
                splits = split_of(stop - 1, levels) + 1 - own_first
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
                normalize(top, weight, acc, sink, has_sinks).to(out.dtype.element_ty),
                mask=exists[:, None] & in_head[None, :],
            )
