"""Decode attention for Hopper in Gluon: requests of few rows, with the bits of ``triton_kernels.attention_kernel``.

A program has a part of the line of work that ``plan_kernels`` describes. One warp copies tiles of keys and values into
a ring in shared memory by the tensor memory accelerator, across the ends of splits and heads, so that memory stays
busy while a head ends and the next one begins; a warpgroup takes the tiles from there.

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

from .hopper_merge import merge_kept
from .hopper_tiles import (
    TILE,
    WARPGROUP_ROWS,
    copy_tile,
    is_end_of_split,
    layout_of_acc,
    layout_of_rows,
    layout_of_scores,
    layout_of_sums,
    merge_values,
    merge_weights,
    next_stage,
    page_part,
    row_sum,
    start_scores,
    summed,
    weights_of,
)

ROWS = 16
"""Rows of a block."""
_TILE = gl.constexpr(TILE)
_ROWS = gl.constexpr(ROWS)
_MULTIPLIED = gl.constexpr(WARPGROUP_ROWS)


@gluon.jit
def _start_of(number, levels: gl.constexpr):
    """The first key of a split: ``AttentionReduction.start_of``."""
    key = number * levels[0][1]
    for level in gl.static_range(1, len(levels)):
        start, size, first = levels[level]
        key = gl.where(number < first, key, start + (number - first) * size)
    return key


@gluon.jit
def _split_of(key, levels: gl.constexpr):
    """The split that a key is in: ``AttentionReduction.split_of``."""
    number = key // levels[0][1]
    for level in gl.static_range(1, len(levels)):
        start, size, first = levels[level]
        number = gl.where(key < start, number, first + (key - start) // size)
    return number


@gluon.jit
def _keys(entry, levels: gl.constexpr):
    """Of an entry: the first of its keys, their end, and the end of its request's keys."""
    number = gl.load(entry + 2)
    run = gl.load(entry + 3)
    stop = gl.load(entry + 6) + gl.load(entry + 7)
    first = _start_of(number, levels)
    end = gl.minimum(_start_of(number + run, levels), stop)
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
def _query(query, entry, stride_token, stride_head, group: gl.constexpr, head_size: gl.constexpr):
    """[rows, head_size], 0 where there are fewer rows."""
    layout: gl.constexpr = layout_of_rows(head_size)
    rows = gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
    dims = gl.arange(0, head_size, gl.SliceLayout(0, layout))
    token = rows // group
    at_row = (gl.load(entry + 5) + token).to(gl.int64) * stride_token
    at = (at_row + (gl.load(entry + 1) * group + rows % group) * stride_head)[:, None] + dims[None, :]
    exists = token < gl.load(entry + 6)
    return gl.load(query + at, mask=exists[:, None], other=0.0)


@gluon.jit
def _store_kept(partial_top, partial_weight, partial_acc, place, top, weight, acc, keep, dims):
    """Leaves a result among the partial ones, with rows as the accumulator has them."""
    layout: gl.constexpr = place.type.layout
    gl.store(partial_top + place, gl.convert_layout(top, layout), mask=keep)
    gl.store(partial_weight + place, gl.convert_layout(weight, layout), mask=keep)
    gl.store(partial_acc + place[:, None] * acc.shape[1] + dims[None, :], acc, mask=keep[:, None])


