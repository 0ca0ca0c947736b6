"""Prefill attention for Hopper in Gluon, with the bits of ``triton_kernels.attention_kernel``.

Every row goes through the same fp32 operations in the same order as there: a step of the online softmax for each 64
keys, weights summed by the tensor cores against ones, splits merged ascending with explicit fma. What differs is who
waits for whom. One warp copies tiles of keys and values into rings in shared memory by the tensor memory accelerator,
a page smaller than a tile by several copies; two warpgroups of 64 rows each take the tiles from there, and multiply
one tile's weights with its values while they compute the next tile's weights. That schedule is the one of
FlashAttention-3, Shah et al. 2024, arXiv:2407.08608.

The splits of a block may be shared by programs. The one that has the first splits merges them, the others leave each of
theirs among the partial results, and when all are there every program merges some of the rows.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...common.gluon_names import barrier, copy_elements, reinterpret
from .common import (
    copy_tile,
    is_end_of_split,
    layout_of_acc,
    layout_of_kept,
    layout_of_rows,
    layout_of_scores,
    layout_of_sums,
    masked,
    merge_values,
    merge_weights,
    next_stage,
    page_part,
    row_sum,
    split_of,
    start_of,
    start_scores,
    start_sums,
    weights_of,
)
from .merge import layout_of_partials
from .shapes import ACCOUNTS, ROWS, TILE, WARPGROUP_ROWS

_TILE = gl.constexpr(TILE)
_HALF = gl.constexpr(WARPGROUP_ROWS)
_ROWS = gl.constexpr(ROWS)
_MERGED_ROWS = gl.constexpr(4)
"""Rows whose shared splits a warpgroup merges at once."""
_AT_ONCE = gl.constexpr(16)
"""Splits that are on their way at the same time."""
_ACCOUNTS = gl.constexpr(ACCOUNTS)


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
def _merge_rows(
    out, partials, slot, folded, splits, share, first_row, start, tokens, kv_head, stride_o_token, stride_o_head,
    kv_heads: gl.constexpr, group: gl.constexpr, head_size: gl.constexpr,
):  # fmt: skip
    """Merges all splits of the rows ``share`` * 4 to ``share`` * 4 + 3 of a block, in ascending order, and writes them.

    Args:
        folded: the first splits whose merged result is where the last one's would be.
    """
    layout: gl.constexpr = layout_of_partials(head_size)
    row: gl.constexpr = gl.SliceLayout(1, layout)
    rows = share * _MERGED_ROWS + gl.arange(0, _MERGED_ROWS, row)
    dims = gl.arange(0, head_size, gl.SliceLayout(0, layout))
    top = gl.full([_MERGED_ROWS], -float("inf"), gl.float32, row)
    weight = gl.full([_MERGED_ROWS], 0.0, gl.float32, row)
    acc = gl.full([_MERGED_ROWS, head_size], 0.0, gl.float32, layout)
    for first in range(folded - 1, splits, _AT_ONCE):
        tops = ()
        weights = ()
        accs = ()
        for number in gl.static_range(_AT_ONCE):
            record = _record(partials, slot, gl.minimum(first + number, splits - 1), kv_head, kv_heads, head_size)
            at_row = record + _ROWS * head_size + rows
            tops = tops + (gl.load(at_row, cache_modifier=".cg"),)  # noqa: RUF005
            weights = weights + (gl.load(at_row + _ROWS, cache_modifier=".cg"),)  # noqa: RUF005
            at = record + rows[:, None] * head_size + dims[None, :]
            accs = accs + (gl.load(at, cache_modifier=".cg"),)  # noqa: RUF005
        # Or the compiler moves every load to where it is used, and one waits for the other.
        barrier()
        for number in gl.static_range(_AT_ONCE):
            exists = first + number < splits
            new_top, new_weight, old, new = merge_weights(top, weight, tops[number], weights[number])
            acc = gl.where(exists, merge_values(acc, old, accs[number], new), acc)
            top = gl.where(exists, new_top, top)
            weight = gl.where(exists, new_weight, weight)
    token = (first_row + rows) // group
    at_row = (start + token).to(gl.int64) * stride_o_token
    at_row += (kv_head * group + (first_row + rows) % group) * stride_o_head
    result = (acc / gl.where(weight == 0.0, 1.0, weight)[:, None]).to(out.dtype.element_ty)
    gl.store(out + at_row[:, None] + dims[None, :], result, mask=(token < tokens)[:, None])


@gluon.jit
def _merge_shared(
    out, partials, account, slot, number, run, splits, first_row, start, tokens, kv_head, stride_o_token,
    stride_o_head, half: gl.constexpr, kv_heads: gl.constexpr, group: gl.constexpr, head_size: gl.constexpr,
    most_waits: gl.constexpr,
):  # fmt: skip
    """A warpgroup has left ``run`` splits of a block from ``number`` on, and takes part in merging when all are there.

    It waits for the others, as they end at the same time, but not for long: they may be waiting for a multiprocessor.
    The last one finds all splits, so that every row is merged.

    Args:
        account: counts the splits that are there, of each warpgroup's rows, and in its upper half those that the first
            program merged. The next number counts shares of the rows that are taken, and in its upper half the splits
            of those who do not come back.
    """
    barrier()
    merged = gl.where(number + half == 0, run << 16, 0)
    gl.atomic_add(account, run + merged, sem="release")
    seen = gl.load(account, volatile=True)
    waits = gl.to_tensor(0)
    while ((seen & 0xFFFF) < 2 * splits) & (waits < most_waits):
        seen = gl.load(account, volatile=True)
        waits += 1
    # The same for all threads.
    seen = gl.atomic_add(account, 0, sem="acquire")
    barrier()
    if (seen & 0xFFFF) == 2 * splits:
        shares = (gl.minimum(tokens * group - first_row, _ROWS) + _MERGED_ROWS - 1) // _MERGED_ROWS
        share = gl.atomic_add(account + 1, 1) & 0xFFFF
        while share < shares:
            _merge_rows(
                out, partials, slot, seen >> 16, splits, share, first_row, start, tokens, kv_head, stride_o_token,
                stride_o_head, kv_heads, group, head_size,
            )  # fmt: skip
            share = gl.atomic_add(account + 1, 1) & 0xFFFF
    if (gl.atomic_add(account + 1, run << 16) >> 16) + run == 2 * splits:
        gl.store(account, 0)
        gl.store(account + 1, 0)


@gluon.jit
def _start_query(
    rows_shared, query, work, place, stride_token, stride_head, half: gl.constexpr, kv_heads: gl.constexpr,
    group: gl.constexpr, head_size: gl.constexpr,
):  # fmt: skip
    """Starts the copy of a warpgroup's rows of an item. What rows that do not exist hold is never written."""
    layout: gl.constexpr = layout_of_rows(head_size)
    entry = work + place // kv_heads * 8
    rows = gl.load(entry + 1) + half * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, layout))
    dims = gl.arange(0, head_size, gl.SliceLayout(0, layout))
    token = rows // group
    at_row = (gl.load(entry + 5) + token).to(gl.int64) * stride_token
    at_row += (place % kv_heads * group + rows % group) * stride_head
    exists = (token < gl.load(entry + 6))[:, None]
    copy_elements(rows_shared, query + at_row[:, None] + dims[None, :], mask=exists)
    async_copy.commit_group()


