"""Decode attention for Hopper in Gluon: requests of few rows, with the bits of ``triton_kernels.attention_kernel``.

A tile of 64 keys is a step of the online softmax of its split, with ``qk = k @ q.T`` and ``scale`` in units of
log2(e); rows are columns here::

    m' = max(m, max(qk) * scale)    p = exp2(qk * scale - m')    alpha = exp2(m - m')
    l' = l * alpha + sum(p)    acc' = acc * alpha + v.T @ p

Splits merge as in :mod:`.merge`, and ``out = acc / l``. Keys and values may be codes in e4m3 (:mod:`.codes`), each with
a scale, of all heads or of each: that of keys is a part of ``scale``, and that of values is multiplied in at the end.

A CTA has a share of the line of work that ``plan_kernels`` describes. One warp copies tiles of keys and values into a
ring in shared memory by the tensor memory accelerator, across the ends of splits and heads, so that memory stays busy
while a head ends and the next one begins; a warpgroup takes the tiles from there. It multiplies them with keys and
dimensions on the long side of the tensor cores' instruction and the few rows on the short one.

Splits merge in ascending order, whichever CTA merges them. CTAs that share a head keep a semaphore of it: how many of
its splits are done, and how many from split 0 on are merged into one result. The CTA that owns split 0 merges, and one
that finds all splits before its own merged goes on from there. As a CTA begins with the end of its share and a head's
beginning is there, this is what mostly happens. Otherwise a CTA leaves its splits among the partial results, and the
last one to arrive merges them before it ends.

A launch may begin while the kernel before ends, and lets the next one begin, which has weights to load meanwhile.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...common.gluon_names import barrier
from ...common.triton_names import aggregate, value
from ...quantise.triton_kernels import OutCodes
from ..work import Work
from . import codes
from .common import (
    BLOCK_N,
    Config,
    KeyRange,
    Output,
    Ring,
    RingPosition,
    Rows,
    SoftmaxState,
    TileAddress,
    clear_unseen,
    copy_tile,
    get_row_layout,
    is_end_of_split,
    key_range,
    load_pages,
    load_work,
    merge_sums,
    next_position,
    row_offsets,
    softmax_weights,
    split_of,
    sums_with_sinks,
    write_rows,
)
from .merge import Head, Partials, allocate_ml, get_partial_layout, merge_partials


@aggregate
class Warpgroup:
    """What the warpgroup that multiplies works with."""

    q: Rows
    out: Output
    work_indptr_ptr: gl.tensor
    work_ptr: gl.tensor
    partials: Partials
    semaphores_ptr: gl.tensor
    qk_scale_log2: gl.tensor
    """Without that of codes."""
    k_scale_ptr: value
    """Of codes, or None."""
    v_scale_ptr: value
    stride_scale: gl.tensor
    """From that of a KV head to the next."""
    sinks_ptr: value
    """Of each query head, or None."""
    q_smem: gl.shared_memory_descriptor
    """[BLOCK_M, HEAD_DIM]"""
    p_smem: gl.shared_memory_descriptor
    """[BLOCK_M, BLOCK_N]"""
    ml_smem: gl.shared_memory_descriptor
    """Of ``allocate_ml``."""
    ring: Ring
    cfg: Config
    OVERLAPS: gl.constexpr


@aggregate
class Block:
    """The rows of a work item."""

    work: Work
    q_pos: gl.tensor
    """[BLOCK_M]"""
    keys: KeyRange
    semaphore_ptr: gl.tensor
    offs_partial: gl.tensor
    """[BLOCK_M] int64, of split 0 in the room for partial results."""
    mask: gl.tensor
    """[BLOCK_M], the rows that have partial results."""
    offs_d: gl.tensor
    """[HEAD_DIM]"""
    qk_scale_log2: gl.tensor


@gluon.constexpr_function
def _get_layout(BLOCK_M):
    """Of scores, weights and values alike: keys or dimensions along a warpgroup, and the rows of a block across it."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])


