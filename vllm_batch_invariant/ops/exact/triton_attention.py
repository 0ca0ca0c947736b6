"""The Triton kernel of exact attention over a paged bf16 cache, for prefill and decode.

Of a row with query ``q`` over a tile of keys ``k`` and values ``v``, all integers on grids of their own, ``v`` 2^i:

    s = fp32((q k^T + 128) >> 8) * qk_scale * scale_k * scale_q
    m = max(ceil(s)),  w = 2^(s - m),                   l = sum(rint(w 32512))
    e = max(ceil(s) + i),  u = rint(w 2^(m + i - e) 32512),  acc = (u v + 128) >> 8

over the keys that the row sees; with a soft cap, s is capped and then multiplied by log2 e. Tiles of a split, and then
splits, merge in ascending order: l and acc, from here on in fp32, times 2^(m - max m) and 2^(e - max e), powers of two
of integers. The result is acc / l * 2^(e - m + 8). Products are sums of products of int8 digits and exact, so blocks,
warps and which program has which splits are schedules.

A key or value that is not finite has i = +inf, which makes e = +inf of the rows that see it; their results are NaN.
What a work item is, and pages: as in :mod:`..attention.triton_kernels`.
"""

import triton
import triton.language as tl

from ..attention.splits import start_of
from ..attention.walk import Output, items_of_program, keys_of_block, partial_rows, result_rows, share_partials
from ..attention.work import load_work
from ..common.triton_exact_math import (
    LOG2_E,
    capped,
    ceil,
    digits_of,
    exp2_in_parts,
    from_bf16,
    power_of_two,
    rint,
    times_power_of_two,
    to_bf16,
)
from ..common.triton_names import aggregate, value
from . import definition
from .triton_cache import NOT_FINITE, Cache, load_pages, load_tile, on_grids
from .triton_linear import dot_digits

_WEIGHT_ONE = tl.constexpr(float(definition.WEIGHT_ONE))
_INFINITY = tl.constexpr(float("inf"))
_LEAST_POWER = tl.constexpr(-100)
"""Of two, to which a weight's is raised: the integer of either is 0."""


@aggregate
class State:
    """The running result of a block of rows: weights add up to l * 2**m, weighted values to acc * 2**e."""

    m: tl.tensor  # [rows], integers in fp32; -inf before the first key
    l: tl.tensor  # [rows]
    e: tl.tensor  # [rows], as m; +inf for a row whose result is NaN
    acc: tl.tensor  # [rows, PADDED_HEAD_DIM]


@aggregate
class Sums:
    """A state but for its acc."""

    m: tl.tensor
    l: tl.tensor
    e: tl.tensor


@aggregate
class Rows:
    """The query rows of a block, (token, query head of the KV head) pairs."""

    q1: tl.tensor  # [BLOCK_M, PADDED_HEAD_DIM] int8 digits
    q0: tl.tensor
    scale: tl.tensor  # [BLOCK_M], of the grids; 1 where a row is not finite
    finite: tl.tensor  # [BLOCK_M]
    q_pos: tl.tensor  # [BLOCK_M]
    stored: tl.tensor  # [BLOCK_M], whether a row exists and is one of those in a partial result


@aggregate
class Partials:
    """The workspace for results of single splits: [idx, NUM_KV_HEADS, ROWS] of m, l, e and rows of acc."""

    m_ptr: tl.tensor
    l_ptr: tl.tensor
    e_ptr: tl.tensor
    acc_ptr: tl.tensor
    NUM_KV_HEADS: tl.constexpr
    ROWS: tl.constexpr
    HEAD_DIM: tl.constexpr
    PADDED_HEAD_DIM: tl.constexpr


@aggregate
class Options:
    """How a product of integers becomes a score, and what a row sees."""

    qk_scale: value
    soft_cap: value
    window: value
    USE_SOFT_CAP: tl.constexpr
    USE_WINDOW: tl.constexpr
    INT8: tl.constexpr


@triton.jit
def no_keys(BLOCK: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr):
    """The state before the first key."""
    nothing = tl.full((BLOCK,), -_INFINITY, tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, PADDED_HEAD_DIM), tl.float32)
    return State(nothing, l, nothing, acc)


