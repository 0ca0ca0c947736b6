"""Prefill attention for Hopper in Gluon, with the bits of ``triton_kernels.attention_kernel``.

A tile of 64 keys is a step of the online softmax of its split, with ``qk = q @ k`` and ``scale`` in units of log2(e)::

    m' = max(m, max(qk) * scale)    p = exp2(qk * scale - m')    alpha = exp2(m - m')
    l' = l * alpha + sum(p)    acc' = acc * alpha + p @ v

Splits merge as in :mod:`.merge`, and ``out = acc / l``.

Every row goes through the same fp32 operations in the same order as there: a step of the online softmax for each 64
keys, weights summed by the tensor cores against ones, splits merged ascending with explicit fma. What differs is who
waits for whom. One warp copies tiles of keys and values into rings in shared memory by the tensor memory accelerator,
a page smaller than a tile by several copies; two warpgroups of 64 rows each take the tiles from there, and multiply
one tile's weights with its values while they compute the next tile's weights. That schedule is the one of
FlashAttention-3, Shah et al. 2024, arXiv:2407.08608.

Large heads leave no room in shared memory for merged splits beside the rows, which the tensor cores then read from
there: a warpgroup keeps merged splits in global memory, each thread what it has itself, and one ring holds keys and
values by turns, so that a place is free as soon as one product has read it.

The splits of a block may be shared by CTAs. The one that owns split 0 merges its own, the others leave each of theirs
among the partial results, and when all are there every CTA merges some of the rows.
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
from ...common.triton_names import aggregate, value
from . import shapes
from .common import (
    BLOCK_N,
    WARPGROUP_M,
    Config,
    KeyRange,
    Ring,
    RingPosition,
    Rows,
    TileAddress,
    clear_unseen,
    copy_tile,
    elements_of,
    get_acc_layout,
    get_acc_smem_layout,
    get_l_layout,
    get_merged_layout,
    get_out_layout,
    get_qk_layout,
    get_row_layout,
    is_end_of_split,
    is_large,
    key_range,
    keys_per_copy,
    load_work,
    merge_acc,
    merge_sums,
    next_position,
    row_offsets,
    softmax_weights,
    split_of,
    sums_with_sinks,
    tile_address,
)
from .merge import get_partial_layout

BLOCK_M = gl.constexpr(shapes.BLOCK_M)
_SEMAPHORE_INTS = gl.constexpr(shapes.SEMAPHORE_INTS)
_MERGE_M = gl.constexpr(4)
"""Rows whose shared splits a warpgroup merges at once."""
_SPLITS_IN_FLIGHT = gl.constexpr(16)
"""Splits that are on their way at the same time."""


@aggregate
class Warpgroup:
    """What a warpgroup that multiplies works with; ``q_smem`` and ``merged_acc`` are its own."""

    q: Rows
    out: Rows
    work_count_ptr: gl.tensor
    work_ptr: gl.tensor
    partials_ptr: gl.tensor
    semaphores_ptr: gl.tensor
    sinks_ptr: value
    """Of each query head, or None."""
    qk_scale_log2: gl.tensor
    q_smem: gl.shared_memory_descriptor
    """[WARPGROUP_M, HEAD_DIM]"""
    merged_acc: value
    """[WARPGROUP_M, HEAD_DIM] fp32 in shared memory: of the merged splits; of large heads a pointer to as much."""
    ones_smem: gl.shared_memory_descriptor
    """[8, BLOCK_N]"""
    ring: Ring
    order_fence: gl.shared_memory_descriptor
    """A barrier in memory that nobody waits for."""
    cfg: Config
    MAX_SPINS: gl.constexpr
    HALF: gl.constexpr
    """Which rows of a block: 0 the first ``WARPGROUP_M``, 1 the others."""


@aggregate
class Block:
    """A warpgroup's rows of a work item."""

    q: value
    """[WARPGROUP_M, HEAD_DIM], in shared memory for large heads."""
    ones: gl.shared_memory_descriptor
    """[BLOCK_N, 8]"""
    q_pos: gl.tensor
    """[WARPGROUP_M]"""
    keys: KeyRange
    unmasked_begin: gl.tensor
    """Tiles from it on, and before ``unmasked_end``, are seen by every row."""
    unmasked_end: gl.tensor
    kv_head: gl.tensor
    workspace_idx: gl.tensor
    writes_partial: gl.tensor
    """Whether it leaves each split among the partial results."""


@aggregate
class SplitState:
    """A split so far. Its last tile is in ``m``, but not yet in ``l`` and ``acc``, which lack ``alpha`` and ``p``."""

    acc: gl.tensor
    m: gl.tensor
    alpha: gl.tensor
    l: gl.tensor
    """[WARPGROUP_M, 8], every column the sum."""
    p: gl.tensor


@aggregate
class Merged:
    """Row maxima and row sums of merged splits."""

    m: gl.tensor
    l: gl.tensor


@gluon.jit
def _work_idx(turn, num_programs):
    """The work item of a CTA's turn: there and back again, as items of a request get shorter."""
    program = gl.program_id(0)
    return turn * num_programs + gl.where(turn % 2 == 0, program, num_programs - 1 - program)


@gluon.jit
def _num_turns(num_items, num_programs):
    """Items of this CTA."""
    whole = num_items // num_programs
    return whole + gl.where(_work_idx(whole, num_programs) < num_items, 1, 0)