@gluon.constexpr_function
def get_block_m(PARTIAL_BLOCK):
    """Rows that are multiplied: the tensor cores take 8 and more."""
    return max(PARTIAL_BLOCK, 8)


@gluon.jit
def _key_range(work, cfg):
    """Of a work item, which may have no keys."""
    keys = key_range(work, 0, work.query_len - 1, cfg)
    return KeyRange(keys.lo, gl.where(work.num_splits > 0, keys.hi, keys.lo), keys.first, keys.first_split, keys.end)


@gluon.jit
def _producer(
    k_desc, v_desc, block_table_ptr, stride_table, work_indptr_ptr, work_ptr, ring, cfg, OVERLAPS: gl.constexpr
):
    """Keeps the ring full. The last work item comes first."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    PAGE_SIZE: gl.constexpr = cfg.PAGE_SIZE
    program = gl.program_id(0)
    position = RingPosition(gl.to_tensor(0), gl.to_tensor(1))
    first_idx = gl.load(work_indptr_ptr + program)
    num_items = gl.load(work_indptr_ptr + program + 1) - first_idx
    for i in range(num_items):
        work = load_work(work_ptr, first_idx + num_items - 1 - i, cfg.NUM_KV_HEADS, False)
        table_ptr = block_table_ptr + work.request * stride_table
        keys = _key_range(work, cfg)
        pages = load_pages(table_ptr, keys.lo, keys, cfg)
        for kv_start in range(keys.lo, keys.hi, BLOCK_N):
            # A tile ahead, as they decide what is copied.
            next_pages = load_pages(table_ptr, kv_start + BLOCK_N, keys, cfg)
            page_offset = kv_start % PAGE_SIZE if PAGE_SIZE > BLOCK_N else kv_start * 0
            tile = TileAddress(work.kv_head, page_offset, pages)
            stage = position.stage
            mbarrier.wait(ring.empty_bar.index(stage), position.phase)
            copy_tile(k_desc, ring.k_smem, ring.k_full_bar, stage, tile, True, PAGE_SIZE)
            copy_tile(v_desc, ring.v_smem, ring.v_full_bar, stage, tile, True, PAGE_SIZE)
            position = next_position(position, cfg.NUM_STAGES)
            pages = next_pages


@gluon.jit
def _load_query(wg, idx):
    """[BLOCK_M, HEAD_DIM], 0 where there are fewer rows."""
    HEAD_DIM: gl.constexpr = wg.cfg.HEAD_DIM
    QUERIES_PER_KV: gl.constexpr = wg.cfg.QUERIES_PER_KV
    layout: gl.constexpr = get_row_layout(HEAD_DIM)
    work = load_work(wg.work_ptr, idx, wg.cfg.NUM_KV_HEADS, False)
    offs_m = gl.arange(0, wg.q_smem.shape[0], gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    token = offs_m // QUERIES_PER_KV
    offs = row_offsets(wg.q, work, offs_m, token, QUERIES_PER_KV)[:, None] + offs_d[None, :]
    return gl.load(wg.q.ptr + offs, mask=(token < work.query_len)[:, None], other=0.0)


@gluon.jit
def _start_qk(ring, stage, q_smem, HOLDS_CODES: gl.constexpr):
    """Starts the product of a tile of keys with the rows, [BLOCK_N, BLOCK_M]."""
    BLOCK_M: gl.constexpr = q_smem.shape[0]
    layout: gl.constexpr = _get_layout(BLOCK_M)
    if HOLDS_CODES:
        k = codes.load_keys(ring.k_smem, stage, layout, q_smem.dtype)
    else:
        k = ring.k_smem.index(stage).reshape([BLOCK_N, q_smem.shape[1]])  # [BLOCK_N, HEAD_DIM]
    zeros = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, layout)
    return warpgroup_mma(k, q_smem.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _values(wg, stage, kv_start, keys):
    """A tile of values, [HEAD_DIM, BLOCK_N]."""
    v_smem = wg.ring.v_smem
    HEAD_DIM: gl.constexpr = wg.cfg.HEAD_DIM
    row_layout: gl.constexpr = get_row_layout(HEAD_DIM)
    if wg.cfg.HOLDS_CODES:
        v = codes.load_values(v_smem, stage, _get_layout(wg.q_smem.shape[0]), wg.q_smem.dtype)
    else:
        v = v_smem.index(stage).reshape([BLOCK_N, HEAD_DIM])  # [BLOCK_N, HEAD_DIM]
        has_unseen = kv_start + BLOCK_N > keys.end
        if wg.cfg.WINDOW:
            has_unseen = has_unseen | (kv_start < keys.first)
        if has_unseen:
            clear_unseen(v, kv_start, keys.first, keys.end, row_layout)
        v = v.permute([1, 0])
    return v


@gluon.jit
def _softmax_step(qk, m, q_pos, kv_start, qk_scale_log2, WINDOW: gl.constexpr):
    """A step of the online softmax: the new ``m``, ``p`` in fp32, and ``alpha``."""
    kv_pos = kv_start + gl.arange(0, BLOCK_N, gl.SliceLayout(1, qk.type.layout))
    visible = kv_pos[:, None] <= q_pos[None, :]
    if WINDOW:
        visible = visible & (q_pos[None, :] - kv_pos[:, None] < WINDOW)
    qk = gl.where(visible, qk, -float("inf"))
    new_m = gl.maximum(m, gl.max(qk, 0) * qk_scale_log2)
    p, alpha = softmax_weights(qk, m, new_m, qk_scale_log2, gl.float32, 1)
    return new_m, p, alpha


@gluon.jit
def _merge_split(state, split_m, split_l, split_acc):
    """The splits so far and one more split; ``acc`` is [HEAD_DIM, BLOCK_M]."""
    m, l, alpha, split_alpha = merge_sums(state.m, state.l, split_m, split_l)
    split_acc, alpha = gl.broadcast(split_acc, alpha[None, :])
    return SoftmaxState(m, l, gl.fma(state.acc, alpha, split_acc * split_alpha[None, :]))


@gluon.jit
def _store_partial(wg, block, split, m, l, acc):
    """Leaves a result at the place of a split among the partial ones."""
    partials = wg.partials
    offs = block.offs_partial + split * (wg.cfg.NUM_KV_HEADS * partials.ROWS)
    gl.store(partials.m_ptr + offs, m, mask=block.mask)
    gl.store(partials.l_ptr + offs, l, mask=block.mask)
    acc_ptrs = partials.acc_ptr + offs[None, :] * wg.cfg.HEAD_DIM + block.offs_d[:, None]
    gl.store(acc_ptrs, acc, mask=block.mask[None, :])


@gluon.jit
def _load_partial(wg, block, split):
    partials = wg.partials
    mask = block.mask
    offs = block.offs_partial + split * (wg.cfg.NUM_KV_HEADS * partials.ROWS)
    offs_acc = offs[None, :] * wg.cfg.HEAD_DIM + block.offs_d[:, None]
    m = gl.load(partials.m_ptr + offs, mask, -float("inf"), cache_modifier=".cg")  # [BLOCK_M]
    l = gl.load(partials.l_ptr + offs, mask, 0.0, cache_modifier=".cg")  # [BLOCK_M]
    acc = gl.load(partials.acc_ptr + offs_acc, mask[None, :], 0.0, cache_modifier=".cg")  # [HEAD_DIM, BLOCK_M]
    return SoftmaxState(m, l, acc)


@gluon.jit
def _merged_before(wg, block, merged):
    """Whether all splits before the item's are merged, and their result, which is else ``merged``."""
    split = block.work.first_split
    merges = gl.atomic_add(block.semaphore_ptr, 0, sem="acquire") >> 16 == split - block.keys.first_split
    if merges:
        barrier()
        merged = _load_partial(wg, block, split - 1)
    return merges, merged