@triton.jit
def _factor(exponents, common):
    """2**(exponents - common); 0 for rows without a key."""
    none = exponents == -_INFINITY
    difference = tl.where(none, -127.0, exponents - tl.where(none, 0.0, common))
    return power_of_two(tl.maximum(difference, -127.0).to(tl.int32))


@triton.jit
def merge(state, later):
    """The state of both, the one with the earlier keys first."""
    m, e = tl.maximum(state.m, later.m), tl.maximum(state.e, later.e)
    l = state.l * _factor(state.m, m) + later.l * _factor(later.m, m)
    acc = state.acc * _factor(state.e, e)[:, None] + later.acc * _factor(later.e, e)[:, None]
    return State(m, l, e, acc)


@triton.jit
def product_8(a1, a0, b1, b0, INT8: tl.constexpr):
    """(a @ b + 128) >> 8 of integers of two digits each, over at most 256 elements: int32."""
    zero = tl.zeros((a1.shape[0], b1.shape[1]), tl.int32 if INT8 else tl.float32)
    y = dot_digits(a1, b1, zero, INT8).to(tl.int32) << 8
    if INT8:
        y = dot_digits(a1, b0, y, INT8)
        y = dot_digits(a0, b1, y, INT8)
    else:
        y += dot_digits(a0, b1, dot_digits(a1, b0, zero, INT8), INT8).to(tl.int32)
    return y + ((dot_digits(a0, b0, zero, INT8).to(tl.int32) + 128) >> 8)


@triton.jit
def attend_tile(state, rows, cache, options, page, tile_start):
    """The state after a tile of keys."""
    k1, k0, v1, v0, k_e, v_e = load_tile(cache, page, tile_start)
    k_finite, v_finite = k_e != NOT_FINITE, v_e != NOT_FINITE
    k_e, v_e = tl.where(k_finite, k_e, 0), tl.where(v_finite, v_e, 0)
    s = product_8(rows.q1, rows.q0, k1, k0, options.INT8).to(tl.float32) * options.qk_scale
    s = s * (power_of_two(k_e) * 256.0)[None, :] * rows.scale[:, None]  # [BLOCK_M, KEY_TILE]
    if options.USE_SOFT_CAP:
        s = capped(s, options.soft_cap) * LOG2_E
    distance = rows.q_pos[:, None] - (tile_start + tl.arange(0, cache.KEY_TILE))[None, :]
    visible = distance >= 0
    if options.USE_WINDOW:
        visible &= distance < options.window
    above = tl.where(visible, ceil(s), -_INFINITY)
    # The exponent of a value's scale, as the definition has it of the scale.
    i = tl.where(k_finite & v_finite, v_e.to(tl.float32), _INFINITY)
    m, e = tl.max(above, 1), tl.max(tl.where(visible, above + i[None, :], -_INFINITY), 1)
    seen = m != -_INFINITY
    m_0, e_0 = tl.where(seen, m, 0.0), tl.where(seen, e, 0.0)
    x = tl.where(visible, s - m_0[:, None], -_INFINITY)
    y, n = exp2_in_parts(x)
    l = tl.sum(rint(times_power_of_two(y, n) * _WEIGHT_ONE), 1).to(tl.float32)
    shift = tl.minimum(tl.maximum(m_0 - e_0, -1000.0), 1000.0).to(tl.int32)[:, None] + v_e[None, :]
    w = times_power_of_two(y, tl.maximum(n + tl.minimum(shift, 126), _LEAST_POWER))
    u1, u0 = digits_of(rint(tl.where(x >= -126.0, w, 0.0) * _WEIGHT_ONE))
    acc = product_8(u1, u0, v1, v0, options.INT8)
    e = tl.where(rows.finite | (m == -_INFINITY), e, _INFINITY)
    return merge(state, State(m, l, e, acc.to(tl.float32)))


@triton.jit
def store_partial(split_state, split, rows, work, partials):
    """A finished split goes among the partial results."""
    idx = partial_rows(work, partials, split, rows.q1.shape[0])
    tl.store(partials.m_ptr + idx, split_state.m, mask=rows.stored)
    tl.store(partials.l_ptr + idx, split_state.l, mask=rows.stored)
    tl.store(partials.e_ptr + idx, split_state.e, mask=rows.stored)
    offs_d = tl.arange(0, partials.PADDED_HEAD_DIM)
    mask = rows.stored[:, None] & (offs_d < partials.HEAD_DIM)[None, :]
    acc_ptrs = partials.acc_ptr + idx[:, None] * partials.PADDED_HEAD_DIM + offs_d[None, :]
    tl.store(acc_ptrs, split_state.acc, mask=mask)


