"""What the Hopper kernels of attention do with a tile of keys, in Gluon: the bits of the Triton kernel's step.

With a sliding window, tiles and splits that no row of a block sees are left out, and of the others no row sees the keys
behind its window. A sink joins the sum of a row's weights at the end.

Every row goes through the same fp32 operations in the same order as there: a step of the online softmax for each 64
keys, weights summed by the tensor cores against ones, splits merged ascending with explicit fma.
"""

import math

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...common.gluon_names import copy_block
from ...common.sm90_ring import next_stage
from ...common.triton_names import aggregate
from ...quantise import triton_kernels as quantise
from ...quantise.triton_kernels import OutCodes
from .. import splits, work
from . import shapes

BLOCK_N = gl.constexpr(shapes.BLOCK_N)
WARPGROUP_M = gl.constexpr(shapes.WARPGROUP_M)
_LOG2_E = gl.constexpr(math.log2(math.e))
_INFINITY = gl.constexpr(0x7F800000)
"""Its bits in fp32."""

# Triton's functions as Gluon's, with the same body, as Triton makes its own library's.
split_of = gluon.jit(splits.split_of.fn)
start_of = gluon.jit(splits.start_of.fn)
is_end_of_split = gluon.jit(splits.is_end_of_split.fn)
finite_max = gluon.jit(splits.finite_max.fn)
merge_sums = gluon.jit(splits.merge_sums.fn)
merge_acc = gluon.jit(splits.merge_acc.fn)
add_sink = gluon.jit(splits.add_sink.fn)
load_work = gluon.jit(work.load_work.fn)
_scale_of = gluon.jit(quantise.scale_of.fn)
_codes_of = gluon.jit(quantise.codes_of.fn)


@aggregate
class Config:
    """What a kernel is compiled for."""

    NUM_KV_HEADS: gl.constexpr
    QUERIES_PER_KV: gl.constexpr
    HEAD_SIZE: gl.constexpr
    """Elements of a head."""
    HEAD_DIM: gl.constexpr
    """The power of two that holds them; a tile has zeros behind them."""
    PAGE_SIZE: gl.constexpr
    """Keys in a page; 0: they have none, and are those of the queries' own tokens, in their order."""
    SPLIT_SEGMENTS: gl.constexpr | gl.tuple
    """``AttentionReduction.split_segments``"""
    NUM_STAGES: gl.constexpr
    HOLDS_CODES: gl.constexpr
    """Whether keys and values are codes in e4m3."""
    WINDOW: gl.constexpr
    """Keys that a token sees, its own among them; 0: all."""
    CAUSAL: gl.constexpr
    """Whether a token sees no key after its own; else all of its request."""


@aggregate
class Rows:
    """The query or the output in global memory, [tokens, heads, HEAD_SIZE]."""

    ptr: gl.tensor
    stride_token: gl.tensor
    stride_head: gl.tensor


@aggregate
class Output:
    """The output, and of decode the codes of its rows, [tokens, heads * HEAD_SIZE]."""

    rows: Rows
    HAS_CODES: gl.constexpr
    codes: OutCodes


@aggregate
class KeyRange:
    """The keys of a work item, and of all of its block."""

    lo: gl.tensor
    """The first tile of the item."""
    hi: gl.tensor
    """The end of its keys."""
    first: gl.tensor
    """The first key that some row of the block sees."""
    first_split: gl.tensor
    """The split that it is in."""
    end: gl.tensor
    """Of the block's keys."""


@aggregate
class Ring:
    """Tiles in shared memory. A tile's keys and its values may arrive at one barrier."""

    k_smem: gl.shared_memory_descriptor
    """[NUM_STAGES, 1, 1, BLOCK_N, HEAD_DIM]"""
    v_smem: gl.shared_memory_descriptor
    """The same."""
    k_full_bar: gl.shared_memory_descriptor
    """[NUM_STAGES, 1]"""
    v_full_bar: gl.shared_memory_descriptor
    empty_bar: gl.shared_memory_descriptor


@aggregate
class RingPosition:
    """The stage of a ring that is next, and the parity of its use."""

    stage: gl.tensor
    phase: gl.tensor


@aggregate
class TileAddress:
    """Where a tile of keys or values is in the cache."""

    kv_head: gl.tensor
    page_offset: gl.tensor
    """Of the tile in its page, for pages larger than a tile; or among all rows."""
    pages: gl.tuple
    """One for each copy."""


@aggregate
class SoftmaxState:
    """Row maximum in units of log2(e), row sum and weighted values: of a split so far, or of merged splits."""

    m: gl.tensor
    l: gl.tensor
    acc: gl.tensor


@gluon.constexpr_function
def keys_per_copy(PAGE_SIZE):
    """Keys that one copy brings."""
    return min(PAGE_SIZE or shapes.BLOCK_N, shapes.BLOCK_N)


