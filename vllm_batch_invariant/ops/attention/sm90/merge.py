"""Merging a head's partial results on Hopper, in Gluon: the whole ring of tiles holds copies that are on their way.

Splits are merged in ascending order, each with its row maximum ``m_i``, row sum ``l_i`` and weighted values ``acc_i``::

    m' = max(m, m_i)    alpha = exp2(m - m')    beta = exp2(m_i - m')
    l' = l * alpha + l_i * beta    acc' = acc * alpha + acc_i * beta    out = acc / l * v_scale

One CTA reads all partial results of a head, in ascending order, and a CTA alone is fast only if it has asked
for many of them before the first one arrives: a multiprocessor reads about 64 bytes a cycle, after hundreds of cycles.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ...common.gluon_names import barrier, copy_elements, reinterpret
from ...common.triton_names import aggregate
from ..work import Work
from . import shapes
from .common import SoftmaxState, merge_split, sums_with_sinks, write_rows

_MAX_HALF_BATCH = 8
"""Splits in half a batch, whose merging is unrolled."""


@aggregate
class Partials:
    """Room for partial results, each of ROWS rows; BLOCK is the next power of two."""

    m_ptr: gl.tensor
    """[workspace, NUM_KV_HEADS, ROWS]"""
    l_ptr: gl.tensor
    """The same."""
    acc_ptr: gl.tensor
    """[workspace, NUM_KV_HEADS, ROWS, HEAD_DIM]"""
    ROWS: gl.constexpr
    BLOCK: gl.constexpr


@aggregate
class Head:
    """A request's rows of a KV head, whose splits are shared."""

    work: Work
    kv_splits: gl.tensor
    """The end of the splits of its keys."""
    offs_partial: gl.tensor
    """Of the first row of split 0 in the room for partial results, int64."""
    v_scale: gl.tensor
    """Of the values; 1 where they are no codes."""
    first_split: gl.tensor
    """The first that some row sees."""


@aggregate
class HalfBatch:
    """Shared memory for half of each batch of splits, seen as batches and as splits."""

    acc_batches: gl.shared_memory_descriptor
    """[batches, splits of a half, BLOCK, HEAD_DIM]"""
    acc_splits: gl.shared_memory_descriptor
    """[batches * splits of a half, BLOCK, HEAD_DIM]"""
    ml_batches: gl.shared_memory_descriptor
    """[NUM_STAGES * 4, splits of a half, BLOCK]: as of ``allocate_ml``."""
    ml_splits: gl.shared_memory_descriptor
    """[NUM_STAGES * 4 * splits of a half, BLOCK]"""
    HALF: gl.constexpr
    """0 for the earlier splits of a batch, 1 for the later ones."""
    SPLITS: gl.constexpr
    """Of a half."""
    ROOMS: gl.constexpr
    """From half a batch to the next."""