@gluon.jit
def _leave(wg, block, split, merges, merged):
    """Leaves the item, whose splits are done up to ``split``, to the others of its head.

    Returns:
        what the semaphore was before, and how many splits more are merged.
    """
    num_splits = block.work.num_splits
    if merges:
        _store_partial(wg, block, split - 1, merged.m, merged.l, merged.acc)
    barrier()
    more_merged = gl.where(merges, num_splits, 0)
    return gl.atomic_add(block.semaphore_ptr, num_splits + (more_merged << 16), sem="acq_rel"), more_merged


@gluon.jit
def _step(wg, block, position, kv_start, qk, state, ones):
    """The split so far and the tile at ``kv_start``, whose scores are ``qk``, and the next tile's scores."""
    ring = wg.ring
    stage = position.stage
    # The next tile's scores while this tile's weights are computed; after the last tile its own again.
    after = next_position(position, wg.cfg.NUM_STAGES)
    is_last = kv_start + BLOCK_N >= block.keys.hi
    next_stage, next_phase = gl.where(is_last, stage, after.stage), gl.where(is_last, position.phase, after.phase)
    mbarrier.wait(ring.k_full_bar.index(next_stage), next_phase)
    next_qk = _start_qk(ring, next_stage, wg.q_smem, wg.cfg.HOLDS_CODES)
    m, p, alpha = _softmax_step(qk, state.m, block.q_pos, kv_start, block.qk_scale_log2, wg.cfg.WINDOW)
    wg.p_smem.store(gl.permute(p.to(wg.p_smem.dtype), (1, 0)))
    v = _values(wg, stage, kv_start, block.keys)
    fence_async_shared()
    barrier()
    l = warpgroup_mma(ones, wg.p_smem.permute([1, 0]), state.l * alpha[None, :], is_async=True)
    acc = warpgroup_mma(v, wg.p_smem.permute([1, 0]), state.acc * alpha[None, :], is_async=True)
    l, acc, qk = warpgroup_mma_wait(0, deps=(l, acc, next_qk))
    mbarrier.arrive(ring.empty_bar.index(stage))
    return after, SoftmaxState(m, l, acc), qk