def get_cache_layout(head_dim: int, bits: int = 16) -> gl.NVMMASharedLayout:
    """How a tile of keys or values lies in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, head_dim * bits // 8), element_bitwidth=bits, rank=4)


@gluon.constexpr_function
def get_qk_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, shapes.BLOCK_N, 16])


@gluon.constexpr_function
def get_acc_layout(HEAD_DIM):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16])


@gluon.constexpr_function
def get_l_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16])


@gluon.constexpr_function
def get_row_layout(HEAD_DIM):
    """Whole rows in pieces of 16 bytes, for global memory."""
    return gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def is_large(HEAD_DIM):
    """Whether shared memory has no room for all that prefill keeps there of smaller heads."""
    return HEAD_DIM > shapes.SMALL_HEAD


@gluon.constexpr_function
def get_out_layout(HEAD_DIM):
    """Of results: whole rows, or of large heads those that ``acc`` has."""
    return get_acc_layout(HEAD_DIM) if is_large(HEAD_DIM) else get_row_layout(HEAD_DIM)


@gluon.constexpr_function
def get_merged_layout(COLUMNS):
    """Columns of the merged result as [COLUMNS // 16, WARPGROUP_M * 4, 4]: what a thread has of ``acc``, four elements
    at a time.
    """
    parts = [[1 << bit, 0, 0] for bit in range(COLUMNS.bit_length() - 5)]
    lanes, warps = ([[0, 1 << bit, 0] for bit in bits] for bits in (range(5), (6, 7)))
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 32, 0], *parts], lanes, warps, [], [COLUMNS // 16, 4 * shapes.WARPGROUP_M, 4]
    )


@gluon.constexpr_function
def get_acc_smem_layout(HEAD_DIM):
    """The merged result in shared memory: every thread gets its own back, 16 bytes at a time, without conflicts."""
    columns = [[0, 1 << bit] for bit in range(4, HEAD_DIM.bit_length() - 1)]
    return gl.SharedLinearLayout(
        [[0, 1], [0, 8], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [8, 0], *columns, [16, 0], [32, 0]]
    )


@gluon.jit
def key_range(work, first_token, last_token, cfg):
    """The :class:`KeyRange` of a work item, of these tokens of its request."""
    SPLIT_SEGMENTS: gl.constexpr = cfg.SPLIT_SEGMENTS
    end = work.context_len + last_token + 1
    if not cfg.CAUSAL:
        end = work.context_len + work.query_len
    lo = start_of(work.first_split, SPLIT_SEGMENTS)
    first = end * 0
    first_split = end * 0
    if cfg.WINDOW:
        first = gl.maximum(work.context_len + first_token - cfg.WINDOW + 1, 0)
        first_split = split_of(first, SPLIT_SEGMENTS)
        lo = gl.maximum(lo, first // BLOCK_N * BLOCK_N)
    hi = gl.minimum(start_of(work.first_split + work.num_splits, SPLIT_SEGMENTS), end)
    return KeyRange(lo, hi, first, first_split, end)


@gluon.jit
def tile_address(work, table_ptr, kv_start, keys, cfg):
    """Where a work item's tile of keys from ``kv_start`` on is."""
    PAGE_SIZE: gl.constexpr = cfg.PAGE_SIZE
    if PAGE_SIZE == 0:
        pages = (kv_start * 0,)
        page_offset = work.query_start + kv_start
    else:
        pages = load_pages(table_ptr, kv_start, keys, cfg)
        page_offset = kv_start % PAGE_SIZE if PAGE_SIZE > BLOCK_N else kv_start * 0
    return TileAddress(work.kv_head, page_offset, pages)


@gluon.jit
def load_pages(table_ptr, kv_start, keys, cfg):
    """The pages of a tile's copies; 0 for those of keys that no row sees."""
    KEYS: gl.constexpr = keys_per_copy(cfg.PAGE_SIZE)
    pages = ()
    for i in gl.static_range(BLOCK_N // KEYS):
        key = kv_start + i * KEYS
        needed = key < keys.hi
        if cfg.WINDOW:
            needed = needed & (key + KEYS > keys.first)
        pages = pages + (gl.load(table_ptr + key // cfg.PAGE_SIZE, mask=needed, other=0),)  # noqa: RUF005
    return pages


@gluon.jit
def clear_unseen(v_smem, kv_start, first, end, row_layout: gl.constexpr):
    """Zero the values of a tile, or of a part of one, at ``kv_start`` before ``first`` and from ``end`` on: slots may
    hold anything there, NaN included, and no weight makes 0 of that.
    """
    kv_pos = kv_start + gl.arange(0, v_smem.shape[0], gl.SliceLayout(1, row_layout))
    v_smem.store(gl.where(((kv_pos >= first) & (kv_pos < end))[:, None], v_smem.load(row_layout), 0.0))


@gluon.jit
def sums_with_sinks(m, l, sinks_ptr, head):
    """Row sums with the weights of the sinks of query heads, and what ``acc`` shrinks by."""
    return add_sink(m, l, gl.load(sinks_ptr + head).to(gl.float32) * _LOG2_E)


@gluon.jit
def elements_of(rows, offs_d, cfg):
    """The mask of elements of those ``rows`` that there are, [rows, 1] or [rows, HEAD_DIM]."""
    elements = rows[:, None]
    if cfg.HEAD_SIZE < cfg.HEAD_DIM:
        elements = elements & (offs_d < cfg.HEAD_SIZE)[None, :]
    return elements


@gluon.jit
def row_offsets(rows, work, offs_m, token, QUERIES_PER_KV: gl.constexpr):
    """Of the rows ``offs_m`` of a work item's request and KV head, which belong to the request's tokens ``token``."""
    offs = (work.query_start + token).to(gl.int64) * rows.stride_token
    return offs + (work.kv_head * QUERIES_PER_KV + offs_m % QUERIES_PER_KV) * rows.stride_head


@gluon.jit
def write_rows(out, work, result, offs_m, offs_d, mask, cfg):
    """Writes results [rows, HEAD_DIM] of a work item's request and KV head, and their codes: a head is a group."""
    QUERIES_PER_KV: gl.constexpr = cfg.QUERIES_PER_KV
    token = offs_m // QUERIES_PER_KV
    offs = row_offsets(out.rows, work, offs_m, token, QUERIES_PER_KV)
    gl.store(out.rows.ptr + offs[:, None] + offs_d[None, :], result, mask=mask[:, None])
    if out.HAS_CODES:
        codes = out.codes
        HEADS: gl.constexpr = cfg.NUM_KV_HEADS * QUERIES_PER_KV
        magnitudes = (result.to(gl.int16, bitcast=True) & 0x7FFF).to(gl.int32)
        top = gl.max(magnitudes, 1).to(gl.int16).to(result.dtype, bitcast=True).to(gl.float32)  # [rows]
        top_bits = top.to(gl.int32, bitcast=True)
        counts, step, inverse = _scale_of(top_bits[:, None], 0.0, codes.QUANTISE, False)
        DTYPE: gl.constexpr = codes.ptr.dtype.element_ty
        coded = _codes_of(result.to(gl.float32), counts, step, inverse, codes.QUANTISE, False, DTYPE, True)
        row = (work.query_start + token).to(gl.int64)
        head = work.kv_head * QUERIES_PER_KV + offs_m % QUERIES_PER_KV
        offs = (row * HEADS + head) * cfg.HEAD_DIM
        gl.store(codes.ptr + offs[:, None] + offs_d[None, :], coded, mask=mask[:, None])
        scale = gl.where(top_bits[:, None] < _INFINITY, step, float("nan"))
        offs = head.to(gl.int64) * codes.scale_rows + row
        gl.store(codes.scale_ptr + offs[:, None], scale, mask=mask[:, None])


@gluon.jit
def next_position(position, NUM_STAGES: gl.constexpr):
    stage, phase = next_stage(position.stage, position.phase, NUM_STAGES)
    return RingPosition(stage, phase)


@gluon.jit
def copy_tile(desc, smem, full_bar, stage, tile, pred, PAGE_SIZE: gl.constexpr):
    """Starts the copy of a tile, a page or a part of one at a time."""
    HEAD_DIM: gl.constexpr = smem.shape[4]
    KEYS: gl.constexpr = keys_per_copy(PAGE_SIZE)
    mbarrier.expect(full_bar.index(stage), BLOCK_N * HEAD_DIM * smem.dtype.primitive_bitwidth // 8, pred=pred)
    tile_smem = smem.index(stage)
    for i in gl.static_range(BLOCK_N // KEYS):
        copy_block(
            desc,
            [tile.pages[i], tile.kv_head, tile.page_offset, 0],
            full_bar.index(stage),
            tile_smem.slice(i * KEYS, KEYS, dim=2),
            pred=pred,
        )


@gluon.jit
def expand_rows(x, ROW_DIM: gl.constexpr):
    """A value of each row as a column (``ROW_DIM`` 0) or as a row (1)."""
    return x[:, None] if ROW_DIM == 0 else x[None, :]


@gluon.jit
def softmax_weights(qk, m, new_m, qk_scale_log2, dtype: gl.constexpr, ROW_DIM: gl.constexpr):
    """``p = exp2(qk * qk_scale_log2 - new_m)``, and ``alpha = exp2(m - new_m)``, by which ``l`` and ``acc`` shrink."""
    subtracted = finite_max(new_m)
    qk, negative = gl.broadcast(qk, expand_rows(-subtracted, ROW_DIM))
    p = gl.exp2(gl.fma(qk, gl.full(qk.shape, qk_scale_log2, gl.float32, qk.type.layout), negative))
    return p.to(dtype), gl.exp2(m - subtracted)


@gluon.jit
def merge_split(state, split_m, split_l, split_acc):
    """The splits so far and one more split."""
    m, l, alpha, split_alpha = merge_sums(state.m, state.l, split_m, split_l)
    return SoftmaxState(m, l, merge_acc(state.acc, alpha, split_acc, split_alpha))
