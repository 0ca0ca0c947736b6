"""Prefill attention for Hopper in Gluon, with the bits of ``triton_kernels.attention_kernel``.

Every row goes through the same fp32 operations in the same order as there: a step of the online softmax for each 64
keys, weights summed by the tensor cores against ones, splits merged ascending with explicit fma. What differs is who
waits for whom. One warp copies tiles of keys and values into rings in shared memory by the tensor memory accelerator,
a page smaller than a tile by several copies; two warpgroups of 64 rows each take the tiles from there, and multiply
one tile's weights with its values while they compute the next tile's weights. That schedule is the one of
FlashAttention-3, Shah et al. 2024, arXiv:2407.08608.

The splits of a block may be shared by programs. Each leaves its splits among the partial results, and the last one to
arrive merges them all, each warpgroup those of its rows.
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
    is_end_of_split,
    layout_of_acc,
    layout_of_kept,
    layout_of_rows,
    layout_of_scores,
    layout_of_sums,
    merge_values,
    merge_weights,
    next_stage,
    page_part,
    row_sum,
    split_of,
    start_of,
    start_scores,
    summed,
    weights_of,
)

ROWS = 2 * WARPGROUP_ROWS
"""Rows of a block: half of them for each of two warpgroups."""
_TILE = gl.constexpr(TILE)
_HALF = gl.constexpr(WARPGROUP_ROWS)
_ROWS = gl.constexpr(ROWS)


@gluon.jit
def _place(round_, programs):
    """The item of work of a program: there and back again, as items of a request get shorter."""
    program = gl.program_id(0)
    return round_ * programs + gl.where(round_ % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _rounds(total, programs):
    """Items of this program."""
    whole = total // programs
    return whole + gl.where(_place(whole, programs) < total, 1, 0)


@gluon.jit
def _keys(entry, group: gl.constexpr, levels: gl.constexpr):
    """Of an entry: the first of its keys, their end, and the end of its block's keys."""
    stop = gl.load(entry + 7) + gl.minimum((gl.load(entry + 1) + _ROWS - 1) // group, gl.load(entry + 6) - 1) + 1
    number = gl.load(entry + 2)
    end = start_of(number + gl.load(entry + 3), levels)
    return start_of(number, levels), gl.minimum(end, stop), stop


@gluon.jit
def _producer(
    keys_at, values_at, table, count, work, table_stride, key_ring, value_ring, keys_ready, values_ready, empty,
    kv_heads: gl.constexpr, group: gl.constexpr, head_size: gl.constexpr, page_size: gl.constexpr, levels: gl.constexpr,
    stages: gl.constexpr,
):  # fmt: skip
    """Keeps the rings full: a place holds a tile's keys and the values of the tile before, used together."""
    part: gl.constexpr = page_part(page_size)
    parts: gl.constexpr = _TILE // part
    total = gl.load(count) * kv_heads
    programs = gl.num_programs(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    before = gl.to_tensor(False)
    old_head = gl.to_tensor(0)
    old_slot = gl.to_tensor(0)
    old_pages = (old_head,) * parts
    for round_ in range(_rounds(total, programs)):
        place = _place(round_, programs)
        kv_head = place % kv_heads
        entry = work + place // kv_heads * 8
        own_table = table + gl.load(entry).to(gl.int64) * table_stride
        begin, end, _ = _keys(entry, group, levels)
        for at in range(begin, end, _TILE):
            pages = ()
            for number in gl.static_range(parts):
                key = at + number * part
                pages = pages + (gl.load(own_table + key // page_size, mask=key < end, other=0),)  # noqa: RUF005
            slot = at % page_size if page_size > _TILE else at * 0
            mbarrier.wait(empty.index(stage), phase)
            copy_tile(keys_at, key_ring, keys_ready, stage, pages, kv_head, slot, True, page_size, head_size)
            copy_tile(
                values_at, value_ring, values_ready, stage, old_pages, old_head, old_slot, before, page_size, head_size
            )
            stage, phase = next_stage(stage, phase, stages)
            old_pages = pages
            old_head = kv_head
            old_slot = slot
            before = gl.to_tensor(True)
    if before:
        mbarrier.wait(empty.index(stage), phase)
        copy_tile(values_at, value_ring, values_ready, stage, old_pages, old_head, old_slot, True, page_size, head_size)


@gluon.jit
def _record(partials, slot, number, kv_head, kv_heads: gl.constexpr, head_size: gl.constexpr):
    """Where a split's result is among the partial ones: the values of a block's rows, their maxima, their weights."""
    return partials + ((slot + number).to(gl.int64) * kv_heads + kv_head) * (_ROWS * (head_size + 2))


@gluon.jit
def _store_split(record, top, weight, acc, half: gl.constexpr):
    head_size: gl.constexpr = acc.shape[1]
    acc_layout: gl.constexpr = layout_of_acc(head_size)
    rows = half * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, acc_layout))
    dims = gl.arange(0, head_size, gl.SliceLayout(0, acc_layout))
    gl.store(record + rows[:, None] * head_size + dims[None, :], acc)
    at_row = record + _ROWS * head_size + half * _HALF + gl.arange(0, _HALF, top.type.layout)
    gl.store(at_row, top)
    gl.store(at_row + _ROWS, weight)


@gluon.jit
def _load_split(record, half: gl.constexpr, head_size: gl.constexpr):
    """What :func:`_store_split` left, whoever did."""
    acc_layout: gl.constexpr = layout_of_acc(head_size)
    rows = half * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, acc_layout))
    dims = gl.arange(0, head_size, gl.SliceLayout(0, acc_layout))
    acc = gl.load(record + rows[:, None] * head_size + dims[None, :], cache_modifier=".cg")
    at_row = record + _ROWS * head_size + rows
    return gl.load(at_row, cache_modifier=".cg"), gl.load(at_row + _ROWS, cache_modifier=".cg"), acc