@gluon.jit
def _key_range(work, cfg):
    """Of a work item."""
    last_token = gl.minimum((work.first_row + BLOCK_M - 1) // cfg.QUERIES_PER_KV, work.query_len - 1)
    return key_range(work, work.first_row // cfg.QUERIES_PER_KV, last_token, cfg)


@gluon.jit
def _values_position(position, cfg):
    """Where the values are that are used with the keys at a position: at the same one of their own ring, or next."""
    if is_large(cfg.HEAD_DIM):
        position = next_position(position, cfg.NUM_STAGES)
    return position


@gluon.jit
def _producer(k_desc, v_desc, block_table_ptr, stride_table, work_count_ptr, work_ptr, ring, cfg):
    """Keeps the rings full: a tile's keys and the values of the tile before, which are used together, have one stage,
    or two in one ring.
    """
    PAGE_SIZE: gl.constexpr = cfg.PAGE_SIZE
    COPIES: gl.constexpr = BLOCK_N // keys_per_copy(PAGE_SIZE)
    num_items = gl.load(work_count_ptr) * cfg.NUM_KV_HEADS
    num_programs = gl.num_programs(0)
    position = RingPosition(gl.to_tensor(0), gl.to_tensor(1))
    has_previous = gl.to_tensor(False)
    zero = gl.to_tensor(0)
    previous = TileAddress(zero, zero, (zero,) * COPIES)
    for turn in range(_num_turns(num_items, num_programs)):
        work = load_work(work_ptr, _work_idx(turn, num_programs), cfg.NUM_KV_HEADS, True)
        table_ptr = block_table_ptr + work.request * stride_table
        keys = _key_range(work, cfg)
        for kv_start in range(keys.lo, keys.hi, BLOCK_N):
            tile = tile_address(work, table_ptr, kv_start, keys, cfg)
            stage = position.stage
            mbarrier.wait(ring.empty_bar.index(stage), position.phase)
            copy_tile(k_desc, ring.k_smem, ring.k_full_bar, stage, tile, True, PAGE_SIZE)
            if is_large(cfg.HEAD_DIM):
                if has_previous:
                    position = next_position(position, cfg.NUM_STAGES)
                    mbarrier.wait(ring.empty_bar.index(position.stage), position.phase)
                    copy_tile(v_desc, ring.v_smem, ring.v_full_bar, position.stage, previous, True, PAGE_SIZE)
            else:
                copy_tile(v_desc, ring.v_smem, ring.v_full_bar, stage, previous, has_previous, PAGE_SIZE)
            position = next_position(position, cfg.NUM_STAGES)
            previous = tile
            has_previous = gl.to_tensor(True)
    if has_previous:
        position = _values_position(position, cfg)
        stage = position.stage
        mbarrier.wait(ring.empty_bar.index(stage), position.phase)
        copy_tile(v_desc, ring.v_smem, ring.v_full_bar, stage, previous, True, PAGE_SIZE)


@gluon.jit
def _partial_ptr(partials_ptr, workspace_idx, split, kv_head, cfg):
    """A split's partial result: the ``acc`` of a block's rows, their ``m``, their ``l``."""
    idx = (workspace_idx + split).to(gl.int64) * cfg.NUM_KV_HEADS + kv_head
    return partials_ptr + idx * (BLOCK_M * (cfg.HEAD_DIM + 2))


@gluon.jit
def _store_partial(partial_ptr, m, l, acc, HALF: gl.constexpr):
    HEAD_DIM: gl.constexpr = acc.shape[1]
    acc_layout: gl.constexpr = get_acc_layout(HEAD_DIM)
    offs_m = HALF * WARPGROUP_M + gl.arange(0, WARPGROUP_M, gl.SliceLayout(1, acc_layout))
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, acc_layout))
    gl.store(partial_ptr + offs_m[:, None] * HEAD_DIM + offs_d[None, :], acc)
    m_ptrs = partial_ptr + BLOCK_M * HEAD_DIM + HALF * WARPGROUP_M + gl.arange(0, WARPGROUP_M, m.type.layout)
    gl.store(m_ptrs, m)
    gl.store(m_ptrs + BLOCK_M, l)


@gluon.jit
def _query_head(work, offs_m, cfg):
    """Of rows of a request and a KV head."""
    return work.kv_head * cfg.QUERIES_PER_KV + offs_m % cfg.QUERIES_PER_KV


