"""Decode attention for Hopper in Gluon: requests of few rows, with the bits of ``triton_kernels.attention_kernel``.

A program has a part of the line of work that ``plan_kernels`` describes. One warp copies tiles of keys and values into
a ring in shared memory by the tensor memory accelerator, across the ends of splits and heads, so that memory stays
busy while a head ends and the next one begins; a warpgroup takes the tiles from there. It multiplies them with keys and
dimensions on the long side of the tensor cores' instruction and the few rows on the short one.

Splits merge in ascending order, whoever merges them. Programs that share a head keep an account of it: how many of its
splits are done, and how many from split 0 on are merged into one result. Who has the first splits merges them, and who
finds all splits before its own merged goes on from there. As a program begins with the end of its part and a head's
beginning is there, this is what mostly happens. Otherwise a program leaves its splits among the partial results, and
the last one to arrive merges them before it ends.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common.gluon_names import barrier
from .common import (
    copy_tile,
    finite,
    is_end_of_split,
    layout_of_rows,
    merge_weights,
    next_stage,
    page_part,
    split_of,
    start_of,
)
from .merge import layout_of_partials, memory_for_merging, merge_kept
from .shapes import TILE

_TILE = gl.constexpr(TILE)


@gluon.constexpr_function
def _layout(rows):
    """Of scores, weights and values alike: keys or dimensions along a warpgroup, and the rows of a block across it."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rows, 16])


@gluon.constexpr_function
def rows_of(kept_block):
    """Rows that are multiplied: the tensor cores take 8 and more."""
    return max(kept_block, 8)


@gluon.jit
def _keys(entry, levels: gl.constexpr):
    """Of an entry: the first of its keys, their end, and the end of its request's keys."""
    number = gl.load(entry + 2)
    run = gl.load(entry + 3)
    stop = gl.load(entry + 6) + gl.load(entry + 7)
    first = start_of(number, levels)
    end = gl.minimum(start_of(number + run, levels), stop)
    return first, gl.where(run > 0, end, first), stop