@triton.jit
def add_split(sums, split_state, spilled_acc_ptr, before, is_last, out, work):
    """A finished split is merged into what ``before`` splits of the block have left: ``sums``, and acc in memory, where
    it takes no registers from the loop over tiles. The last one writes the result.
    """
    BLOCK: tl.constexpr = split_state.acc.shape[0]
    offs_d = tl.arange(0, out.PADDED_HEAD_DIM)
    spilled_acc_ptr += tl.program_id(0).to(tl.int64) * (BLOCK * out.PADDED_HEAD_DIM)
    spilled_acc_ptrs = spilled_acc_ptr + (tl.arange(0, BLOCK)[:, None] * out.PADDED_HEAD_DIM + offs_d[None, :])
    token, head, mask = result_rows(work, out, BLOCK)
    is_later = tl.full((BLOCK, 1), before, tl.int32) > 0
    acc = tl.load(spilled_acc_ptrs, mask=mask & is_later, other=0.0)
    merged = merge(State(sums.m, sums.l, sums.e, acc), split_state)
    if is_last:
        store_result(merged, out, work, token, head, mask)
    else:
        tl.debug_barrier()  # another thread may read an element than the one that writes it
        tl.store(spilled_acc_ptrs, merged.acc, mask=mask)
        tl.debug_barrier()
    return Sums(merged.m, merged.l, merged.e)


@triton.jit
def store_result(state, out, work, token, head, mask):
    """Write the result of rows, (token of the request, query head) pairs."""
    shift = tl.minimum(tl.maximum(state.e - state.m, -127.0), 119.0).to(tl.int32) + 8
    y = tl.div_rn(state.acc, tl.broadcast_to(state.l[:, None], state.acc.shape)) * power_of_two(shift)[:, None]
    y = tl.where((state.e == _INFINITY)[:, None], float("nan"), y)
    offs_d = tl.arange(0, out.PADDED_HEAD_DIM)
    row = (work.query_start + token).to(tl.int64)
    out_ptrs = out.ptr + row[:, None] * out.stride_token + head[:, None] * out.stride_head + offs_d[None, :]
    tl.store(out_ptrs, to_bf16(y), mask=mask)


@triton.jit
def merge_partials(out, partials, work, first_split, splits, BLOCK: tl.constexpr):
    """Merges the partial results of a block of rows, in ascending order, and writes the result."""
    offs_r, offs_d = tl.arange(0, BLOCK), tl.arange(0, out.PADDED_HEAD_DIM)
    token, head, mask_d = result_rows(work, out, BLOCK)
    mask = (offs_r < partials.ROWS) & (token < work.query_len)
    mask_d = mask[:, None] & mask_d
    state = no_keys(BLOCK, out.PADDED_HEAD_DIM)
    idx = partial_rows(work, partials, first_split, BLOCK)
    for _ in range(splits):
        m = tl.load(partials.m_ptr + idx, mask=mask, other=-_INFINITY, cache_modifier=".cg")
        l = tl.load(partials.l_ptr + idx, mask=mask, other=0.0, cache_modifier=".cg")
        e = tl.load(partials.e_ptr + idx, mask=mask, other=-_INFINITY, cache_modifier=".cg")
        acc_ptrs = partials.acc_ptr + idx[:, None] * partials.PADDED_HEAD_DIM + offs_d[None, :]
        acc = tl.load(acc_ptrs, mask=mask_d, other=0.0, cache_modifier=".cg")
        state = merge(state, State(m, l, e, acc))
        idx += partials.NUM_KV_HEADS * partials.ROWS
    store_result(state, out, work, token, head, mask_d)