@gluon.jit
def _merge_rows(wg, work, merged_splits, kv_splits, row_tile):
    """Merges all splits of the rows ``row_tile`` * 4 to ``row_tile`` * 4 + 3 of a block, in ascending order, and writes
    them.

    Args:
        merged_splits: the end of the first splits, whose merged result is where the last one's would be.
    """
    cfg = wg.cfg
    HEAD_DIM: gl.constexpr = cfg.HEAD_DIM
    layout: gl.constexpr = get_partial_layout(HEAD_DIM)
    row: gl.constexpr = gl.SliceLayout(1, layout)
    offs_m = row_tile * _MERGE_M + gl.arange(0, _MERGE_M, row)
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    m = gl.full([_MERGE_M], -float("inf"), gl.float32, row)
    l = gl.full([_MERGE_M], 0.0, gl.float32, row)
    acc = gl.full([_MERGE_M, HEAD_DIM], 0.0, gl.float32, layout)
    for first in range(merged_splits - 1, kv_splits, _SPLITS_IN_FLIGHT):
        ms = ()
        ls = ()
        accs = ()
        for i in gl.static_range(_SPLITS_IN_FLIGHT):
            split = gl.minimum(first + i, kv_splits - 1)
            partial_ptr = _partial_ptr(wg.partials_ptr, work.workspace_idx, split, work.kv_head, cfg)
            m_ptrs = partial_ptr + BLOCK_M * HEAD_DIM + offs_m
            ms = ms + (gl.load(m_ptrs, cache_modifier=".cg"),)  # noqa: RUF005 [_MERGE_M]
            ls = ls + (gl.load(m_ptrs + BLOCK_M, cache_modifier=".cg"),)  # noqa: RUF005 [_MERGE_M]
            acc_ptrs = partial_ptr + offs_m[:, None] * HEAD_DIM + offs_d[None, :]
            accs = accs + (gl.load(acc_ptrs, cache_modifier=".cg"),)  # noqa: RUF005 [_MERGE_M, HEAD_DIM]
        # Or the compiler moves every load to where it is used, and one waits for the other.
        barrier()
        for i in gl.static_range(_SPLITS_IN_FLIGHT):
            exists = first + i < kv_splits
            new_m, new_l, alpha, split_alpha = merge_sums(m, l, ms[i], ls[i])
            acc = gl.where(exists, merge_acc(acc, alpha, accs[i], split_alpha), acc)
            m = gl.where(exists, new_m, m)
            l = gl.where(exists, new_l, l)
    token = (work.first_row + offs_m) // cfg.QUERIES_PER_KV
    offs = row_offsets(wg.out, work, work.first_row + offs_m, token, cfg.QUERIES_PER_KV)
    if wg.sinks_ptr is not None:
        l, alpha = sums_with_sinks(m, l, wg.sinks_ptr, _query_head(work, work.first_row + offs_m, cfg))
        acc = acc * alpha[:, None]
    result = (acc / gl.where(l == 0.0, 1.0, l)[:, None]).to(wg.out.ptr.dtype.element_ty)
    mask = elements_of(token < work.query_len, offs_d, cfg)
    gl.store(wg.out.ptr + offs[:, None] + offs_d[None, :], result, mask=mask)


@gluon.jit
def _merge_shared(wg, work, semaphore_ptr, num_splits, first_split, kv_splits):
    """A warpgroup has left ``num_splits`` splits of a block from ``work.first_split`` on, and takes part in merging
    when all ``kv_splits`` from ``first_split`` on are there.

    It waits for the others, as they end at the same time, but not for long: they may be waiting for a multiprocessor.
    The last one finds all splits, so that every row is merged.

    Args:
        semaphore_ptr: counts the splits that are there, of each warpgroup's rows, and in its upper half those that the
            first CTA merged. The next number counts shares of the rows that are taken, and in its upper half the
            splits of those who do not come back.
    """
    barrier()
    merged_splits = gl.where((work.first_split == first_split) & (wg.HALF == 0), num_splits << 16, 0)
    gl.atomic_add(semaphore_ptr, num_splits + merged_splits, sem="release")
    arrived = gl.load(semaphore_ptr, volatile=True)
    spins = gl.to_tensor(0)
    while ((arrived & 0xFFFF) < 2 * kv_splits) & (spins < wg.MAX_SPINS):
        arrived = gl.load(semaphore_ptr, volatile=True)
        spins += 1
    # The same for all threads.
    arrived = gl.atomic_add(semaphore_ptr, 0, sem="acquire")
    barrier()
    if (arrived & 0xFFFF) == 2 * kv_splits:
        rows = gl.minimum(work.query_len * wg.cfg.QUERIES_PER_KV - work.first_row, BLOCK_M)
        row_tiles = (rows + _MERGE_M - 1) // _MERGE_M
        row_tile = gl.atomic_add(semaphore_ptr + 1, 1) & 0xFFFF
        while row_tile < row_tiles:
            _merge_rows(wg, work, first_split + (arrived >> 16), first_split + kv_splits, row_tile)
            row_tile = gl.atomic_add(semaphore_ptr + 1, 1) & 0xFFFF
    if (gl.atomic_add(semaphore_ptr + 1, num_splits << 16) >> 16) + num_splits == 2 * kv_splits:
        gl.store(semaphore_ptr, 0)
        gl.store(semaphore_ptr + 1, 0)


@gluon.jit
def _start_query(wg, idx):
    """Starts the copy of a warpgroup's rows of a work item. What rows that do not exist hold is never written."""
    HEAD_DIM: gl.constexpr = wg.cfg.HEAD_DIM
    QUERIES_PER_KV: gl.constexpr = wg.cfg.QUERIES_PER_KV
    # Of a large head some rows after the other, because their results have most registers.
    ROWS: gl.constexpr = WARPGROUP_M // 4 if is_large(HEAD_DIM) else WARPGROUP_M
    layout: gl.constexpr = get_row_layout(HEAD_DIM)
    work = load_work(wg.work_ptr, idx, wg.cfg.NUM_KV_HEADS, True)
    for i in gl.static_range(WARPGROUP_M // ROWS):
        first_row = work.first_row + wg.HALF * WARPGROUP_M
        if is_large(HEAD_DIM):
            first_row += i * ROWS
        offs_m = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
        token = offs_m // QUERIES_PER_KV
        offs = row_offsets(wg.q, work, offs_m, token, QUERIES_PER_KV)
        mask = elements_of(token < work.query_len, offs_d, wg.cfg)
        q_smem = wg.q_smem.slice(i * ROWS, ROWS) if is_large(HEAD_DIM) else wg.q_smem
        copy_elements(q_smem, wg.q.ptr + offs[:, None] + offs_d[None, :], mask=mask)  # [ROWS, HEAD_DIM]
    async_copy.commit_group()


@gluon.jit
def _start_qk(q, k_smem, stage):
    """Starts the product of the rows with a tile of keys, [WARPGROUP_M, BLOCK_N]."""
    k = k_smem.index(stage).reshape([BLOCK_N, k_smem.shape[4]]).permute([1, 0])  # [HEAD_DIM, BLOCK_N]
    zeros = gl.full([WARPGROUP_M, BLOCK_N], 0.0, gl.float32, get_qk_layout())
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_l(p, alpha, l, ones):
    """Starts to add a tile's weights to those so far, as products with 1: every column is the sum. By asynchronous
    products, because others would wait for all that are under way.
    """
    layout: gl.constexpr = get_l_layout()
    p = gl.convert_layout(p, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, layout))[:, None]
    return warpgroup_mma(p, ones, l, is_async=True)


