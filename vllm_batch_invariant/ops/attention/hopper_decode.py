"""Decode attention for Hopper in Gluon: requests of few rows, with the bits of ``triton_kernels.attention_kernel``.

A program has a part of the line of work that ``plan_kernels`` describes. One warp copies tiles of keys and values into
a ring in shared memory by the tensor memory accelerator, across the ends of splits and heads, so that memory stays
busy while a head ends and the next one begins; a warpgroup takes the tiles from there. Programs that share a head leave
its splits among the partial results, and the last one to arrive merges them all, in ascending order.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_tiles import (
    TILE,
    WARPGROUP_ROWS,
    copy_tile,
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


@gluon.constexpr_function
def _layout_of_partials(head_size):
    """Whole rows of fp32 for each warp, so that what a row has one of is in a register of each thread."""
    return gl.BlockedLayout([1, head_size // 32], [1, 32], [4, 1], [1, 0])


@gluon.constexpr_function
def _splits_at_once(kept_block):
    """Partial results of so many rows that registers hold twice."""
    return min(48 // kept_block, 12)


@gluon.jit
def _start_of(number, split: gl.constexpr, early_size: gl.constexpr, early_keys: gl.constexpr):
    """The first key of a split: ``AttentionReduction.start_of``."""
    late: gl.constexpr = early_keys // early_size
    return gl.where(number < late, number * early_size, early_keys + (number - late) * split)


@gluon.jit
def _split_of(key, split: gl.constexpr, early_size: gl.constexpr, early_keys: gl.constexpr):
    """The split that a key is in: ``AttentionReduction.split_of``."""
    late: gl.constexpr = early_keys // early_size
    return gl.where(key < early_keys, key // early_size, late + (key - early_keys) // split)


@gluon.jit
def _keys(entry, split: gl.constexpr, early_size: gl.constexpr, early_keys: gl.constexpr):
    """Of an entry: the first of its keys, their end, and the end of its request's keys."""
    number = gl.load(entry + 2)
    run = gl.load(entry + 3)
    stop = gl.load(entry + 6) + gl.load(entry + 7)
    first = _start_of(number, split, early_size, early_keys)
    end = gl.minimum(_start_of(number + run, split, early_size, early_keys), stop)
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
    head_size: gl.constexpr, page_size: gl.constexpr, split: gl.constexpr, early_size: gl.constexpr,
    early_keys: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    """Keeps the ring full."""
    program = gl.program_id(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for number in range(gl.load(first_entries + program), gl.load(first_entries + program + 1)):
        entry = work + number * 8
        own_table = table + gl.load(entry).to(gl.int64) * table_stride
        kv_head = gl.load(entry + 1)
        first, end, _ = _keys(entry, split, early_size, early_keys)
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
def _load_kept(
    partial_top, partial_weight, partial_acc, first_place, first, splits, keep, kept, dims, stride: gl.constexpr,
    head_size: gl.constexpr, at_once: gl.constexpr,
):  # fmt: skip
    """The partial results of ``at_once`` splits from ``first`` on; nothing is loaded for those that there are not."""
    tops = ()
    weights = ()
    accs = ()
    for number in gl.static_range(at_once):
        place = first_place + ((first + number) * stride).to(gl.int64) + kept
        exists = keep & (first + number < splits)
        at = place[:, None] * head_size + dims[None, :]
        tops = tops + (gl.load(partial_top + place, exists, -float("inf"), cache_modifier=".cg"),)  # noqa: RUF005
        weights = weights + (gl.load(partial_weight + place, exists, 0.0, cache_modifier=".cg"),)  # noqa: RUF005
        accs = accs + (gl.load(partial_acc + at, exists[:, None], 0.0, cache_modifier=".cg"),)  # noqa: RUF005
    return tops, weights, accs


@gluon.jit
def _merge_kept(
    out, partial_top, partial_weight, partial_acc, first_place, splits, start, tokens, kv_head, stride_o_token,
    stride_o_head, kv_heads: gl.constexpr, group: gl.constexpr, head_size: gl.constexpr, kept_rows: gl.constexpr,
    kept_block: gl.constexpr,
):  # fmt: skip
    """Merges the partial results of a head, in ascending order, and writes the result."""
    layout: gl.constexpr = _layout_of_partials(head_size)
    at_once: gl.constexpr = _splits_at_once(kept_block)
    kept = gl.arange(0, kept_block, gl.SliceLayout(1, layout))
    dims = gl.arange(0, head_size, gl.SliceLayout(0, layout))
    token = kept // group
    keep = (kept < kept_rows) & (token < tokens)
    top = gl.full([kept_block], -float("inf"), gl.float32, gl.SliceLayout(1, layout))
    weight = gl.full([kept_block], 0.0, gl.float32, gl.SliceLayout(1, layout))
    acc = gl.full([kept_block, head_size], 0.0, gl.float32, layout)
    stride: gl.constexpr = kv_heads * kept_rows
    tops, weights, accs = _load_kept(
        partial_top,
        partial_weight,
        partial_acc,
        first_place,
        gl.to_tensor(0),
        splits,
        keep,
        kept,
        dims,
        stride,
        head_size,
        at_once,
    )
    for first in range(0, splits, at_once):
        later_tops, later_weights, later_accs = _load_kept(
            partial_top, partial_weight, partial_acc, first_place, first + at_once, splits, keep, kept, dims, stride,
            head_size, at_once,
        )  # fmt: skip
        # Keeps the loads above together and before what follows: each waits for memory as long as all.
        gl.thread_barrier()
        for number in gl.static_range(at_once):
            merged_top, merged_weight, old, new = merge_weights(top, weight, tops[number], weights[number])
            merged_acc = merge_values(acc, old, accs[number], new)
            # An absent one adds a zero, which would make one of -0.
            exists = first + number < splits
            top = gl.where(exists, merged_top, top)
            weight = gl.where(exists, merged_weight, weight)
            acc = gl.where(exists, merged_acc, acc)
        tops = later_tops
        weights = later_weights
        accs = later_accs
    divisor = gl.where(weight == 0.0, 1.0, weight)
    at_row = (start + token).to(gl.int64) * stride_o_token + (kv_head * group + kept % group) * stride_o_head
    result = (acc / divisor[:, None]).to(out.dtype.element_ty)
    gl.store(out + at_row[:, None] + dims[None, :], result, mask=keep[:, None])


@gluon.jit
def _consumer(
    query, out, first_entries, work, partial_top, partial_weight, partial_acc, arrived, factor, stride_q_token,
    stride_q_head, stride_o_token, stride_o_head, rows_shared, key_ring, value_ring, ready, empty,
    kv_heads: gl.constexpr, group: gl.constexpr, head_size: gl.constexpr, split: gl.constexpr,
    early_size: gl.constexpr, early_keys: gl.constexpr, kept_rows: gl.constexpr, kept_block: gl.constexpr,
    stages: gl.constexpr,
):  # fmt: skip
    """Attends, splits in ascending order."""
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
    stop_item = gl.load(first_entries + program + 1)
    next_query = gl.full([_ROWS, head_size], 0.0, dtype, row_layout)
    if begin < stop_item:
        next_query = _query(query, work + begin * 8, stride_q_token, stride_q_head, group, head_size)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for item in range(begin, stop_item):
        entry = work + item * 8
        kv_head = gl.load(entry + 1)
        number = gl.load(entry + 2)
        run = gl.load(entry + 3)
        slot = gl.load(entry + 4)
        start = gl.load(entry + 5)
        tokens = gl.load(entry + 6)
        position = gl.load(entry + 7) + token
        first, end, stop = _keys(entry, split, early_size, early_keys)
        rows_shared.slice(0, _ROWS).store(next_query)
        fence_async_shared()
        gl.thread_barrier()
        later = work + gl.minimum(item + 1, stop_item - 1) * 8
        next_query = _query(query, later, stride_q_token, stride_q_head, group, head_size)

        top = gl.full([_MULTIPLIED], -float("inf"), gl.float32, row)
        weight = gl.full([_MULTIPLIED, 8], 0.0, gl.float32, sum_layout)
        acc = gl.full([_MULTIPLIED, head_size], 0.0, gl.float32, acc_layout)
        merged_top = gl.full([_MULTIPLIED], -float("inf"), gl.float32, row)
        merged_weight = gl.full([_MULTIPLIED], 0.0, gl.float32, row)
        merged = gl.full([_MULTIPLIED, head_size], 0.0, gl.float32, acc_layout)
        keep = (acc_rows < kept_rows) & (acc_rows // group < tokens)
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

            size = gl.where(at < early_keys, early_size, split)
            if ((at + _TILE) % size == 0) | (at + _TILE >= end):
                weight_sum = row_sum(weight, row)
                if slot >= 0:
                    place = ((slot + number).to(gl.int64) * kv_heads + kv_head) * kept_rows + acc_rows
                    gl.store(partial_top + place, gl.convert_layout(top, acc_row), mask=keep)
                    gl.store(partial_weight + place, gl.convert_layout(weight_sum, acc_row), mask=keep)
                    gl.store(partial_acc + place[:, None] * head_size + acc_dims[None, :], acc, mask=keep[:, None])
                else:
                    merged_top, merged_weight, shrink, new = merge_weights(merged_top, merged_weight, top, weight_sum)
                    merged = merge_values(
                        merged, gl.convert_layout(shrink, acc_row), acc, gl.convert_layout(new, acc_row)
                    )
                number += 1
                top = gl.full([_MULTIPLIED], -float("inf"), gl.float32, row)
                weight = gl.full([_MULTIPLIED, 8], 0.0, gl.float32, sum_layout)
                acc = gl.full([_MULTIPLIED, head_size], 0.0, gl.float32, acc_layout)

        if run > 0:
            if slot >= 0:
                splits = _split_of(stop - 1, split, early_size, early_keys) + 1
                counter = arrived + slot * kv_heads + kv_head
                gl.thread_barrier()
                if gl.atomic_add(counter, run, sem="acq_rel") == splits - run:
                    gl.thread_barrier()
                    gl.store(counter, 0)
                    first_place = (slot.to(gl.int64) * kv_heads + kv_head) * kept_rows
                    _merge_kept(
                        out, partial_top, partial_weight, partial_acc, first_place, splits, start, tokens, kv_head,
                        stride_o_token, stride_o_head, kv_heads, group, head_size, kept_rows, kept_block,
                    )  # fmt: skip
            else:
                divisor = gl.convert_layout(gl.where(merged_weight == 0.0, 1.0, merged_weight), acc_row)
                at_row = (start + acc_rows // group).to(gl.int64) * stride_o_token
                at_row += (kv_head * group + acc_rows % group) * stride_o_head
                result = (merged / divisor[:, None]).to(dtype)
                gl.store(out + at_row[:, None] + acc_dims[None, :], result, mask=keep[:, None])


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
    arrived,
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
    split: gl.constexpr,
    early_size: gl.constexpr,
    early_keys: gl.constexpr,
    kept_rows: gl.constexpr,
    kept_block: gl.constexpr,
    stages: gl.constexpr,
):
    """Works on the entries of its part of ``work``.

    Args:
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
                    query, out, first_entries, work, partial_top, partial_weight, partial_acc, arrived, factor,
                    stride_q_token, stride_q_head, stride_o_token, stride_o_head, rows_shared, key_ring, value_ring,
                    ready, empty, kv_heads, group, head_size, split, early_size, early_keys, kept_rows, kept_block,
                    stages,
                ),
            ),
            (
                _producer,
                (
                    keys_at, values_at, table, first_entries, work, table_stride, key_ring, value_ring, ready, empty,
                    head_size, page_size, split, early_size, early_keys, stages,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