@triton.jit(do_not_specialize=["stride_table", "window"])
def exact_attention_kernel(
    q_ptr,
    digits_ptr,
    exponents_ptr,
    out_ptr,
    block_table_ptr,
    work_indptr,
    work_ptr,
    partial_m_ptr,
    partial_l_ptr,
    partial_e_ptr,
    partial_acc_ptr,
    spilled_acc_ptr,
    semaphores_ptr,
    qk_scale,
    soft_cap,
    window,
    stride_table,
    stride_q_token,
    stride_q_head,
    stride_page,
    stride_o_token,
    stride_o_head,
    USE_SOFT_CAP: tl.constexpr,
    USE_WINDOW: tl.constexpr,
    INT8: tl.constexpr,
    PREFILL_LIKE: tl.constexpr,
    MAY_SHARE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    QUERIES_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT_SEGMENTS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    PARTIAL_BLOCK: tl.constexpr,
):
    """Works on every item of ``work_ptr``; arguments as of :func:`..attention.triton_kernels.attention_kernel`.

    Args:
        digits_ptr, exponents_ptr, stride_page: as of :func:`.triton_cache.write_cache_kernel`.
        spilled_acc_ptr: fp32 [programs, BLOCK_M, PADDED_HEAD_DIM], of unfinished blocks.
        qk_scale: of the scores, without a soft cap times log2 e, in fp32.
        INT8: digits are multiplied by int8 tensor cores, else by those of fp16.
    """
    options = Options(qk_scale, soft_cap, window, USE_SOFT_CAP, USE_WINDOW, INT8)
    partials = Partials(
        partial_m_ptr, partial_l_ptr, partial_e_ptr, partial_acc_ptr, NUM_KV_HEADS, PARTIAL_ROWS, HEAD_DIM,
        PADDED_HEAD_DIM,
    )  # fmt: skip
    out = Output(
        out_ptr, stride_o_token, stride_o_head, None, None, None, False, False, False, None, NUM_KV_HEADS,
        QUERIES_PER_KV, HEAD_DIM, PADDED_HEAD_DIM,
    )  # fmt: skip
    first_item, end_item, step = items_of_program(work_indptr, NUM_KV_HEADS, PREFILL_LIKE)
    for item in tl.range(first_item, end_item, step):
        work = load_work(work_ptr, item, NUM_KV_HEADS, PREFILL_LIKE)
        keys = keys_of_block(work, window, BLOCK_M, QUERIES_PER_KV, SPLIT_SEGMENTS, KEY_TILE, USE_WINDOW)
        begin, end = keys.begin_split, keys.end_split
        offs_d = tl.arange(0, PADDED_HEAD_DIM)
        token, head, mask = result_rows(work, out, BLOCK_M)
        row = (work.query_start + token).to(tl.int64)
        q_ptrs = q_ptr + row[:, None] * stride_q_token + head[:, None] * stride_q_head + offs_d[None, :]
        q1, q0, q_e, finite = on_grids(from_bf16(tl.load(q_ptrs, mask=mask, other=0.0)), 1)
        stored = (token < work.query_len) & (tl.arange(0, BLOCK_M) < PARTIAL_ROWS)
        rows = Rows(q1, q0, power_of_two(q_e), finite, work.context_len + token, stored)
        cache = Cache(
            digits_ptr, exponents_ptr, block_table_ptr + work.request * stride_table, stride_page, work.kv_head,
            keys.first, keys.end, NUM_KV_HEADS, KEY_TILE, PAGE_SIZE, HEAD_DIM, PADDED_HEAD_DIM,
        )  # fmt: skip

        nothing = no_keys(BLOCK_M, PADDED_HEAD_DIM)
        sums = Sums(nothing.m, nothing.l, nothing.e)
        for split in range(begin, end):
            split_state = no_keys(BLOCK_M, PADDED_HEAD_DIM)
            tile_start = max(start_of(split, SPLIT_SEGMENTS), keys.first // KEY_TILE * KEY_TILE)
            tile_end = min(start_of(split + 1, SPLIT_SEGMENTS), keys.end)
            page = load_pages(cache, tile_start)
            for start in range(tile_start, tile_end, KEY_TILE):
                next_page = load_pages(cache, start + KEY_TILE)
                split_state = attend_tile(split_state, rows, cache, options, page, start)
                page = next_page
            if MAY_SHARE:
                if work.workspace_idx >= 0:
                    store_partial(split_state, split, rows, work, partials)
                else:
                    sums = add_split(sums, split_state, spilled_acc_ptr, split - begin, split == end - 1, out, work)
            else:
                sums = add_split(sums, split_state, spilled_acc_ptr, split - begin, split == end - 1, out, work)

        if MAY_SHARE:
            share_partials(out, partials, work, semaphores_ptr, keys, SPLIT_SEGMENTS, PARTIAL_BLOCK, merge_partials)