@gluon.jit
def _pages(own_table, at, stop, page_size: gl.constexpr):
    """The pages of a tile's parts. Asked for a tile ahead, as they decide what is copied."""
    part: gl.constexpr = page_part(page_size)
    pages = ()
    for number in gl.static_range(_TILE // part):
        key = at + number * part
        pages = pages + (gl.load(own_table + key // page_size, mask=key < stop, other=0),)  # noqa: RUF005
    return pages


@gluon.jit
def _producer(
    keys_at, values_at, table, first_entries, work, table_stride, key_ring, value_ring, ready, empty,
    head_size: gl.constexpr, page_size: gl.constexpr, levels: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    """Keeps the ring full. The last entry comes first."""
    program = gl.program_id(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    begin = gl.load(first_entries + program)
    items = gl.load(first_entries + program + 1) - begin
    for item in range(items):
        entry = work + (begin + items - 1 - item) * 8
        own_table = table + gl.load(entry).to(gl.int64) * table_stride
        kv_head = gl.load(entry + 1)
        first, end, _ = _keys(entry, levels)
        pages = _pages(own_table, first, end, page_size)
        for at in range(first, end, _TILE):
            next_pages = _pages(own_table, at + _TILE, end, page_size)
            slot = at % page_size if page_size > _TILE else at * 0
            mbarrier.wait(empty.index(stage), phase)
            copy_tile(keys_at, key_ring, ready, stage, pages, kv_head, slot, True, page_size, head_size)
            copy_tile(values_at, value_ring, ready, stage, pages, kv_head, slot, True, page_size, head_size)
            stage, phase = next_stage(stage, phase, stages)
            pages = next_pages


@gluon.jit
def _query(query, entry, stride_token, stride_head, group: gl.constexpr, head_size: gl.constexpr, block: gl.constexpr):
    """[block, head_size], 0 where there are fewer rows."""
    layout: gl.constexpr = layout_of_rows(head_size)
    rows = gl.arange(0, block, gl.SliceLayout(1, layout))
    dims = gl.arange(0, head_size, gl.SliceLayout(0, layout))
    token = rows // group
    at_row = (gl.load(entry + 5) + token).to(gl.int64) * stride_token
    at = (at_row + (gl.load(entry + 1) * group + rows % group) * stride_head)[:, None] + dims[None, :]
    exists = token < gl.load(entry + 6)
    return gl.load(query + at, mask=exists[:, None], other=0.0)


@gluon.jit
def _start_scores(key_ring, stage, rows_shared, head_size: gl.constexpr):
    """Starts the product of a tile of keys with the rows, [keys, rows]."""
    block: gl.constexpr = rows_shared.shape[0]
    keys = key_ring.index(stage).reshape([_TILE, head_size])
    nothing = gl.full([_TILE, block], 0.0, gl.float32, _layout(block))
    return warpgroup_mma(keys, rows_shared.permute([1, 0]), nothing, use_acc=False, is_async=True)


@gluon.jit
def _weights_of(score, top, position, at, factor):
    """A step of the online softmax: the new maximum, the weights, and what the weights before them shrink by."""
    layout: gl.constexpr = score.type.layout
    keys = at + gl.arange(0, _TILE, gl.SliceLayout(1, layout))
    score = gl.where(keys[:, None] <= position[None, :], score, -float("inf"))
    new_top = gl.maximum(top, gl.max(score, 0) * factor)
    zero = finite(new_top)
    score, negative = gl.broadcast(score, (-zero)[None, :])
    p = gl.exp2(gl.fma(score, gl.full(score.shape, factor, gl.float32, layout), negative))
    return new_top, p, gl.exp2(top - zero)


@gluon.jit
def _merge_values(acc, old, split_acc, new):
    split_acc, old = gl.broadcast(split_acc, old[None, :])
    return gl.fma(acc, old, split_acc * new[None, :])


@gluon.jit
def _store_kept(partial_top, partial_weight, partial_acc, place, top, weight, acc, keep, dims):
    """Leaves a result among the partial ones."""
    gl.store(partial_top + place, top, mask=keep)
    gl.store(partial_weight + place, weight, mask=keep)
    gl.store(partial_acc + place[None, :] * acc.shape[0] + dims[:, None], acc, mask=keep[None, :])


@gluon.jit
def _consumer(
    query, out, first_entries, work, partial_top, partial_weight, partial_acc, accounts, factor, stride_q_token,
    stride_q_head, stride_o_token, stride_o_head, rows_shared, weights_shared, sums, key_ring, value_ring, ready, empty,
    kv_heads: gl.constexpr, group: gl.constexpr, head_size: gl.constexpr, levels: gl.constexpr,
    kept_rows: gl.constexpr, kept_block: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    """Attends, splits in ascending order, the last entry first."""
    dtype: gl.constexpr = rows_shared.dtype
    block: gl.constexpr = rows_of(kept_block)
    layout: gl.constexpr = _layout(block)
    of_row: gl.constexpr = gl.SliceLayout(0, layout)
    query_layout: gl.constexpr = layout_of_rows(head_size)
    ones = gl.full([_TILE, _TILE], 1.0, dtype, gl.DotOperandLayout(0, layout, 2))
    rows = gl.arange(0, block, of_row)
    token = rows // group
    dims = gl.arange(0, head_size, gl.SliceLayout(1, layout))
    no_top = gl.full([block], -float("inf"), gl.float32, of_row)
    no_weight = gl.full([_TILE, block], 0.0, gl.float32, layout)
    no_acc = gl.full([head_size, block], 0.0, gl.float32, layout)
    out_layout: gl.constexpr = layout_of_partials(head_size)
    out_rows = gl.arange(0, block, gl.SliceLayout(1, out_layout))
    out_dims = gl.arange(0, head_size, gl.SliceLayout(0, out_layout))

    program = gl.program_id(0)
    begin = gl.load(first_entries + program)
    items = gl.load(first_entries + program + 1) - begin
    next_query = gl.full([block, head_size], 0.0, dtype, query_layout)
    if items > 0:
        entry = work + (begin + items - 1) * 8
        next_query = _query(query, entry, stride_q_token, stride_q_head, group, head_size, block)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    # Entries whose heads are left to merge, at most the first and the last of a part, and what is merged of them.
    left, left_merged = gl.to_tensor(-1), gl.to_tensor(0)
    left_before, left_before_merged = gl.to_tensor(-1), gl.to_tensor(0)
    for item in range(items):
        place_in_list = begin + items - 1 - item
        entry = work + place_in_list * 8
        kv_head = gl.load(entry + 1)
        number = gl.load(entry + 2)
        run = gl.load(entry + 3)
        slot = gl.load(entry + 4)
        start = gl.load(entry + 5)
        tokens = gl.load(entry + 6)
        position = gl.load(entry + 7) + token
        first, end, stop = _keys(entry, levels)
        rows_shared.store(next_query)
        fence_async_shared()
        barrier()
        later = work + gl.maximum(place_in_list - 1, begin) * 8
        next_query = _query(query, later, stride_q_token, stride_q_head, group, head_size, block)

        top = no_top
        weight = no_weight
        acc = no_acc
        merged_top = no_top
        merged_weight = gl.full([block], 0.0, gl.float32, of_row)
        merged = no_acc
        keep = (rows < kept_rows) & (token < tokens)
        first_place = (gl.maximum(slot, 0).to(gl.int64) * kv_heads + kv_head) * kept_rows + rows
        account = accounts + gl.maximum(slot, 0) * kv_heads + kv_head
        merges = number == 0
        # All programs begin at the same time, so nothing can be merged before their first entries.
        if (item > 0) & (slot >= 0) & (number > 0) & (run > 0):
            merges = gl.atomic_add(account, 0, sem="acquire") >> 16 == number
            if merges:
                barrier()
                place = first_place + (number - 1) * (kv_heads * kept_rows)
                at = place[None, :] * head_size + dims[:, None]
                merged_top = gl.load(partial_top + place, keep, -float("inf"), cache_modifier=".cg")
                merged_weight = gl.load(partial_weight + place, keep, 0.0, cache_modifier=".cg")
                merged = gl.load(partial_acc + at, keep[None, :], 0.0, cache_modifier=".cg")
        score = no_weight
        if first < end:
            mbarrier.wait(ready.index(stage), phase)
            score = warpgroup_mma_wait(0, deps=(_start_scores(key_ring, stage, rows_shared, head_size),))
        for at in range(first, end, _TILE):
            # The next tile's scores while this tile's weights are computed; after the last tile its own again.
            after, after_phase = next_stage(stage, phase, stages)
            is_last = at + _TILE >= end
            next_place, next_phase = gl.where(is_last, stage, after), gl.where(is_last, phase, after_phase)
            mbarrier.wait(ready.index(next_place), next_phase)
            next_score = _start_scores(key_ring, next_place, rows_shared, head_size)
            top, weights, old = _weights_of(score, top, position, at, factor)
            weights_shared.store(gl.permute(weights.to(dtype), (1, 0)))
            values = value_ring.index(stage).reshape([_TILE, head_size])
            if at + _TILE > stop:
                # Unwritten slots may hold anything, NaN included.
                written = at + gl.arange(0, _TILE, gl.SliceLayout(1, query_layout)) < stop
                values.store(gl.where(written[:, None], values.load(query_layout), 0.0))
            fence_async_shared()
            barrier()
            weight = warpgroup_mma(ones, weights_shared.permute([1, 0]), weight * old[None, :], is_async=True)
            acc = warpgroup_mma(
                values.permute([1, 0]), weights_shared.permute([1, 0]), acc * old[None, :], is_async=True
            )
            weight, acc, score = warpgroup_mma_wait(0, deps=(weight, acc, next_score))
            mbarrier.arrive(empty.index(stage))
            stage = after
            phase = after_phase

            if is_end_of_split(at + _TILE, levels) | (at + _TILE >= end):
                # All are equal, so the largest is any of them.
                weight_sum = gl.max(weight, 0)
                if merges:
                    merged_top, merged_weight, shrink, new = merge_weights(merged_top, merged_weight, top, weight_sum)
                    merged = _merge_values(merged, shrink, acc, new)
                else:
                    place = first_place + number * (kv_heads * kept_rows)
                    _store_kept(partial_top, partial_weight, partial_acc, place, top, weight_sum, acc, keep, dims)
                number += 1
                top = no_top
                weight = no_weight
                acc = no_acc

        if run > 0:
            splits = split_of(stop - 1, levels) + 1
            if merges & (number == splits):
                result = (merged / gl.where(merged_weight == 0.0, 1.0, merged_weight)[None, :]).to(dtype)
                result = gl.convert_layout(gl.permute(result, (1, 0)), out_layout)
                at_row = (start + out_rows // group).to(gl.int64) * stride_o_token
                at_row += (kv_head * group + out_rows % group) * stride_o_head
                written = (out_rows < kept_rows) & (out_rows // group < tokens)
                gl.store(out + at_row[:, None] + out_dims[None, :], result, mask=written[:, None])
                if slot >= 0:
                    gl.store(account, 0)
            else:
                if merges:
                    place = first_place + (number - 1) * (kv_heads * kept_rows)
                    _store_kept(
                        partial_top, partial_weight, partial_acc, place, merged_top, merged_weight, merged, keep, dims
                    )
                barrier()
                more_merged = gl.where(merges, run, 0)
                before = gl.atomic_add(account, run + (more_merged << 16), sem="acq_rel")
                if (before & 0xFFFF) == splits - run:
                    gl.store(account, 0)
                    left_before, left_before_merged = left, left_merged
                    left, left_merged = place_in_list, (before >> 16) + more_merged
    for _ in range(2):
        if left >= 0:
            entry = work + left * 8
            kv_head = gl.load(entry + 1)
            slot = gl.load(entry + 4)
            _, _, stop = _keys(entry, levels)
            splits = split_of(stop - 1, levels) + 1
            merge_kept(
                out, partial_top, partial_weight, partial_acc, key_ring, value_ring, sums,
                (slot.to(gl.int64) * kv_heads + kv_head) * kept_rows, left_merged, splits, gl.load(entry + 5),
                gl.load(entry + 6), kv_head, stride_o_token, stride_o_head, kv_heads, group, head_size, kept_rows,
                kept_block, stages,
            )  # fmt: skip
        left, left_merged = left_before, left_before_merged
        left_before = gl.to_tensor(-1)


@gluon.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    query,
    keys_at,
    values_at,
    out,
    table,
    first_entries,
    work,
    partial_top,
    partial_weight,
    partial_acc,
    accounts,
    factor,
    table_stride,
    stride_q_token,
    stride_q_head,
    stride_o_token,
    stride_o_head,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    head_size: gl.constexpr,
    page_size: gl.constexpr,
    levels: gl.constexpr,
    kept_rows: gl.constexpr,
    kept_block: gl.constexpr,
    stages: gl.constexpr,
):
    """Works on the entries of its part of ``work``.

    Args:
        accounts: of each head that is shared: the number of its splits that are done, and that of those merged into
            one result in the upper 16 bits; 0 between launches.
        factor: of the scores, times log2(e).
        kept_rows: rows of a block whose partial results are kept; ``kept_block`` is the next power of two.
        stages: tiles in the ring.
    """
    dtype: gl.constexpr = keys_at.dtype
    tile_layout: gl.constexpr = keys_at.layout
    block: gl.constexpr = rows_of(kept_block)
    key_ring = gl.allocate_shared_memory(dtype, [stages, 1, 1, _TILE, head_size], tile_layout)
    value_ring = gl.allocate_shared_memory(dtype, [stages, 1, 1, _TILE, head_size], tile_layout)
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(tile_layout.swizzle_byte_width, 16, 2)
    rows_shared = gl.allocate_shared_memory(dtype, [block, head_size], rows_layout)
    weights_shared = gl.allocate_shared_memory(dtype, [block, _TILE], gl.NVMMASharedLayout(128, 16, 2))
    sums = memory_for_merging(kept_block, stages)
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [stages, 1], bar_layout)
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], bar_layout)
    for stage in gl.static_range(stages):
        mbarrier.init(ready.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    query, out, first_entries, work, partial_top, partial_weight, partial_acc, accounts, factor,
                    stride_q_token, stride_q_head, stride_o_token, stride_o_head, rows_shared, weights_shared, sums,
                    key_ring, value_ring, ready, empty, kv_heads, group, head_size, levels, kept_rows, kept_block,
                    stages,
                ),
            ),
            (
                _producer,
                (
                    keys_at, values_at, table, first_entries, work, table_stride, key_ring, value_ring, ready, empty,
                    head_size, page_size, levels, stages,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