@gluon.jit
def _qk_scale_log2(wg, kv_head):
    """Of the scores of a KV head, with the scale of its keys."""
    qk_scale_log2 = wg.qk_scale_log2
    if wg.cfg.HOLDS_CODES:
        # Read here and no constant: weights that are replaced bring others, and a CUDA graph stays.
        qk_scale_log2 = qk_scale_log2 * gl.load(wg.k_scale_ptr + kv_head * wg.stride_scale)
    return qk_scale_log2


@gluon.jit
def _v_scale(wg, kv_head):
    """Of the values of a KV head; 1 where they are no codes."""
    v_scale = gl.to_tensor(1.0)
    if wg.cfg.HOLDS_CODES:
        v_scale = gl.load(wg.v_scale_ptr + kv_head * wg.stride_scale)
    return v_scale


@gluon.jit
def _write_out(wg, work, merged, offs_m, offs_d, layout: gl.constexpr):
    """Writes the result of a head whose splits are all merged; the offsets are for ``layout``."""
    QUERIES_PER_KV: gl.constexpr = wg.cfg.QUERIES_PER_KV
    l, acc = merged.l, merged.acc
    if wg.sinks_ptr is not None:
        row = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        l, alpha = sums_with_sinks(merged.m, l, wg.sinks_ptr, work.kv_head * QUERIES_PER_KV + row % QUERIES_PER_KV)
        acc = acc * alpha[None, :]
    result = acc / gl.where(l == 0.0, 1.0, l)[None, :]
    result = gl.permute((result * _v_scale(wg, work.kv_head)).to(wg.q_smem.dtype), (1, 0))
    if wg.cfg.HOLDS_CODES:
        result = codes.in_order(result)
    result = gl.convert_layout(result, layout)
    mask = (offs_m < wg.partials.ROWS) & (offs_m // QUERIES_PER_KV < work.query_len)
    write_rows(wg.out, work, result, offs_m, offs_d, mask, wg.cfg)


@gluon.jit
def _merge_pending(wg, idx, merged_splits):
    """Merges the splits of the head of work item ``idx``, all of which are done."""
    work = load_work(wg.work_ptr, idx, wg.cfg.NUM_KV_HEADS, False)
    keys = _key_range(work, wg.cfg)
    kv_splits = split_of(keys.end - 1, wg.cfg.SPLIT_SEGMENTS) + 1
    offs = (work.workspace_idx.to(gl.int64) * wg.cfg.NUM_KV_HEADS + work.kv_head) * wg.partials.ROWS
    head = Head(work, kv_splits, offs, _v_scale(wg, work.kv_head), keys.first_split)
    merged_end = keys.first_split + merged_splits
    merge_partials(wg.out, wg.partials, wg.ring, wg.ml_smem, head, merged_end, wg.sinks_ptr, wg.cfg)


@gluon.jit
def _consumer(wg):
    """Attends, splits in ascending order, the last work item first."""
    if wg.OVERLAPS:
        gdc_wait()
    ring = wg.ring
    dtype: gl.constexpr = wg.q_smem.dtype
    NUM_KV_HEADS: gl.constexpr = wg.cfg.NUM_KV_HEADS
    HEAD_DIM: gl.constexpr = wg.cfg.HEAD_DIM
    SPLIT_SEGMENTS: gl.constexpr = wg.cfg.SPLIT_SEGMENTS
    PARTIAL_ROWS: gl.constexpr = wg.partials.ROWS
    BLOCK_M: gl.constexpr = get_block_m(wg.partials.BLOCK)
    layout: gl.constexpr = _get_layout(BLOCK_M)
    row: gl.constexpr = gl.SliceLayout(0, layout)
    ones = gl.full([BLOCK_N, BLOCK_N], 1.0, dtype, gl.DotOperandLayout(0, layout, 2))
    offs_m = gl.arange(0, BLOCK_M, row)
    token = offs_m // wg.cfg.QUERIES_PER_KV
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(1, layout))
    if wg.cfg.HOLDS_CODES:
        offs_d = codes.elements_by_halves(offs_d)
    no_m = gl.full([BLOCK_M], -float("inf"), gl.float32, row)
    no_l = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, layout)
    no_acc = gl.full([HEAD_DIM, BLOCK_M], 0.0, gl.float32, layout)
    out_layout: gl.constexpr = get_partial_layout(HEAD_DIM)
    out_offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, out_layout))
    out_offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, out_layout))

    program = gl.program_id(0)
    first_idx = gl.load(wg.work_indptr_ptr + program)
    num_items = gl.load(wg.work_indptr_ptr + program + 1) - first_idx
    next_q = gl.full([BLOCK_M, HEAD_DIM], 0.0, dtype, get_row_layout(HEAD_DIM))
    if num_items > 0:
        next_q = _load_query(wg, first_idx + num_items - 1)
    position = RingPosition(gl.to_tensor(0), gl.to_tensor(0))
    # Work items whose heads are left to merge, at most the first and the last of a share, and what is merged of them.
    pending, pending_merged = gl.to_tensor(-1), gl.to_tensor(0)
    pending_before, pending_before_merged = gl.to_tensor(-1), gl.to_tensor(0)
    for i in range(num_items):
        idx = first_idx + num_items - 1 - i
        work = load_work(wg.work_ptr, idx, NUM_KV_HEADS, False)
        split = work.first_split
        q_pos = work.context_len + token
        keys = _key_range(work, wg.cfg)
        if wg.cfg.HOLDS_CODES:
            next_q = gl.convert_layout(codes.by_halves(next_q), get_row_layout(HEAD_DIM))
        wg.q_smem.store(next_q)
        fence_async_shared()
        barrier()
        next_q = _load_query(wg, gl.maximum(idx - 1, first_idx))

        state = SoftmaxState(no_m, no_l, no_acc)
        merged = SoftmaxState(no_m, gl.full([BLOCK_M], 0.0, gl.float32, row), no_acc)
        mask = (offs_m < PARTIAL_ROWS) & (token < work.query_len)
        workspace_idx = gl.maximum(work.workspace_idx, 0)
        offs_partial = (workspace_idx.to(gl.int64) * NUM_KV_HEADS + work.kv_head) * PARTIAL_ROWS + offs_m
        semaphore_ptr = wg.semaphores_ptr + workspace_idx * NUM_KV_HEADS + work.kv_head
        qk_scale_log2 = _qk_scale_log2(wg, work.kv_head)
        block = Block(work, q_pos, keys, semaphore_ptr, offs_partial, mask, offs_d, qk_scale_log2)
        merges = split == keys.first_split
        # All CTAs begin at the same time, so nothing can be merged before their first items.
        if (i > 0) & (work.workspace_idx >= 0) & (split > keys.first_split) & (work.num_splits > 0):
            merges, merged = _merged_before(wg, block, merged)
        qk = no_l
        if keys.lo < keys.hi:
            mbarrier.wait(ring.k_full_bar.index(position.stage), position.phase)
            qk = warpgroup_mma_wait(0, deps=(_start_qk(ring, position.stage, wg.q_smem, wg.cfg.HOLDS_CODES),))
        for kv_start in range(keys.lo, keys.hi, BLOCK_N):
            position, state, qk = _step(wg, block, position, kv_start, qk, state, ones)
            if is_end_of_split(kv_start + BLOCK_N, SPLIT_SEGMENTS) | (kv_start + BLOCK_N >= keys.hi):
                # All are equal, so the largest is any of them.
                row_l = gl.max(state.l, 0)
                if merges:
                    merged = _merge_split(merged, state.m, row_l, state.acc)
                else:
                    _store_partial(wg, block, split, state.m, row_l, state.acc)
                split += 1
                state = SoftmaxState(no_m, no_l, no_acc)

        if work.num_splits > 0:
            kv_splits = split_of(keys.end - 1, SPLIT_SEGMENTS) + 1
            if merges & (split == kv_splits):
                _write_out(wg, work, merged, out_offs_m, out_offs_d, out_layout)
                if work.workspace_idx >= 0:
                    gl.store(semaphore_ptr, 0)
            else:
                before, more_merged = _leave(wg, block, split, merges, merged)
                if (before & 0xFFFF) == kv_splits - keys.first_split - work.num_splits:
                    gl.store(semaphore_ptr, 0)
                    pending_before, pending_before_merged = pending, pending_merged
                    pending, pending_merged = idx, (before >> 16) + more_merged
    for _ in range(2):
        if pending >= 0:
            _merge_pending(wg, pending, pending_merged)
        pending, pending_merged = pending_before, pending_before_merged
        pending_before = gl.to_tensor(-1)