@gluon.jit
def _step(
    q, key_ring, value_ring, keys_ready, values_ready, empty, passed, stage, phase, at, position, factor, p, old, ones,
    top, weight, acc, kept_top, kept_weight, kept, partials, slot, kv_head, leaves, bare_stop,
    half: gl.constexpr, kv_heads: gl.constexpr, levels: gl.constexpr, head_size: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    """The values of the tile before ``at``, and the weights of the tile at ``at``, which has masks if ``bare_stop`` is
    not after it.

    The waits for ``passed`` never wait: they keep the compiler from moving what comes before or after them.
    """
    row: gl.constexpr = gl.SliceLayout(1, layout_of_scores())
    acc_layout: gl.constexpr = layout_of_acc(head_size)
    acc_row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    mbarrier.wait(keys_ready.index(stage), phase)
    score = start_scores(q, key_ring, stage, head_size)
    mbarrier.wait(values_ready.index(stage), phase)
    # Not where the factor became known: now the tensor cores are busy.
    acc = acc * gl.convert_layout(old, acc_row)[:, None]
    acc = warpgroup_mma(p, value_ring.index(stage).reshape([_TILE, head_size]), acc, is_async=True)
    weight = start_sums(p, old, weight, ones)
    score = warpgroup_mma_wait(2, deps=(score,))

    if at >= bare_stop:
        score = masked(score, position, at)
    begins = is_end_of_split(at, levels)
    before = gl.where(begins, -float("inf"), top)
    new_top, weights, old = weights_of(score, before, factor, p.dtype)
    mbarrier.wait(passed, 1)
    acc, weight = warpgroup_mma_wait(0, deps=(acc, weight))
    mbarrier.arrive(empty.index(stage))
    if begins:
        weight_sum = row_sum(weight, row)
        if leaves:
            number = split_of(at - 1, levels)
            _store_split(_record(partials, slot, number, kv_head, kv_heads, head_size), top, weight_sum, acc, half)
        else:
            kept_top, kept_weight, shrink, new = merge_weights(kept_top, kept_weight, top, weight_sum)
            shrink, new = gl.convert_layout(shrink, acc_row), gl.convert_layout(new, acc_row)
            kept.store(merge_values(kept.load(acc_layout), shrink, acc, new))
        acc = gl.full([_HALF, head_size], 0.0, gl.float32, acc_layout)
        weight = gl.full([_HALF, 8], 0.0, gl.float32, layout_of_sums())
    p = gl.convert_layout(weights, gl.DotOperandLayout(0, acc_layout, 2), assert_trivial=True)
    stage, phase = next_stage(stage, phase, stages)
    return p, old, new_top, weight, acc, kept_top, kept_weight, stage, phase


@gluon.jit
def _consumer(
    query, out, count, work, partials, accounts, factor, stride_q_token, stride_q_head, stride_o_token, stride_o_head,
    rows_shared, kept, ones_shared, key_ring, value_ring, keys_ready, values_ready, empty, passed,
    half: gl.constexpr, kv_heads: gl.constexpr, group: gl.constexpr, head_size: gl.constexpr, levels: gl.constexpr,
    stages: gl.constexpr, most_waits: gl.constexpr,
):  # fmt: skip
    """A warpgroup: half of the rows of every block."""
    dtype: gl.constexpr = rows_shared.dtype
    score_layout: gl.constexpr = layout_of_scores()
    acc_layout: gl.constexpr = layout_of_acc(head_size)
    row_layout: gl.constexpr = layout_of_rows(head_size)
    row: gl.constexpr = gl.SliceLayout(1, score_layout)
    acc_row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    ones = ones_shared.permute([1, 0])
    # The first half of its memory.
    result_shared = reinterpret(kept, dtype, [2, _HALF, head_size], rows_shared.layout).index(0)
    total = gl.load(count) * kv_heads
    programs = gl.num_programs(0)
    rounds = _rounds(total, programs)
    if rounds > 0:
        _start_query(
            rows_shared, query, work, _place(0, programs), stride_q_token, stride_q_head, half, kv_heads, group,
            head_size,
        )  # fmt: skip
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for round_ in range(rounds):
        place = _place(round_, programs)
        kv_head = place % kv_heads
        entry = work + place // kv_heads * 8
        first_row = gl.load(entry + 1)
        number = gl.load(entry + 2)
        slot = gl.load(entry + 4)
        start = gl.load(entry + 5)
        tokens = gl.load(entry + 6)
        past = gl.load(entry + 7)
        begin, end, stop = _keys(entry, group, levels)
        # Who has the first splits merges them, and leaves the result.
        leaves = (slot >= 0) & (number > 0)
        position = past + (first_row + half * _HALF + gl.arange(0, _HALF, row)) // group
        kept_top = gl.full([_HALF], -float("inf"), gl.float32, row)
        kept_weight = gl.full([_HALF], 0.0, gl.float32, row)
        acc = gl.full([_HALF, head_size], 0.0, gl.float32, acc_layout)
        kept.store(acc)
        async_copy.wait_group(0)
        barrier()
        q = rows_shared.load(gl.DotOperandLayout(0, score_layout, 2))

        mbarrier.wait(keys_ready.index(stage), phase)
        score = start_scores(q, key_ring, stage, head_size)
        # Every thread has its rows, so those of the next item may come.
        barrier()
        if round_ + 1 < rounds:
            _start_query(
                rows_shared, query, work, _place(round_ + 1, programs), stride_q_token, stride_q_head, half, kv_heads,
                group, head_size,
            )  # fmt: skip
        score = warpgroup_mma_wait(0, deps=(score,))
        # The values beside these keys were the last ones of the block before.
        mbarrier.arrive(empty.index(stage))
        stage, phase = next_stage(stage, phase, stages)
        # Masks change no bit of a tile that every row sees, so the first may have them in any case.
        top, weights, old = weights_of(masked(score, position, begin), kept_top, factor, dtype)
        weight = gl.full([_HALF, 8], 0.0, gl.float32, layout_of_sums())
        p = gl.convert_layout(weights, gl.DotOperandLayout(0, acc_layout, 2), assert_trivial=True)

        bare_stop = (past + first_row // group + 1) // _TILE * _TILE
        for at in range(begin + _TILE, end, _TILE):
            p, old, top, weight, acc, kept_top, kept_weight, stage, phase = _step(
                q, key_ring, value_ring, keys_ready, values_ready, empty, passed, stage, phase, at, position, factor,
                p, old, ones, top, weight, acc, kept_top, kept_weight, kept, partials, slot, kv_head, leaves,
                bare_stop, half, kv_heads, levels, head_size, stages,
            )  # fmt: skip

        mbarrier.wait(values_ready.index(stage), phase)
        values = value_ring.index(stage).reshape([_TILE, head_size])
        last = (end - 1) // _TILE * _TILE
        if last + _TILE > end:
            # Unwritten slots may hold anything, NaN included. Both warpgroups write the same.
            written = last + gl.arange(0, _TILE, gl.SliceLayout(1, row_layout)) < end
            values.store(gl.where(written[:, None], values.load(row_layout), 0.0))
            fence_async_shared()
            barrier()
        acc = warpgroup_mma(p, values, acc * gl.convert_layout(old, acc_row)[:, None], is_async=True)
        acc, weight = warpgroup_mma_wait(0, deps=(acc, start_sums(p, old, weight, ones)))

        weight_sum = row_sum(weight, row)
        if leaves == 0:
            top, weight_sum, shrink, new = merge_weights(kept_top, kept_weight, top, weight_sum)
            shrink, new = gl.convert_layout(shrink, acc_row), gl.convert_layout(new, acc_row)
            acc = merge_values(kept.load(acc_layout), shrink, acc, new)
        if slot < 0:
            divisor = gl.convert_layout(gl.where(weight_sum == 0.0, 1.0, weight_sum), acc_row)
            barrier()
            result_shared.store((acc / divisor[:, None]).to(dtype))
            barrier()
            rows = first_row + half * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, row_layout))
            dims = gl.arange(0, head_size, gl.SliceLayout(0, row_layout))
            token = rows // group
            at_row = (start + token).to(gl.int64) * stride_o_token + (kv_head * group + rows % group) * stride_o_head
            result = result_shared.load(row_layout)
            gl.store(out + at_row[:, None] + dims[None, :], result, mask=(token < tokens)[:, None])
            barrier()
        else:
            last_split = split_of(end - 1, levels)
            _store_split(_record(partials, slot, last_split, kv_head, kv_heads, head_size), top, weight_sum, acc, half)
            account = accounts + (slot * kv_heads + kv_head) * _ACCOUNTS
            _merge_shared(
                out, partials, account, slot, number, last_split + 1 - number, split_of(stop - 1, levels) + 1,
                first_row, start, tokens, kv_head, stride_o_token, stride_o_head, half, kv_heads, group, head_size,
                most_waits,
            )  # fmt: skip


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
    most_waits: gl.constexpr,
    consumer_registers: gl.constexpr,
):
    """Works on every entry of ``work`` and every KV head.

    Args:
        partials: room for the splits of shared blocks.
        accounts: for each slot and KV head, as in ``_merge_shared``; 0 before and after.
        factor: of the scores, times log2(e).
        stages: tiles in each ring.
        most_waits: how often a program looks whether the others are there before it leaves the merging to them.
        consumer_registers: of a thread of the second warpgroup; what is left goes to the first.
    """
    dtype: gl.constexpr = keys_at.dtype
    tile_layout: gl.constexpr = keys_at.layout
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(tile_layout.swizzle_byte_width, 16, 2)
    key_ring = gl.allocate_shared_memory(dtype, [stages, 1, 1, _TILE, head_size], tile_layout)
    value_ring = gl.allocate_shared_memory(dtype, [stages, 1, 1, _TILE, head_size], tile_layout)
    rows_shared = gl.allocate_shared_memory(dtype, [_HALF, head_size], rows_layout)
    rows_other = gl.allocate_shared_memory(dtype, [_HALF, head_size], rows_layout)
    kept = gl.allocate_shared_memory(gl.float32, [_HALF, head_size], layout_of_kept(head_size))
    kept_other = gl.allocate_shared_memory(gl.float32, [_HALF, head_size], layout_of_kept(head_size))
    ones = gl.full([8, _TILE], 1.0, dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    ones_shared = gl.allocate_shared_memory(dtype, [8, _TILE], gl.NVMMASharedLayout(128, 16, 2), ones)
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    keys_ready = gl.allocate_shared_memory(gl.int64, [stages, 1], bar_layout)
    values_ready = gl.allocate_shared_memory(gl.int64, [stages, 1], bar_layout)
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], bar_layout)
    passed = gl.allocate_shared_memory(gl.int64, [1], bar_layout)
    for stage in gl.static_range(stages):
        mbarrier.init(keys_ready.index(stage), count=1)
        mbarrier.init(values_ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    mbarrier.init(passed, count=1)
    fence_async_shared()
    barrier()
    # No values come with the first keys.
    mbarrier.arrive(values_ready.index(0))

    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    query, out, count, work, partials, accounts, factor, stride_q_token, stride_q_head, stride_o_token,
                    stride_o_head, rows_shared, kept, ones_shared, key_ring, value_ring, keys_ready, values_ready,
                    empty, passed, 0, kv_heads, group, head_size, levels, stages, most_waits,
                ),
            ),
            (
                _consumer,
                (
                    query, out, count, work, partials, accounts, factor, stride_q_token, stride_q_head, stride_o_token,
                    stride_o_head, rows_other, kept_other, ones_shared, key_ring, value_ring, keys_ready, values_ready,
                    empty, passed, 1, kv_heads, group, head_size, levels, stages, most_waits,
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