@gluon.constexpr_function
def get_partial_layout(HEAD_DIM):
    """Whole rows of fp32 for each warp, so that what a row has one of is in a register of each thread."""
    return gl.BlockedLayout([1, HEAD_DIM // 32], [1, 32], [4, 1], [1, 0])


@gluon.constexpr_function
def _get_copy_layout(HEAD_DIM):
    """The same for several splits at once."""
    return gl.BlockedLayout([1, 1, HEAD_DIM // 32], [1, 1, 32], [1, 4, 1], [2, 1, 0])


@gluon.constexpr_function
def _get_ml_layout(BLOCK):
    """Of the maxima and sums of some splits: every warp has all."""
    return gl.BlockedLayout([1, 1], [32 // BLOCK, BLOCK], [4, 1], [1, 0])


@gluon.constexpr_function
def _half_batch(BLOCK, HOLDS_CODES):
    """Splits whose partial results are put where a tile of keys was; a power of two."""
    return min(shapes.BLOCK_N // (4 if HOLDS_CODES else 2) // BLOCK, _MAX_HALF_BATCH)


@gluon.constexpr_function
def _half_batches(BLOCK, HOLDS_CODES):
    """How many half batches have room where a tile of keys was; only the first of these rooms is used."""
    return shapes.BLOCK_N // (4 if HOLDS_CODES else 2) // BLOCK // _half_batch(BLOCK, HOLDS_CODES)


@gluon.constexpr_function
def _plain(rank):
    """Shared memory without swizzling."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank - 1, -1, -1)))


@gluon.jit
def allocate_ml(BLOCK: gl.constexpr, cfg):
    """Maxima and sums of what the rings hold, fp32: of every batch those maxima and those sums of its early half, then
    those of its late half.
    """
    halves: gl.constexpr = cfg.NUM_STAGES * 4 * _half_batch(BLOCK, cfg.HOLDS_CODES)
    return gl.allocate_shared_memory(gl.float32, [halves, BLOCK], _plain(1))


@gluon.jit
def _start_copies(to, stage, partials, head, first_split, cfg):
    """Starts the copies of half a batch to its room ``stage``, from ``first_split`` on; nothing is read for splits that
    there are not.
    """
    ROWS: gl.constexpr = partials.ROWS
    BLOCK: gl.constexpr = partials.BLOCK
    HEAD_DIM: gl.constexpr = cfg.HEAD_DIM
    SPLITS: gl.constexpr = to.SPLITS
    stride_split: gl.constexpr = cfg.NUM_KV_HEADS * ROWS
    if first_split < head.kv_splits:
        layout: gl.constexpr = _get_copy_layout(HEAD_DIM)
        split_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
        m_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
        d_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
        split = gl.arange(0, SPLITS, split_layout)
        offs_m = gl.arange(0, BLOCK, m_layout)
        offs_d = gl.arange(0, HEAD_DIM, d_layout)
        offs = ((split * stride_split)[:, None, None] + offs_m[None, :, None]) * HEAD_DIM + offs_d[None, None, :]
        split_mask = (first_split + split < head.kv_splits)[:, None]
        mask = split_mask & ((offs_m < ROWS) & (offs_m // cfg.QUERIES_PER_KV < head.work.query_len))[None, :]
        acc_ptr = partials.acc_ptr + (head.offs_partial + first_split * stride_split) * HEAD_DIM
        copy_elements(to.acc_batches.index(stage * to.ROOMS), acc_ptr + offs, mask=mask[:, :, None])
        ml_layout: gl.constexpr = _get_ml_layout(BLOCK)
        split = first_split + gl.arange(0, SPLITS, gl.SliceLayout(1, ml_layout))
        offs_m = gl.arange(0, BLOCK, gl.SliceLayout(0, ml_layout))
        split_mask = (split < head.kv_splits)[:, None]
        mask = split_mask & ((offs_m < ROWS) & (offs_m // cfg.QUERIES_PER_KV < head.work.query_len))[None, :]
        offs = head.offs_partial + (split * stride_split)[:, None] + offs_m[None, :]
        copy_elements(to.ml_batches.index(stage * 4 + 2 * to.HALF), partials.m_ptr + offs, mask=mask)
        copy_elements(to.ml_batches.index(stage * 4 + 2 * to.HALF + 1), partials.l_ptr + offs, mask=mask)


@gluon.jit
def _merge_one(state, of, stage, i: gl.constexpr):
    """The splits so far and split ``i`` of half a batch, which is in its room ``stage``."""
    layout: gl.constexpr = get_partial_layout(of.acc_splits.shape[2])
    SPLITS: gl.constexpr = of.SPLITS
    m = of.ml_splits.index((stage * 4 + 2 * of.HALF) * SPLITS + i).load(gl.SliceLayout(1, layout))  # [BLOCK]
    l = of.ml_splits.index((stage * 4 + 2 * of.HALF + 1) * SPLITS + i).load(gl.SliceLayout(1, layout))  # [BLOCK]
    acc = of.acc_splits.index(stage * of.ROOMS * SPLITS + i).load(layout)  # [BLOCK, HEAD_DIM]
    return merge_split(state, m, l, acc)


@gluon.jit
def _merge_half(state, of, stage, first_split, kv_splits):
    """The splits so far and half a batch, which is in its room ``stage``."""
    SPLITS: gl.constexpr = of.SPLITS
    if first_split + SPLITS <= kv_splits:
        # Without conditions, so that the loads of all are on their way together.
        for i in gl.static_range(SPLITS):
            state = _merge_one(state, of, stage, i)
    else:
        for i in gl.static_range(SPLITS - 1):
            if first_split + i < kv_splits:
                state = _merge_one(state, of, stage, i)
    return state


@gluon.jit
def _half_of(smem, ml_smem, HALF: gl.constexpr, BLOCK: gl.constexpr, cfg):
    SPLITS: gl.constexpr = _half_batch(BLOCK, cfg.HOLDS_CODES)
    ROOMS: gl.constexpr = _half_batches(BLOCK, cfg.HOLDS_CODES)
    BATCHES: gl.constexpr = cfg.NUM_STAGES * ROOMS
    return HalfBatch(
        reinterpret(smem, gl.float32, [BATCHES, SPLITS, BLOCK, cfg.HEAD_DIM], _plain(3)),
        reinterpret(smem, gl.float32, [BATCHES * SPLITS, BLOCK, cfg.HEAD_DIM], _plain(2)),
        reinterpret(ml_smem, gl.float32, [cfg.NUM_STAGES * 4, SPLITS, BLOCK], _plain(2)),
        ml_smem,
        HALF,
        SPLITS,
        ROOMS,
    )


@gluon.jit
def merge_partials(out, partials, ring, ml_smem, head, merged_splits, sinks_ptr, cfg):
    """Merges the partial results of a head, in ascending order, and writes the result. Nothing else may use the ring,
    which is overwritten.

    Args:
        ml_smem: of ``allocate_ml``.
        merged_splits: the end of the splits that are merged already; the result of all of them is where the last
            one's would be.
        sinks_ptr: of each query head, or None.
    """
    ROWS: gl.constexpr = partials.ROWS
    BLOCK: gl.constexpr = partials.BLOCK
    HEAD_DIM: gl.constexpr = cfg.HEAD_DIM
    NUM_STAGES: gl.constexpr = cfg.NUM_STAGES
    layout: gl.constexpr = get_partial_layout(HEAD_DIM)
    early = _half_of(ring.k_smem, ml_smem, 0, BLOCK, cfg)
    late = _half_of(ring.v_smem, ml_smem, 1, BLOCK, cfg)
    SPLITS: gl.constexpr = early.SPLITS
    offs_m = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    mask = (offs_m < ROWS) & (offs_m // cfg.QUERIES_PER_KV < head.work.query_len)
    offs = head.offs_partial + ((merged_splits - 1) * (cfg.NUM_KV_HEADS * ROWS)).to(gl.int64) + offs_m
    known = mask & (merged_splits > head.first_split)
    m = gl.load(partials.m_ptr + offs, known, -float("inf"), cache_modifier=".cg")  # [BLOCK]
    l = gl.load(partials.l_ptr + offs, known, 0.0, cache_modifier=".cg")  # [BLOCK]
    acc_ptrs = partials.acc_ptr + offs[:, None] * HEAD_DIM + offs_d[None, :]
    acc = gl.load(acc_ptrs, known[:, None], 0.0, cache_modifier=".cg")  # [BLOCK, HEAD_DIM]
    state = SoftmaxState(m, l, acc)
    batches = gl.cdiv(head.kv_splits - merged_splits, 2 * SPLITS)
    for batch in range(1 - NUM_STAGES, batches):
        # What the next copies overwrite has been read by every thread, and what is read next is there for all.
        barrier()
        ahead = batch + NUM_STAGES - 1
        stage = ahead % NUM_STAGES
        first_split = merged_splits + ahead * (2 * SPLITS)
        _start_copies(early, stage, partials, head, first_split, cfg)
        _start_copies(late, stage, partials, head, first_split + SPLITS, cfg)
        async_copy.commit_group()
        if batch >= 0:
            async_copy.wait_group(NUM_STAGES - 1)
            barrier()
            stage = batch % NUM_STAGES
            first_split = merged_splits + batch * (2 * SPLITS)
            state = _merge_half(state, early, stage, first_split, head.kv_splits)
            state = _merge_half(state, late, stage, first_split + SPLITS, head.kv_splits)
    async_copy.wait_group(0)
    barrier()
    l, acc = state.l, state.acc
    if sinks_ptr is not None:
        query_head = head.work.kv_head * cfg.QUERIES_PER_KV + offs_m % cfg.QUERIES_PER_KV
        l, alpha = sums_with_sinks(state.m, l, sinks_ptr, query_head)
        acc = acc * alpha[:, None]
    l = gl.where(l == 0.0, 1.0, l)
    result = (acc / l[:, None] * head.v_scale).to(out.rows.ptr.dtype.element_ty)
    write_rows(out, head.work, result, offs_m, offs_d, mask, cfg)