@gluon.jit(do_not_specialize=["stride_scale", "stride_table", "code_scale_rows"])
def decode_kernel(
    q_ptr,
    k_desc,
    v_desc,
    out_ptr,
    block_table_ptr,
    work_indptr_ptr,
    work_ptr,
    partial_m_ptr,
    partial_l_ptr,
    partial_acc_ptr,
    semaphores_ptr,
    k_scale_ptr,
    v_scale_ptr,
    stride_scale,
    sinks_ptr,
    qk_scale_log2,
    stride_table,
    stride_q_token,
    stride_q_head,
    stride_o_token,
    stride_o_head,
    codes_ptr,
    code_scale_ptr,
    code_scale_rows,
    NUM_KV_HEADS: gl.constexpr,
    QUERIES_PER_KV: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SPLIT_SEGMENTS: gl.constexpr,
    PARTIAL_ROWS: gl.constexpr,
    PARTIAL_BLOCK: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    GROUP: gl.constexpr,
    QUANTISE: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """Works on the items of its CTA's share of ``work_ptr``.

    Args:
        semaphores_ptr: of each head that is shared: the number of its splits that are done, and that of those merged
            into one result in the upper 16 bits; 0 between launches.
        k_desc, v_desc: [pages, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM], in the query's dtype, or codes: uint8.
        k_scale_ptr, v_scale_ptr: of codes, fp32, of each KV head, ``stride_scale`` apart; else None.
        sinks_ptr: [query heads], as a model has them, or None.
        qk_scale_log2: of the scores, times log2(e).
        PARTIAL_ROWS: rows of a block that have partial results; ``PARTIAL_BLOCK`` is the next power of two.
        NUM_STAGES: tiles in the ring.
        WINDOW: keys that a token sees, its own among them, that of the plan; 0: all.
        codes_ptr, code_scale_ptr, code_scale_rows, GROUP, QUANTISE: of
            :func:`...quantise.triton_kernels.store_codes`, of rows of all heads of a token; None: no codes are written.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    tile_layout: gl.constexpr = k_desc.layout
    BLOCK_M: gl.constexpr = get_block_m(PARTIAL_BLOCK)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [NUM_STAGES, 1, 1, BLOCK_N, HEAD_DIM], tile_layout)
    v_smem = gl.allocate_shared_memory(k_desc.dtype, [NUM_STAGES, 1, 1, BLOCK_N, HEAD_DIM], tile_layout)
    q_layout: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * HEAD_DIM), 16, 2)
    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, HEAD_DIM], q_layout)
    p_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], gl.NVMMASharedLayout(128, 16, 2))
    HOLDS_CODES: gl.constexpr = k_scale_ptr is not None
    cfg = Config(
        NUM_KV_HEADS,
        QUERIES_PER_KV,
        HEAD_DIM,
        HEAD_DIM,
        PAGE_SIZE,
        SPLIT_SEGMENTS,
        NUM_STAGES,
        HOLDS_CODES,
        WINDOW,
        True,
    )
    ml_smem = allocate_ml(PARTIAL_BLOCK, cfg)
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    full_bar = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], bar_layout)
    empty_bar = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], bar_layout)
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full_bar.index(stage), count=2)
        mbarrier.init(empty_bar.index(stage), count=1)
    fence_async_shared()
    barrier()
    ring = Ring(k_smem, v_smem, full_bar, full_bar, empty_bar)
    out = Rows(out_ptr, gl.to_tensor(stride_o_token), gl.to_tensor(stride_o_head))
    out_codes = OutCodes(codes_ptr, code_scale_ptr, gl.to_tensor(code_scale_rows), GROUP, QUANTISE)
    warpgroup = Warpgroup(
        Rows(q_ptr, gl.to_tensor(stride_q_token), gl.to_tensor(stride_q_head)),
        Output(out, QUANTISE is not None, out_codes),
        work_indptr_ptr,
        work_ptr,
        Partials(partial_m_ptr, partial_l_ptr, partial_acc_ptr, PARTIAL_ROWS, PARTIAL_BLOCK),
        semaphores_ptr,
        gl.to_tensor(qk_scale_log2),
        k_scale_ptr,
        v_scale_ptr,
        gl.to_tensor(stride_scale),
        sinks_ptr,
        q_smem,
        p_smem,
        ml_smem,
        ring,
        cfg,
        OVERLAPS,
    )
    gl.warp_specialize(
        [
            (_consumer, (warpgroup,)),
            (
                _producer,
                (k_desc, v_desc, block_table_ptr, stride_table, work_indptr_ptr, work_ptr, ring, cfg, OVERLAPS),
            ),
        ],
        [1],
        [24],
    )