@gluon.jit
def _merge_all(partials, slot, splits, kv_head, half: gl.constexpr, kv_heads: gl.constexpr, head_size: gl.constexpr):
    """Weights and values of all splits of a warpgroup's rows, merged in ascending order."""
    acc_layout: gl.constexpr = layout_of_acc(head_size)
    row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    top = gl.full([_HALF], -float("inf"), gl.float32, row)
    weight = gl.full([_HALF], 0.0, gl.float32, row)
    acc = gl.full([_HALF, head_size], 0.0, gl.float32, acc_layout)
    record = _record(partials, slot, 0, kv_head, kv_heads, head_size)
    split_top, split_weight, split_acc = _load_split(record, half, head_size)
    for number in range(splits):
        # The next split is on its way while this one is merged.
        record = _record(partials, slot, gl.minimum(number + 1, splits - 1), kv_head, kv_heads, head_size)
        next_top, next_weight, next_acc = _load_split(record, half, head_size)
        top, weight, old, new = merge_weights(top, weight, split_top, split_weight)
        acc = merge_values(acc, old, split_acc, new)
        split_top, split_weight, split_acc = next_top, next_weight, next_acc
    return weight, acc


@gluon.jit
def _step(
    q, key_ring, value_ring, keys_ready, values_ready, empty, passed, my_turn, other_turn, turn, stage, phase, at,
    position, factor, p, old, ones, top, weight, acc, kept_top, kept_weight, kept_acc, kept_shared,
    partials, slots, place, masked: gl.constexpr, half: gl.constexpr, kv_heads: gl.constexpr, levels: gl.constexpr,
    head_size: gl.constexpr, stages: gl.constexpr, turns: gl.constexpr, keep_in_shared: gl.constexpr,
):  # fmt: skip
    """The values of the tile before ``at``, and the weights of the tile at ``at``.

    The waits for ``passed`` never wait: they keep the compiler from moving what comes before or after them.
    """
    row: gl.constexpr = gl.SliceLayout(1, layout_of_scores())
    acc_row: gl.constexpr = gl.SliceLayout(1, layout_of_acc(head_size))
    weight_row: gl.constexpr = gl.SliceLayout(1, layout_of_sums())
    mbarrier.wait(keys_ready.index(stage), phase)
    if turns:
        mbarrier.wait(my_turn, turn)
    score = start_scores(q, key_ring, stage, head_size)
    mbarrier.wait(values_ready.index(stage), phase)
    # Not where the factor became known: now the tensor cores are busy.
    acc = acc * gl.convert_layout(old, acc_row)[:, None]
    acc = warpgroup_mma(p, value_ring.index(stage).reshape([_TILE, head_size]), acc, is_async=True)
    if turns:
        mbarrier.arrive(other_turn)
        turn = turn ^ 1
    score = warpgroup_mma_wait(1, deps=(score,))

    begins = is_end_of_split(at, levels)
    before = gl.where(begins, -float("inf"), top)
    new_top, weights, old = weights_of(score, before, position, at, factor, masked, p.dtype)
    split_weight = weight
    weight = gl.where(begins, 0.0, weight) * gl.convert_layout(old, weight_row)[:, None]
    weight = summed(weights, weight, ones)
    mbarrier.wait(passed, 1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(stage))
    if begins:
        weight_sum = row_sum(split_weight, row)
        slot = gl.load(slots + place // kv_heads * 8)
        if slot >= 0:
            number = split_of(at - 1, levels)
            record = _record(partials, slot, number, place % kv_heads, kv_heads, head_size)
            _store_split(record, top, weight_sum, acc, half)
        else:
            kept_top, kept_weight, shrink, new = merge_weights(kept_top, kept_weight, top, weight_sum)
            shrink, new = gl.convert_layout(shrink, acc_row), gl.convert_layout(new, acc_row)
            if keep_in_shared:
                kept_shared.store(merge_values(kept_shared.load(layout_of_acc(head_size)), shrink, acc, new))
            else:
                kept_acc = merge_values(kept_acc, shrink, acc, new)
        acc = gl.full([_HALF, head_size], 0.0, gl.float32, layout_of_acc(head_size))
    p = gl.convert_layout(weights, gl.DotOperandLayout(0, layout_of_acc(head_size), 2), assert_trivial=True)
    stage, phase = next_stage(stage, phase, stages)
    return p, old, new_top, weight, acc, kept_top, kept_weight, kept_acc, stage, phase, turn


@gluon.jit
def _consumer(
    query, out, count, work, partials, accounts, factor, stride_q_token, stride_q_head, stride_o_token, stride_o_head,
    rows_shared, kept_shared, key_ring, value_ring, keys_ready, values_ready, empty, passed, my_turn, other_turn,
    half: gl.constexpr, kv_heads: gl.constexpr, group: gl.constexpr, head_size: gl.constexpr, levels: gl.constexpr,
    stages: gl.constexpr, turns: gl.constexpr, keep_in_shared: gl.constexpr, query_in_registers: gl.constexpr,
):  # fmt: skip
    """A warpgroup: half of the rows of every block."""
    dtype: gl.constexpr = rows_shared.dtype
    score_layout: gl.constexpr = layout_of_scores()
    acc_layout: gl.constexpr = layout_of_acc(head_size)
    weight_layout: gl.constexpr = layout_of_sums()
    row_layout: gl.constexpr = layout_of_rows(head_size)
    row: gl.constexpr = gl.SliceLayout(1, score_layout)
    acc_row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    ones = gl.full([_TILE, 8], 1.0, dtype, gl.DotOperandLayout(1, weight_layout, 2))
    total = gl.load(count) * kv_heads
    programs = gl.num_programs(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    for round_ in range(_rounds(total, programs)):
        place = _place(round_, programs)
        kv_head = place % kv_heads
        entry = work + place // kv_heads * 8
        first_row = gl.load(entry + 1)
        start = gl.load(entry + 5)
        tokens = gl.load(entry + 6)
        past = gl.load(entry + 7)
        begin, end, stop = _keys(entry, group, levels)

        rows = first_row + half * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, row_layout))
        dims = gl.arange(0, head_size, gl.SliceLayout(0, row_layout))
        token = rows // group
        head = kv_head * group + rows % group
        exists = token < tokens
        at_row = (start + token).to(gl.int64)
        position = past + (first_row + half * _HALF + gl.arange(0, _HALF, row)) // group
        at_query = (at_row * stride_q_token + head * stride_q_head)[:, None] + dims[None, :]
        rows_shared.store(gl.load(query + at_query, mask=exists[:, None], other=0.0))
        fence_async_shared()
        gl.thread_barrier()
        q = rows_shared.load(gl.DotOperandLayout(0, score_layout, 2)) if query_in_registers else rows_shared

        kept_top = gl.full([_HALF], -float("inf"), gl.float32, row)
        kept_weight = gl.full([_HALF], 0.0, gl.float32, row)
        acc = gl.full([_HALF, head_size], 0.0, gl.float32, acc_layout)
        if keep_in_shared:
            kept_shared.store(acc)
            kept_acc = kept_top
        else:
            kept_acc = acc

        # Masks change no bit of a tile that every row sees, so the first may have them in any case.
        mbarrier.wait(keys_ready.index(stage), phase)
        score = warpgroup_mma_wait(0, deps=(start_scores(q, key_ring, stage, head_size),))
        # The values beside these keys were the last ones of the block before.
        mbarrier.arrive(empty.index(stage))
        stage, phase = next_stage(stage, phase, stages)
        top, weights, old = weights_of(score, kept_top, position, begin, factor, True, dtype)
        weight = summed(weights, gl.full([_HALF, 8], 0.0, gl.float32, weight_layout), ones)
        p = gl.convert_layout(weights, gl.DotOperandLayout(0, acc_layout, 2), assert_trivial=True)

        last = (end - 1) // _TILE * _TILE
        bare_stop = gl.minimum((past + first_row // group + 1) // _TILE * _TILE, last + _TILE)
        for at in range(begin + _TILE, bare_stop, _TILE):
            p, old, top, weight, acc, kept_top, kept_weight, kept_acc, stage, phase, turn = _step(
                q, key_ring, value_ring, keys_ready, values_ready, empty, passed, my_turn, other_turn, turn, stage,
                phase, at, position, factor, p, old, ones, top, weight, acc, kept_top, kept_weight, kept_acc,
                kept_shared, partials, work + 4, place, False, half, kv_heads, levels, head_size, stages, turns,
                keep_in_shared,
            )  # fmt: skip
        for at in range(gl.maximum(bare_stop, begin + _TILE), end, _TILE):
            p, old, top, weight, acc, kept_top, kept_weight, kept_acc, stage, phase, turn = _step(
                q, key_ring, value_ring, keys_ready, values_ready, empty, passed, my_turn, other_turn, turn, stage,
                phase, at, position, factor, p, old, ones, top, weight, acc, kept_top, kept_weight, kept_acc,
                kept_shared, partials, work + 4, place, True, half, kv_heads, levels, head_size, stages, turns,
                keep_in_shared,
            )  # fmt: skip

        mbarrier.wait(values_ready.index(stage), phase)
        values = value_ring.index(stage).reshape([_TILE, head_size])
        if last + _TILE > end:
            # Unwritten slots may hold anything, NaN included. Both warpgroups write the same.
            written = last + gl.arange(0, _TILE, gl.SliceLayout(1, row_layout)) < end
            values.store(gl.where(written[:, None], values.load(row_layout), 0.0))
            fence_async_shared()
            gl.thread_barrier()
        acc = acc * gl.convert_layout(old, acc_row)[:, None]
        acc = warpgroup_mma(p, values, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))

        weight_sum = row_sum(weight, row)
        slot = gl.load(entry + 4)
        writes = slot < 0
        if writes:
            kept_top, kept_weight, shrink, new = merge_weights(kept_top, kept_weight, top, weight_sum)
            shrink, new = gl.convert_layout(shrink, acc_row), gl.convert_layout(new, acc_row)
            if keep_in_shared:
                acc = merge_values(kept_shared.load(acc_layout), shrink, acc, new)
            else:
                acc = merge_values(kept_acc, shrink, acc, new)
            divisor = gl.convert_layout(kept_weight, acc_row)
        else:
            number = split_of(end - 1, levels)
            _store_split(_record(partials, slot, number, kv_head, kv_heads, head_size), top, weight_sum, acc, half)
            gl.thread_barrier()
            splits = split_of(stop - 1, levels) + 1
            run = number + 1 - gl.load(entry + 2)
            account = accounts + (slot * kv_heads + kv_head) * 2 + half
            writes = gl.atomic_add(account, run, sem="acq_rel") == splits - run
            divisor = gl.convert_layout(kept_weight, acc_row)
            if writes:
                gl.store(account, 0)
                gl.thread_barrier()
                divisor, acc = _merge_all(partials, slot, splits, kv_head, half, kv_heads, head_size)
        if writes:
            acc = acc / gl.where(divisor == 0.0, 1.0, divisor)[:, None]
            rows_shared.store(acc.to(dtype))
            gl.thread_barrier()
            at_out = (at_row * stride_o_token + head * stride_o_head)[:, None] + dims[None, :]
            gl.store(out + at_out, rows_shared.load(row_layout), mask=exists[:, None])
            gl.thread_barrier()


@gluon.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    query,
    keys_at,
    values_at,
    out,
    table,
    count,
    work,
    partials,
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
    stages: gl.constexpr,
    turns: gl.constexpr,
    keep_in_shared: gl.constexpr,
    query_in_registers: gl.constexpr,
    consumer_registers: gl.constexpr,
):
    """Works on every entry of ``work`` and every KV head.

    Args:
        partials: room for the splits of shared blocks.
        accounts: for each slot and KV head, how many splits are done of each warpgroup's rows; 0 before and after.
        factor: of the scores, times log2(e).
        stages: tiles in each ring.
        turns: the two warpgroups take turns at issuing products.
        keep_in_shared: the running result of finished splits is in shared memory and not in registers.
        query_in_registers: or in shared memory.
        consumer_registers: of a thread of the second warpgroup; what is left goes to the first.
    """
    dtype: gl.constexpr = keys_at.dtype
    tile_layout: gl.constexpr = keys_at.layout
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(tile_layout.swizzle_byte_width, 16, 2)
    key_ring = gl.allocate_shared_memory(dtype, [stages, 1, 1, _TILE, head_size], tile_layout)
    value_ring = gl.allocate_shared_memory(dtype, [stages, 1, 1, _TILE, head_size], tile_layout)
    rows_shared = gl.allocate_shared_memory(dtype, [_HALF, head_size], rows_layout)
    rows_other = gl.allocate_shared_memory(dtype, [_HALF, head_size], rows_layout)
    if keep_in_shared:
        kept = gl.allocate_shared_memory(gl.float32, [_HALF, head_size], layout_of_kept(head_size))
        kept_other = gl.allocate_shared_memory(gl.float32, [_HALF, head_size], layout_of_kept(head_size))
    else:
        kept = rows_shared
        kept_other = rows_other
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    keys_ready = gl.allocate_shared_memory(gl.int64, [stages, 1], bar_layout)
    values_ready = gl.allocate_shared_memory(gl.int64, [stages, 1], bar_layout)
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], bar_layout)
    passed = gl.allocate_shared_memory(gl.int64, [1], bar_layout)
    turn = gl.allocate_shared_memory(gl.int64, [1], bar_layout)
    turn_other = gl.allocate_shared_memory(gl.int64, [1], bar_layout)
    for stage in gl.static_range(stages):
        mbarrier.init(keys_ready.index(stage), count=1)
        mbarrier.init(values_ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    mbarrier.init(passed, count=1)
    mbarrier.init(turn, count=1)
    mbarrier.init(turn_other, count=1)
    fence_async_shared()
    gl.thread_barrier()
    # The first warpgroup begins, and no values come with the first keys.
    mbarrier.arrive(turn)
    mbarrier.arrive(values_ready.index(0))

    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    query, out, count, work, partials, accounts, factor, stride_q_token, stride_q_head, stride_o_token,
                    stride_o_head, rows_shared, kept, key_ring, value_ring, keys_ready, values_ready, empty, passed,
                    turn, turn_other, 0, kv_heads, group, head_size, levels, stages, turns, keep_in_shared,
                    query_in_registers,
                ),
            ),
            (
                _consumer,
                (
                    query, out, count, work, partials, accounts, factor, stride_q_token, stride_q_head, stride_o_token,
                    stride_o_head, rows_other, kept_other, key_ring, value_ring, keys_ready, values_ready, empty,
                    passed, turn_other, turn, 1, kv_heads, group, head_size, levels, stages, turns, keep_in_shared,
                    query_in_registers,
                ),
            ),
            (
                _producer,
                (
                    keys_at, values_at, table, count, work, table_stride, key_ring, value_ring, keys_ready,
                    values_ready, empty, kv_heads, group, head_size, page_size, levels, stages,
                ),
            ),
        ],
        [4, 1],
        [consumer_registers, 24],
    )  # fmt: skip