@gluon.jit
def _row_sum(l):
    """All columns are equal, so the largest is any of them."""
    return gl.convert_layout(gl.max(l, 1), gl.SliceLayout(1, get_qk_layout()))


@gluon.jit
def _masked(qk, q_pos, kv_start, WINDOW: gl.constexpr):
    """The scores of a tile, -inf for keys after a row's position and behind its window."""
    kv_pos = kv_start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, qk.type.layout))
    visible = q_pos[:, None] >= kv_pos[None, :]
    if WINDOW:
        visible = visible & (q_pos[:, None] - kv_pos[None, :] < WINDOW)
    return gl.where(visible, qk, -float("inf"))


@gluon.jit
def _clear_unseen(v, kv_start, first, end):
    """Both warpgroups write the same."""
    # Of a large head some keys after the other, because the rows' results have most registers.
    KEYS: gl.constexpr = BLOCK_N // 8 if is_large(v.shape[1]) else BLOCK_N
    for i in gl.static_range(BLOCK_N // KEYS):
        some = v.slice(i * KEYS, KEYS) if is_large(v.shape[1]) else v
        clear_unseen(some, kv_start + i * KEYS, first, end, get_row_layout(v.shape[1]))
    fence_async_shared()
    barrier()


@gluon.jit
def _softmax_step(qk, m, qk_scale_log2, dtype: gl.constexpr):
    """A step of the online softmax: the new ``m``, ``p`` and ``alpha``."""
    # In two steps, because one is a chain of as many operations as a thread has scores of a row.
    largest = gl.max(gl.max(gl.reshape(qk, [WARPGROUP_M, BLOCK_N // 8, 8]), 1), 1)
    new_m = gl.maximum(m, gl.convert_layout(largest, gl.SliceLayout(1, qk.type.layout)) * qk_scale_log2)
    p, alpha = softmax_weights(qk, m, new_m, qk_scale_log2, dtype, 0)
    return new_m, p, alpha


@gluon.jit
def _halves(acc):
    """The first and the last columns."""
    COLUMNS: gl.constexpr = acc.shape[1] // 2
    layout: gl.constexpr = get_acc_layout(COLUMNS)
    first, last = gl.permute(gl.reshape(acc, [WARPGROUP_M, 2, COLUMNS]), [0, 2, 1]).split()
    first = gl.convert_layout(first, layout, assert_trivial=True)
    return first, gl.convert_layout(last, layout, assert_trivial=True)


@gluon.jit
def _joined(first, last):
    """The inverse of ``_halves``."""
    COLUMNS: gl.constexpr = 2 * first.shape[1]
    acc = gl.reshape(gl.permute(gl.join(first, last), [0, 2, 1]), [WARPGROUP_M, COLUMNS])
    return gl.convert_layout(acc, get_acc_layout(COLUMNS), assert_trivial=True)


@gluon.jit
def _merge_columns(ptr, are_earlier, alpha, acc, split_alpha, KEEPS: gl.constexpr):
    """Some columns of ``acc`` of the merged splits at ``ptr``, zeros where none ``are_earlier``, and of one more.

    Each thread reads there what it wrote: its elements four by four, each four beside those of the next thread, as
    [COLUMNS // 16, WARPGROUP_M * 4, 4].
    """
    COLUMNS: gl.constexpr = acc.shape[1]
    acc_layout: gl.constexpr = acc.type.layout
    row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    layout: gl.constexpr = get_merged_layout(COLUMNS)
    four = gl.arange(0, COLUMNS // 16, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    thread = gl.arange(0, WARPGROUP_M * 4, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    element = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    ptrs = ptr + (four * (WARPGROUP_M * 4) + thread) * 4 + element
    earlier = gl.load(ptrs, mask=are_earlier, other=0.0, cache_modifier=".cg")
    # Or the compiler moves every load to where it is used, and one waits for the other.
    barrier()
    earlier = gl.permute(gl.reshape(earlier, [COLUMNS // 16, WARPGROUP_M, 4, 2, 2]), [1, 0, 3, 2, 4])
    earlier = gl.convert_layout(gl.reshape(earlier, [WARPGROUP_M, COLUMNS]), acc_layout, assert_trivial=True)
    alpha, split_alpha = gl.convert_layout(alpha, row), gl.convert_layout(split_alpha, row)
    acc = merge_acc(earlier, alpha, acc, split_alpha)
    if KEEPS:
        kept = gl.permute(gl.reshape(acc, [WARPGROUP_M, COLUMNS // 16, 2, 4, 2]), [1, 0, 3, 2, 4])
        kept = gl.reshape(kept, [COLUMNS // 16, WARPGROUP_M * 4, 4])
        gl.store(ptrs, gl.convert_layout(kept, layout, assert_trivial=True))
    return acc


@gluon.jit
def _merge_half(ptr, are_earlier, alpha, acc, split_alpha, KEEPS: gl.constexpr):
    """As ``_merge_columns``, in two parts."""
    first, last = _halves(acc)
    first = _merge_columns(ptr, are_earlier, alpha, first, split_alpha, KEEPS)
    ptr += WARPGROUP_M * first.shape[1]
    return _joined(first, _merge_columns(ptr, are_earlier, alpha, last, split_alpha, KEEPS))


@gluon.jit
def _merge_with_earlier(wg, are_earlier, alpha, acc, split_alpha, KEEPS: gl.constexpr):
    """``acc`` of the merged splits and one more, which takes the place of the merged ones if ``KEEPS``."""
    if is_large(acc.shape[1]):
        first, last = _halves(acc)
        first = _merge_half(wg.merged_acc, are_earlier, alpha, first, split_alpha, KEEPS)
        ptr = wg.merged_acc + WARPGROUP_M * first.shape[1]
        acc = _joined(first, _merge_half(ptr, are_earlier, alpha, last, split_alpha, KEEPS))
    else:
        layout: gl.constexpr = acc.type.layout
        row: gl.constexpr = gl.SliceLayout(1, layout)
        alpha, split_alpha = gl.convert_layout(alpha, row), gl.convert_layout(split_alpha, row)
        acc = merge_acc(wg.merged_acc.load(layout), alpha, acc, split_alpha)
        if KEEPS:
            wg.merged_acc.store(acc)
    return acc


@gluon.constexpr_function
def _reads_all_asm(REGISTERS):
    """Instructions that copy registers of weights and pretend to need all of them: bit 14 of no weight is set."""
    read = "".join(f" or.b32 bits, bits, ${REGISTERS + i};" for i in range(REGISTERS))
    copied = "".join(f" mov.b32 ${i}, ${REGISTERS + i};" for i in range(REGISTERS))
    some = "and.b32 bits, bits, 0x40004000; setp.ne.b32 any, bits, 0; @any nanosleep.u32 0;"
    return f"{{ .reg .pred any; .reg .b32 bits; mov.b32 bits, 0;{read} {some}{copied} }}"


@gluon.constexpr_function
def _reads_all_constraints(REGISTERS):
    return ",".join(["=r"] * REGISTERS + ["r"] * REGISTERS)


@gluon.jit
def _made_here(p):
    """Weights, 16 bits each and at most 1, which the compiler makes before it goes on: it likes to wait for products
    first, which are under way while it could.
    """
    REGISTERS: gl.constexpr = p.shape[0] * p.shape[1] // 256
    asm: gl.constexpr = _reads_all_asm(REGISTERS)
    constraints: gl.constexpr = _reads_all_constraints(REGISTERS)
    return gl.inline_asm_elementwise(asm, constraints, [p], p.dtype, is_pure=False, pack=2 * REGISTERS)


@gluon.jit
def _step(wg, block, position, kv_start, merged, state):
    """The values of the tile before ``kv_start``, and the weights of the tile there, which has masks if some row does
    not see all of it.
    """
    ring = wg.ring
    stage = position.stage
    phase = position.phase
    SPLIT_SEGMENTS: gl.constexpr = wg.cfg.SPLIT_SEGMENTS
    HEAD_DIM: gl.constexpr = wg.cfg.HEAD_DIM
    acc_layout: gl.constexpr = get_acc_layout(HEAD_DIM)
    m, l, acc = state.m, state.l, state.acc
    merged_m, merged_l = merged.m, merged.l
    mbarrier.wait(ring.k_full_bar.index(stage), phase)
    qk = _start_qk(block.q, ring.k_smem, stage)
    of_values = _values_position(position, wg.cfg)
    mbarrier.wait(ring.v_full_bar.index(of_values.stage), of_values.phase)
    v = ring.v_smem.index(of_values.stage).reshape([BLOCK_N, HEAD_DIM])
    if wg.cfg.WINDOW and kv_start - BLOCK_N < block.keys.first:
        _clear_unseen(v, kv_start - BLOCK_N, block.keys.first, block.keys.hi)
    # Not where alpha became known: now the tensor cores are busy.
    acc = acc * gl.convert_layout(state.alpha, gl.SliceLayout(1, acc_layout))[:, None]
    acc = warpgroup_mma(state.p, v, acc, is_async=True)
    l = _start_l(state.p, state.alpha, l, block.ones)
    qk = warpgroup_mma_wait(2, deps=(qk,))
    if is_large(HEAD_DIM):
        mbarrier.arrive(ring.empty_bar.index(stage))

    has_masks = kv_start >= block.unmasked_end
    if wg.cfg.WINDOW:
        has_masks = has_masks | (kv_start < block.unmasked_begin)
    if has_masks:
        qk = _masked(qk, block.q_pos, kv_start, wg.cfg.WINDOW)
    begins = is_end_of_split(kv_start, SPLIT_SEGMENTS)
    new_m, p, alpha = _softmax_step(qk, gl.where(begins, -float("inf"), m), wg.qk_scale_log2, state.p.dtype)
    if is_large(HEAD_DIM):
        p = _made_here(p)
    else:
        # The wait never waits, but the compiler moves nothing from before it to behind it.
        mbarrier.wait(wg.order_fence, 1)
    acc, l = warpgroup_mma_wait(0, deps=(acc, l))
    mbarrier.arrive(ring.empty_bar.index(of_values.stage))
    if begins:
        row_l = _row_sum(l)
        if block.writes_partial:
            split = split_of(kv_start - 1, SPLIT_SEGMENTS)
            partial_ptr = _partial_ptr(wg.partials_ptr, block.workspace_idx, split, block.kv_head, wg.cfg)
            _store_partial(partial_ptr, m, row_l, acc, wg.HALF)
        else:
            merged_m, merged_l, old_alpha, split_alpha = merge_sums(merged_m, merged_l, m, row_l)
            are_earlier = split_of(kv_start - 1, SPLIT_SEGMENTS) > split_of(block.keys.lo, SPLIT_SEGMENTS)
            _merge_with_earlier(wg, are_earlier, old_alpha, acc, split_alpha, True)
        acc = gl.full([WARPGROUP_M, HEAD_DIM], 0.0, gl.float32, acc_layout)
        l = gl.full([WARPGROUP_M, 8], 0.0, gl.float32, get_l_layout())
    p = gl.convert_layout(p, gl.DotOperandLayout(0, acc_layout, 2), assert_trivial=True)
    position = next_position(of_values, wg.cfg.NUM_STAGES)
    return position, Merged(merged_m, merged_l), SplitState(acc, new_m, alpha, l, p)


@gluon.jit
def _last_values(wg, block, stage, state):
    """The values of the last tile of an item: ``acc`` and row sums of its last split."""
    HEAD_DIM: gl.constexpr = wg.cfg.HEAD_DIM
    keys = block.keys
    v = wg.ring.v_smem.index(stage).reshape([BLOCK_N, HEAD_DIM])  # [BLOCK_N, HEAD_DIM]
    kv_start = (keys.hi - 1) // BLOCK_N * BLOCK_N
    if (kv_start + BLOCK_N > keys.hi) | (kv_start < keys.first):
        _clear_unseen(v, kv_start, keys.first, keys.hi)
    alpha = gl.convert_layout(state.alpha, gl.SliceLayout(1, get_acc_layout(HEAD_DIM)))
    acc = warpgroup_mma(state.p, v, state.acc * alpha[:, None], is_async=True)
    l = _start_l(state.p, state.alpha, state.l, block.ones)
    acc, l = warpgroup_mma_wait(0, deps=(acc, l))
    return acc, _row_sum(l)


@gluon.jit
def _write_out(wg, work, out_smem, m, l, acc):
    """Writes the result of a block that no other CTA shares."""
    HEAD_DIM: gl.constexpr = wg.cfg.HEAD_DIM
    row_layout: gl.constexpr = get_out_layout(HEAD_DIM)
    if wg.sinks_ptr is not None:
        rows = work.first_row + wg.HALF * WARPGROUP_M + gl.arange(0, WARPGROUP_M, l.type.layout)
        l, alpha = sums_with_sinks(m, l, wg.sinks_ptr, _query_head(work, rows, wg.cfg))
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    l = gl.convert_layout(gl.where(l == 0.0, 1.0, l), gl.SliceLayout(1, acc.type.layout))
    if not is_large(HEAD_DIM):
        barrier()
        out_smem.store((acc / l[:, None]).to(out_smem.dtype))
        barrier()
    offs_m = work.first_row + wg.HALF * WARPGROUP_M + gl.arange(0, WARPGROUP_M, gl.SliceLayout(1, row_layout))
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, row_layout))
    token = offs_m // wg.cfg.QUERIES_PER_KV
    offs = row_offsets(wg.out, work, offs_m, token, wg.cfg.QUERIES_PER_KV)
    # [WARPGROUP_M, HEAD_DIM]
    result = (acc / l[:, None]).to(wg.q_smem.dtype) if is_large(HEAD_DIM) else out_smem.load(row_layout)
    mask = elements_of(token < work.query_len, offs_d, wg.cfg)
    gl.store(wg.out.ptr + offs[:, None] + offs_d[None, :], result, mask=mask)
    if not is_large(HEAD_DIM):
        barrier()


@gluon.jit
def _consumer(wg):
    """A warpgroup: half of the rows of every block."""
    ring = wg.ring
    cfg = wg.cfg
    dtype: gl.constexpr = wg.q_smem.dtype
    HALF: gl.constexpr = wg.HALF
    HEAD_DIM: gl.constexpr = cfg.HEAD_DIM
    QUERIES_PER_KV: gl.constexpr = cfg.QUERIES_PER_KV
    SPLIT_SEGMENTS: gl.constexpr = cfg.SPLIT_SEGMENTS
    qk_layout: gl.constexpr = get_qk_layout()
    acc_layout: gl.constexpr = get_acc_layout(HEAD_DIM)
    row: gl.constexpr = gl.SliceLayout(1, qk_layout)
    ones = wg.ones_smem.permute([1, 0])
    out_smem = None
    if not is_large(HEAD_DIM):
        # The first half of the memory of merged splits.
        out_smem = reinterpret(wg.merged_acc, dtype, [2, WARPGROUP_M, HEAD_DIM], wg.q_smem.layout).index(0)
    num_items = gl.load(wg.work_count_ptr) * cfg.NUM_KV_HEADS
    num_programs = gl.num_programs(0)
    num_turns = _num_turns(num_items, num_programs)
    if num_turns > 0:
        _start_query(wg, _work_idx(0, num_programs))
    position = RingPosition(gl.to_tensor(0), gl.to_tensor(0))
    for turn in range(num_turns):
        work = load_work(wg.work_ptr, _work_idx(turn, num_programs), cfg.NUM_KV_HEADS, True)
        keys = _key_range(work, cfg)
        # The CTA that owns the first split merges its splits, and leaves the result.
        writes_partial = (work.workspace_idx >= 0) & (work.first_split > keys.first_split)
        offs_m = work.first_row + HALF * WARPGROUP_M + gl.arange(0, WARPGROUP_M, row)
        q_pos = work.context_len + offs_m // QUERIES_PER_KV
        if not cfg.CAUSAL:
            q_pos = offs_m * 0 + (keys.end - 1)
        m = gl.full([WARPGROUP_M], -float("inf"), gl.float32, row)
        merged = Merged(m, gl.full([WARPGROUP_M], 0.0, gl.float32, row))
        acc = gl.full([WARPGROUP_M, HEAD_DIM], 0.0, gl.float32, acc_layout)
        if not is_large(HEAD_DIM):
            wg.merged_acc.store(acc)
        async_copy.wait_group(0)
        if is_large(HEAD_DIM):
            fence_async_shared()
        barrier()
        q = wg.q_smem  # [WARPGROUP_M, HEAD_DIM]
        if not is_large(HEAD_DIM):
            q = wg.q_smem.load(gl.DotOperandLayout(0, qk_layout, 2))

        mbarrier.wait(ring.k_full_bar.index(position.stage), position.phase)
        qk = _start_qk(q, ring.k_smem, position.stage)
        if not is_large(HEAD_DIM):
            # Every thread has its rows, so those of the next item may come.
            barrier()
            if turn + 1 < num_turns:
                _start_query(wg, _work_idx(turn + 1, num_programs))
        qk = warpgroup_mma_wait(0, deps=(qk,))
        # The values beside these keys were the last ones of the block before.
        mbarrier.arrive(ring.empty_bar.index(position.stage))
        if is_large(HEAD_DIM) and turn > 0:
            position = next_position(position, cfg.NUM_STAGES)
        position = next_position(position, cfg.NUM_STAGES)
        # Masks change no bit of a tile that every row sees, so the first may have them in any case.
        m, p, alpha = _softmax_step(_masked(qk, q_pos, keys.lo, cfg.WINDOW), m, wg.qk_scale_log2, dtype)
        l = gl.full([WARPGROUP_M, 8], 0.0, gl.float32, get_l_layout())
        p = gl.convert_layout(p, gl.DotOperandLayout(0, acc_layout, 2), assert_trivial=True)
        state = SplitState(acc, m, alpha, l, p)

        unmasked_end = (work.context_len + work.first_row // QUERIES_PER_KV + 1) // BLOCK_N * BLOCK_N
        if not cfg.CAUSAL:
            unmasked_end = keys.end // BLOCK_N * BLOCK_N
        unmasked_begin = work.context_len + (work.first_row + BLOCK_M - 1) // QUERIES_PER_KV + 1 - cfg.WINDOW
        block = Block(
            q, ones, q_pos, keys, unmasked_begin, unmasked_end, work.kv_head, work.workspace_idx, writes_partial
        )
        for kv_start in range(keys.lo + BLOCK_N, keys.hi, BLOCK_N):
            position, merged, state = _step(wg, block, position, kv_start, merged, state)

        of_values = _values_position(position, cfg)
        mbarrier.wait(ring.v_full_bar.index(of_values.stage), of_values.phase)
        if is_large(HEAD_DIM):
            # The last scores are there, so the rows of the next item may come.
            barrier()
            if turn + 1 < num_turns:
                _start_query(wg, _work_idx(turn + 1, num_programs))
        acc, l = _last_values(wg, block, of_values.stage, state)
        if is_large(HEAD_DIM):
            mbarrier.arrive(ring.empty_bar.index(of_values.stage))
        m = state.m
        if writes_partial == 0:
            m, l, alpha, split_alpha = merge_sums(merged.m, merged.l, m, l)
            are_earlier = split_of(keys.hi - 1, SPLIT_SEGMENTS) > split_of(keys.lo, SPLIT_SEGMENTS)
            acc = _merge_with_earlier(wg, are_earlier, alpha, acc, split_alpha, False)
        if work.workspace_idx < 0:
            _write_out(wg, work, out_smem, m, l, acc)
        else:
            last_split = split_of(keys.hi - 1, SPLIT_SEGMENTS)
            partial_ptr = _partial_ptr(wg.partials_ptr, work.workspace_idx, last_split, work.kv_head, cfg)
            _store_partial(partial_ptr, m, l, acc, HALF)
            semaphore_ptr = wg.semaphores_ptr
            semaphore_ptr += (work.workspace_idx * cfg.NUM_KV_HEADS + work.kv_head) * _SEMAPHORE_INTS
            num_splits = last_split + 1 - work.first_split
            kv_splits = split_of(keys.end - 1, SPLIT_SEGMENTS) + 1 - keys.first_split
            _merge_shared(wg, work, semaphore_ptr, num_splits, keys.first_split, kv_splits)


@gluon.jit(do_not_specialize=["stride_table"])
def prefill_kernel(
    q_ptr,
    k_desc,
    v_desc,
    out_ptr,
    block_table_ptr,
    work_count_ptr,
    work_ptr,
    partials_ptr,
    semaphores_ptr,
    merged_ptr,
    sinks_ptr,
    qk_scale_log2,
    stride_table,
    stride_q_token,
    stride_q_head,
    stride_o_token,
    stride_o_head,
    NUM_KV_HEADS: gl.constexpr,
    QUERIES_PER_KV: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SPLIT_SEGMENTS: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    MAX_SPINS: gl.constexpr,
    CONSUMER_MAXNREG: gl.constexpr,
    WINDOW: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Works on every item of ``work_ptr`` and every KV head.

    Args:
        partials_ptr: room for the splits of shared blocks.
        semaphores_ptr: for each index of the workspace and KV head, as in ``_merge_shared``; 0 before and after.
        merged_ptr: [CTAs, BLOCK_M, HEAD_DIM] fp32, room for the merged splits of large heads; None for others.
        sinks_ptr: [query heads], as a model has them, or None.
        qk_scale_log2: of the scores, times log2(e).
        HEAD_SIZE, HEAD_DIM, PAGE_SIZE, CAUSAL: as in :class:`.common.Config`.
        NUM_STAGES: tiles in each ring, or in the one of large heads.
        MAX_SPINS: how often a CTA looks whether the others are there before it leaves the merging to them.
        CONSUMER_MAXNREG: of a thread of the second warpgroup; what is left goes to the first.
        WINDOW: keys that a token sees, its own among them, that of the plan; 0: all.
    """
    dtype: gl.constexpr = k_desc.dtype
    tile_layout: gl.constexpr = k_desc.layout
    q_layout: gl.constexpr = gl.NVMMASharedLayout(tile_layout.swizzle_byte_width, 16, 2)
    k_smem = gl.allocate_shared_memory(dtype, [NUM_STAGES, 1, 1, BLOCK_N, HEAD_DIM], tile_layout)
    v_smem = k_smem
    if not is_large(HEAD_DIM):
        v_smem = gl.allocate_shared_memory(dtype, [NUM_STAGES, 1, 1, BLOCK_N, HEAD_DIM], tile_layout)
    q_smem = gl.allocate_shared_memory(dtype, [WARPGROUP_M, HEAD_DIM], q_layout)
    other_q_smem = gl.allocate_shared_memory(dtype, [WARPGROUP_M, HEAD_DIM], q_layout)
    if is_large(HEAD_DIM):
        merged_acc = merged_ptr + gl.program_id(0) * (BLOCK_M * HEAD_DIM)
        other_merged_acc = merged_acc + WARPGROUP_M * HEAD_DIM
    else:
        acc_layout: gl.constexpr = get_acc_smem_layout(HEAD_DIM)
        merged_acc = gl.allocate_shared_memory(gl.float32, [WARPGROUP_M, HEAD_DIM], acc_layout)
        other_merged_acc = gl.allocate_shared_memory(gl.float32, [WARPGROUP_M, HEAD_DIM], acc_layout)
    ones = gl.full([8, BLOCK_N], 1.0, dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    ones_smem = gl.allocate_shared_memory(dtype, [8, BLOCK_N], gl.NVMMASharedLayout(128, 16, 2), ones)
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    k_full_bar = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], bar_layout)
    v_full_bar = k_full_bar
    if not is_large(HEAD_DIM):
        v_full_bar = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], bar_layout)
    empty_bar = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], bar_layout)
    order_fence = gl.allocate_shared_memory(gl.int64, [1], bar_layout)
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(k_full_bar.index(stage), count=1)
        if not is_large(HEAD_DIM):
            mbarrier.init(v_full_bar.index(stage), count=1)
        mbarrier.init(empty_bar.index(stage), count=2)
    mbarrier.init(order_fence, count=1)
    fence_async_shared()
    barrier()
    if not is_large(HEAD_DIM):
        # No values come with the first keys.
        mbarrier.arrive(v_full_bar.index(0))

    cfg = Config(
        NUM_KV_HEADS, QUERIES_PER_KV, HEAD_SIZE, HEAD_DIM, PAGE_SIZE, SPLIT_SEGMENTS, NUM_STAGES, False, WINDOW, CAUSAL
    )
    ring = Ring(k_smem, v_smem, k_full_bar, v_full_bar, empty_bar)
    q = Rows(q_ptr, gl.to_tensor(stride_q_token), gl.to_tensor(stride_q_head))
    out = Rows(out_ptr, gl.to_tensor(stride_o_token), gl.to_tensor(stride_o_head))
    first = Warpgroup(
        q, out, work_count_ptr, work_ptr, partials_ptr, semaphores_ptr, sinks_ptr, qk_scale_log2, q_smem, merged_acc,
        ones_smem, ring, order_fence, cfg, MAX_SPINS, 0,
    )  # fmt: skip
    second = Warpgroup(
        q, out, work_count_ptr, work_ptr, partials_ptr, semaphores_ptr, sinks_ptr, qk_scale_log2, other_q_smem,
        other_merged_acc, ones_smem, ring, order_fence, cfg, MAX_SPINS, 1,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consumer, (first,)),
            (_consumer, (second,)),
            (_producer, (k_desc, v_desc, block_table_ptr, stride_table, work_count_ptr, work_ptr, ring, cfg)),
        ],
        [4, 1],
        [CONSUMER_MAXNREG, 24],
    )