@gluon.jit
def _consumer(
    query, out, first_entries, work, partial_top, partial_weight, partial_acc, accounts, factor, stride_q_token,
    stride_q_head, stride_o_token, stride_o_head, rows_shared, key_ring, value_ring, ready, empty,
    kv_heads: gl.constexpr, group: gl.constexpr, head_size: gl.constexpr, levels: gl.constexpr,
    kept_rows: gl.constexpr, kept_block: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    """Attends, splits in ascending order, the last entry first."""
    dtype: gl.constexpr = rows_shared.dtype
    score_layout: gl.constexpr = layout_of_scores()
    acc_layout: gl.constexpr = layout_of_acc(head_size)
    sum_layout: gl.constexpr = layout_of_sums()
    row_layout: gl.constexpr = layout_of_rows(head_size)
    row: gl.constexpr = gl.SliceLayout(1, score_layout)
    acc_row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    sum_row: gl.constexpr = gl.SliceLayout(1, sum_layout)
    ones = gl.full([_TILE, 8], 1.0, dtype, gl.DotOperandLayout(1, sum_layout, 2))
    token = gl.arange(0, _MULTIPLIED, row) // group
    acc_rows = gl.arange(0, _MULTIPLIED, acc_row)
    acc_dims = gl.arange(0, head_size, gl.SliceLayout(0, acc_layout))
    rows_shared.store(gl.full([_MULTIPLIED, head_size], 0.0, dtype, row_layout))
    gl.thread_barrier()

    program = gl.program_id(0)
    begin = gl.load(first_entries + program)
    items = gl.load(first_entries + program + 1) - begin
    next_query = gl.full([_ROWS, head_size], 0.0, dtype, row_layout)
    if items > 0:
        entry = work + (begin + items - 1) * 8
        next_query = _query(query, entry, stride_q_token, stride_q_head, group, head_size)
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
        rows_shared.slice(0, _ROWS).store(next_query)
        fence_async_shared()
        gl.thread_barrier()
        later = work + gl.maximum(place_in_list - 1, begin) * 8
        next_query = _query(query, later, stride_q_token, stride_q_head, group, head_size)

        top = gl.full([_MULTIPLIED], -float("inf"), gl.float32, row)
        weight = gl.full([_MULTIPLIED, 8], 0.0, gl.float32, sum_layout)
        acc = gl.full([_MULTIPLIED, head_size], 0.0, gl.float32, acc_layout)
        merged_top = gl.full([_MULTIPLIED], -float("inf"), gl.float32, row)
        merged_weight = gl.full([_MULTIPLIED], 0.0, gl.float32, row)
        merged = gl.full([_MULTIPLIED, head_size], 0.0, gl.float32, acc_layout)
        keep = (acc_rows < kept_rows) & (acc_rows // group < tokens)
        first_place = (gl.maximum(slot, 0).to(gl.int64) * kv_heads + kv_head) * kept_rows + acc_rows
        account = accounts + gl.maximum(slot, 0) * kv_heads + kv_head
        merges = number == 0
        # All programs begin at the same time, so nothing can be merged before their first entries.
        if (item > 0) & (slot >= 0) & (number > 0) & (run > 0):
            merges = gl.atomic_add(account, 0, sem="acquire") >> 16 == number
            if merges:
                gl.thread_barrier()
                place = first_place + (number - 1) * (kv_heads * kept_rows)
                at = place[:, None] * head_size + acc_dims[None, :]
                known_top = gl.load(partial_top + place, keep, -float("inf"), cache_modifier=".cg")
                known_weight = gl.load(partial_weight + place, keep, 0.0, cache_modifier=".cg")
                merged = gl.load(partial_acc + at, keep[:, None], 0.0, cache_modifier=".cg")
                merged_top = gl.convert_layout(known_top, row)
                merged_weight = gl.convert_layout(known_weight, row)
        score = gl.full([_MULTIPLIED, _TILE], 0.0, gl.float32, score_layout)
        if first < end:
            mbarrier.wait(ready.index(stage), phase)
            score = warpgroup_mma_wait(0, deps=(start_scores(rows_shared, key_ring, stage, head_size),))
        for at in range(first, end, _TILE):
            # The next tile's scores while this tile's weights are computed; after the last tile its own again.
            after, after_phase = next_stage(stage, phase, stages)
            is_last = at + _TILE >= end
            next_place, next_phase = gl.where(is_last, stage, after), gl.where(is_last, phase, after_phase)
            mbarrier.wait(ready.index(next_place), next_phase)
            next_score = start_scores(rows_shared, key_ring, next_place, head_size)
            top, weights, old = weights_of(score, top, position, at, factor, True, dtype)
            weight = summed(weights, weight * gl.convert_layout(old, sum_row)[:, None], ones)
            p = gl.convert_layout(weights, gl.DotOperandLayout(0, acc_layout, 2), assert_trivial=True)
            values = value_ring.index(stage).reshape([_TILE, head_size])
            if at + _TILE > stop:
                # Unwritten slots may hold anything, NaN included.
                written = at + gl.arange(0, _TILE, gl.SliceLayout(1, row_layout)) < stop
                values.store(gl.where(written[:, None], values.load(row_layout), 0.0))
                fence_async_shared()
                gl.thread_barrier()
            acc = acc * gl.convert_layout(old, acc_row)[:, None]
            acc = warpgroup_mma(p, values, acc, is_async=True)
            acc, score = warpgroup_mma_wait(0, deps=(acc, next_score))
            mbarrier.arrive(empty.index(stage))
            stage = after
            phase = after_phase

            if is_end_of_split(at + _TILE, levels) | (at + _TILE >= end):
                weight_sum = row_sum(weight, row)
                if merges:
                    merged_top, merged_weight, shrink, new = merge_weights(merged_top, merged_weight, top, weight_sum)
                    merged = merge_values(
                        merged, gl.convert_layout(shrink, acc_row), acc, gl.convert_layout(new, acc_row)
                    )
                else:
                    place = first_place + number * (kv_heads * kept_rows)
                    _store_kept(partial_top, partial_weight, partial_acc, place, top, weight_sum, acc, keep, acc_dims)
                number += 1
                top = gl.full([_MULTIPLIED], -float("inf"), gl.float32, row)
                weight = gl.full([_MULTIPLIED, 8], 0.0, gl.float32, sum_layout)
                acc = gl.full([_MULTIPLIED, head_size], 0.0, gl.float32, acc_layout)

        if run > 0:
            splits = _split_of(stop - 1, levels) + 1
            if merges & (number == splits):
                divisor = gl.convert_layout(gl.where(merged_weight == 0.0, 1.0, merged_weight), acc_row)
                at_row = (start + acc_rows // group).to(gl.int64) * stride_o_token
                at_row += (kv_head * group + acc_rows % group) * stride_o_head
                result = (merged / divisor[:, None]).to(dtype)
                gl.store(out + at_row[:, None] + acc_dims[None, :], result, mask=keep[:, None])
                if slot >= 0:
                    gl.store(account, 0)
            else:
                if merges:
                    place = first_place + (number - 1) * (kv_heads * kept_rows)
                    _store_kept(
                        partial_top, partial_weight, partial_acc, place, merged_top, merged_weight, merged, keep,
                        acc_dims,
                    )  # fmt: skip
                gl.thread_barrier()
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
            splits = _split_of(stop - 1, levels) + 1
            merge_kept(
                out, partial_top, partial_weight, partial_acc, key_ring, value_ring, rows_shared,
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
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(tile_layout.swizzle_byte_width, 16, 2)
    key_ring = gl.allocate_shared_memory(dtype, [stages, 1, 1, _TILE, head_size], tile_layout)
    value_ring = gl.allocate_shared_memory(dtype, [stages, 1, 1, _TILE, head_size], tile_layout)
    rows_shared = gl.allocate_shared_memory(dtype, [_MULTIPLIED, head_size], rows_layout)
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [stages, 1], bar_layout)
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], bar_layout)
    for stage in gl.static_range(stages):
        mbarrier.init(ready.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    query, out, first_entries, work, partial_top, partial_weight, partial_acc, accounts, factor,
                    stride_q_token, stride_q_head, stride_o_token, stride_o_head, rows_shared, key_ring, value_ring,
                    ready, empty, kv_heads, group, head_size, levels, kept_rows, kept_block,
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
