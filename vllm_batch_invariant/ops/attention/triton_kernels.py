"""The Triton kernel of paged attention, which serves prefill and decode.

Of a row with query ``q`` at position ``q_pos``, over the keys ``k`` and values ``v`` of a split, tile after tile:

    qk = q k^T  (scaled, soft-capped and with ALiBi where a layer has them; -inf for a key that the row does not see)
    m' = max(m, max(qk)),  p = 2^(qk - m'),  alpha = 2^(m - m')
    l' = l alpha + sum(p),  acc' = acc alpha + p v

Splits merge in ascending order (see :mod:`.splits`), and the result is ``acc / l``. Scores, ``m``, slopes and sinks are
in units of log2(e), which the arguments bring along. Keys and values may be codes in e4m3: k and v are then the numbers
of the codes in the query's dtype, exactly, the scale of the scores has that of the keys as a factor, and ``acc / l`` is
multiplied by that of the values, both in fp32. Where each token has a scale in each head, the score of a key has its
own as a factor of the scale, and ``acc' = acc alpha + (p scale) v``, where the weights are rounded behind the scale of
the values; ``l`` sums those that are rounded without. Where values are the first columns of keys, ``q k^T`` is that of
these columns, with that of the others, the tail, added to it in one chain.

A row's bits follow from its own keys by construction: masked keys weigh exactly 0, a tile without a visible key changes
nothing, weights are summed by the tensor cores like the values they weigh, splits are merged ascending by one function,
and vectors are multiplied and added in one step only where the source says so. What is measured and not constructed:
that tensor cores give a row the same bits in blocks of 16, 64 and 128 rows.
Online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867; tiles as in FlashAttention, Dao et al. 2022,
arXiv:2205.14135; splits as in Flash-Decoding, pytorch.org/blog/flash-decoding.
"""

import math

import triton
import triton.language as tl

from ..common.triton_e4m3 import as_loaded, from_e4m3
from ..common.triton_names import aggregate, value
from ..quantise.triton_kernels import OutCodes, store_codes
from .splits import finite_max, is_end_of_split, merge_splits, normalize, split_of, start_of
from .walk import (
    Output,
    elements_of_rows,
    items_of_program,
    keys_of_block,
    partial_rows,
    rows_of_block,
    share_partials,
)
from .work import load_work

_LOG2_E = tl.constexpr(math.log2(math.e))
_ONES = tl.constexpr(16)
"""Equal columns of the sums of weights: a dot has at least so many."""


@aggregate
class SoftmaxState:
    """The running result of a block of rows."""

    m: tl.tensor  # [rows]
    l: tl.tensor  # [rows]; within a split [rows, _ONES], all columns alike
    acc: tl.tensor  # [rows, PADDED_HEAD_DIM]


@aggregate
class Rows:
    """The query rows of a block, (token, query head of the KV head) pairs."""

    q: tl.tensor  # [BLOCK_M, PADDED_HEAD_DIM]
    q_tail: tl.tensor  # [BLOCK_M, PADDED_TAIL_DIM]; ``q`` again where there is no tail
    q_pos: tl.tensor  # [BLOCK_M]
    slope: tl.tensor  # [BLOCK_M]
    stored: tl.tensor  # [BLOCK_M], whether a row exists and is one of those in a partial result
    range_first: tl.tensor  # [BLOCK_M], of positions that a row sees beside those of the layer
    range_last: tl.tensor  # [BLOCK_M]


@aggregate
class KVCache:
    """The keys and values that a block sees of one KV head."""

    k: value  # pointer, or descriptor; of the tail alone where keys have one
    v: value
    block_table_ptr: value  # of the request, or None
    first_row: tl.tensor  # of the request's keys, where they have no pages
    stride_k_page: value
    stride_k_head: value
    stride_k_slot: value
    stride_v_page: value
    stride_v_head: value
    stride_v_slot: value
    kv_head: tl.tensor
    first_key: value  # that some row sees
    kv_end: tl.tensor
    k_scale_ptr: value  # of codes
    v_scale_ptr: value
    stride_scale_page: value
    stride_scale_head: value
    stride_scale_slot: value
    USE_TMA: tl.constexpr
    PAGED: tl.constexpr
    HOLDS_CODES: tl.constexpr
    CONVERTS_E4M3: tl.constexpr
    SCALES_OF_TOKENS: tl.constexpr
    KEY_TILE: tl.constexpr
    PAGE_SIZE: tl.constexpr
    HEAD_DIM: tl.constexpr
    PADDED_HEAD_DIM: tl.constexpr
    TAIL_DIM: tl.constexpr
    PADDED_TAIL_DIM: tl.constexpr


@aggregate
class ScoreMod:
    """What makes a score of a dot."""

    qk_scale_log2: value
    soft_cap: value
    window: value
    USE_SOFT_CAP: tl.constexpr
    USE_ALIBI: tl.constexpr
    USE_WINDOW: tl.constexpr
    CAUSAL: tl.constexpr
    USE_RANGES: tl.constexpr


@aggregate
class Partials:
    """The workspace for results of single splits: [idx, NUM_KV_HEADS, ROWS] of ``m``, ``l`` and rows of ``acc``."""

    m_ptr: tl.tensor
    l_ptr: tl.tensor
    acc_ptr: tl.tensor
    NUM_KV_HEADS: tl.constexpr
    ROWS: tl.constexpr
    HEAD_DIM: tl.constexpr
    PADDED_HEAD_DIM: tl.constexpr


@triton.jit
def _tanh(x):
    """tanh from exp2 alone, off by at most an ulp of 1."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    return tl.where(x < 0, e - 1.0, 1.0 - e) / (1.0 + e)


@triton.jit
def _no_rows(BLOCK: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr):
    """The state before the first split."""
    m = tl.full((BLOCK,), -float("inf"), tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, PADDED_HEAD_DIM), tl.float32)
    return SoftmaxState(m, l, acc)


@triton.jit
def _no_keys(BLOCK: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr):
    """The state before the first tile of a split."""
    m = tl.full((BLOCK,), -float("inf"), tl.float32)
    l = tl.zeros((BLOCK, _ONES), tl.float32)
    acc = tl.zeros((BLOCK, PADDED_HEAD_DIM), tl.float32)
    return SoftmaxState(m, l, acc)


@triton.jit
def load_pages(kv, tile_start):
    """The physical pages of a tile's keys, or the page if it is one. Asked for a tile ahead: loads whose addresses wait
    for other loads would not be pipelined.
    """
    if kv.USE_TMA:
        page = tl.load(kv.block_table_ptr + tile_start // kv.PAGE_SIZE, mask=tile_start < kv.kv_end, other=0)
    elif not kv.PAGED:
        page = (kv.first_row + tile_start + tl.arange(0, kv.KEY_TILE)).to(tl.int64)  # of one key each
    else:
        offs_n = tile_start + tl.arange(0, kv.KEY_TILE)
        needed = (offs_n >= kv.first_key) & (offs_n < kv.kv_end)
        page = tl.load(kv.block_table_ptr + offs_n // kv.PAGE_SIZE, mask=needed, other=0).to(tl.int64)  # [KEY_TILE]
    return page


@triton.jit
def _numbers(kv, tile, DTYPE: tl.constexpr):
    """What is stored as numbers of DTYPE, for a dot."""
    if kv.HOLDS_CODES:
        tile = from_e4m3(tile, DTYPE, kv.CONVERTS_E4M3)
        if DTYPE.primitive_bitwidth == 16:
            tile = as_loaded(tile)
    return tile


@triton.jit
def load_kv_tile(kv, page, tile_start, MASKED: tl.constexpr, DTYPE: tl.constexpr):
    """``k`` [PADDED_HEAD_DIM, KEY_TILE] and ``v`` [KEY_TILE, PADDED_HEAD_DIM] of the pages of a tile, in DTYPE; of keys
    with a tail that, [PADDED_TAIL_DIM, KEY_TILE], in the place of ``k``.
    """
    K_DIM: tl.constexpr = kv.TAIL_DIM if kv.TAIL_DIM > 0 else kv.HEAD_DIM
    PADDED_K_DIM: tl.constexpr = kv.PADDED_TAIL_DIM if kv.TAIL_DIM > 0 else kv.PADDED_HEAD_DIM
    offs_n = tile_start + tl.arange(0, kv.KEY_TILE)
    if kv.USE_TMA:
        slot = tile_start % kv.PAGE_SIZE
        k = kv.k.load([page, kv.kv_head, slot, 0]).reshape(kv.KEY_TILE, PADDED_K_DIM)
        v = kv.v.load([page, kv.kv_head, slot, 0]).reshape(kv.KEY_TILE, kv.PADDED_HEAD_DIM)
        k, v = _numbers(kv, k, DTYPE), _numbers(kv, v, DTYPE)
        if MASKED:
            # Unwritten slots may hold anything, NaN included.
            v = tl.where((offs_n < kv.kv_end)[:, None], v, 0.0)
        k = k.T
    else:
        offs_d, offs_kd = tl.arange(0, kv.PADDED_HEAD_DIM), tl.arange(0, PADDED_K_DIM)
        in_head, in_k = offs_d < kv.HEAD_DIM, offs_kd < K_DIM
        slot = offs_n % kv.PAGE_SIZE
        offs_k = page * kv.stride_k_page + kv.kv_head.to(tl.int64) * kv.stride_k_head + slot * kv.stride_k_slot
        offs_v = page * kv.stride_v_page + kv.kv_head.to(tl.int64) * kv.stride_v_head + slot * kv.stride_v_slot
        if MASKED:
            needed = (offs_n >= kv.first_key) & (offs_n < kv.kv_end)
            k = tl.load(kv.k + offs_k[None, :] + offs_kd[:, None], mask=needed[None, :] & in_k[:, None], other=0)
            v = tl.load(kv.v + offs_v[:, None] + offs_d[None, :], mask=needed[:, None] & in_head[None, :], other=0)
        elif kv.HEAD_DIM == kv.PADDED_HEAD_DIM and kv.TAIL_DIM == kv.PADDED_TAIL_DIM:
            k = tl.load(kv.k + offs_k[None, :] + offs_kd[:, None])
            v = tl.load(kv.v + offs_v[:, None] + offs_d[None, :])
        else:
            k = tl.load(kv.k + offs_k[None, :] + offs_kd[:, None], mask=in_k[:, None], other=0)
            v = tl.load(kv.v + offs_v[:, None] + offs_d[None, :], mask=in_head[None, :], other=0)
        k, v = _numbers(kv, k, DTYPE), _numbers(kv, v, DTYPE)
    return k, v


@triton.jit
def load_scales(kv, page, tile_start, MASKED: tl.constexpr):
    """Scales of the keys and of the values of a tile, each [KEY_TILE]; 1 of those that need not be there."""
    offs_n = tile_start + tl.arange(0, kv.KEY_TILE)
    offs = kv.kv_head.to(tl.int64) * kv.stride_scale_head + offs_n % kv.PAGE_SIZE * kv.stride_scale_slot
    offs += page.to(tl.int64) * kv.stride_scale_page
    if MASKED:
        needed = (offs_n >= kv.first_key) & (offs_n < kv.kv_end)
        k_scale = tl.load(kv.k_scale_ptr + offs, mask=needed, other=1.0)
        v_scale = tl.load(kv.v_scale_ptr + offs, mask=needed, other=1.0)
    else:
        k_scale, v_scale = tl.load(kv.k_scale_ptr + offs), tl.load(kv.v_scale_ptr + offs)
    return k_scale, v_scale


@triton.jit
def score_mod(qk, rows, offs_n, kv_end, mod, MASKED: tl.constexpr):
    """Scores [BLOCK_M, KEY_TILE] of dots, which are scaled where a layer has soft-cap or ALiBi."""
    if mod.USE_SOFT_CAP:
        qk = _tanh(qk / mod.soft_cap) * mod.soft_cap
    distance = rows.q_pos[:, None] - offs_n[None, :]  # [BLOCK_M, KEY_TILE]
    if mod.USE_ALIBI:
        qk -= rows.slope[:, None] * distance.to(tl.float32)
    if MASKED:
        if mod.CAUSAL:
            visible = distance >= 0
        else:
            visible = offs_n[None, :] < kv_end
            if mod.USE_WINDOW:
                visible &= distance > -mod.window
        if mod.USE_WINDOW:
            visible &= distance < mod.window
        if mod.USE_RANGES:
            visible |= (offs_n[None, :] >= rows.range_first[:, None]) & (offs_n[None, :] <= rows.range_last[:, None])
        qk = tl.where(visible, qk, -float("inf"))
    return qk


@triton.jit
def online_softmax_update(state, qk, scale, v, v_scale):
    """The state after a tile of scores, still to be scaled, and values, whose scales [KEY_TILE] are multiplied with
    their weights, or None.
    """
    m = tl.maximum(state.m, tl.max(qk, 1) * scale)
    zero = finite_max(m)
    p = tl.exp2(tl.fma(qk, tl.full(qk.shape, scale, tl.float32), tl.broadcast_to(-zero[:, None], qk.shape)))
    weights = p.to(v.dtype)  # [BLOCK_M, KEY_TILE]
    alpha = tl.exp2(state.m - zero)[:, None]
    ones = tl.full((v.shape[0], _ONES), 1.0, v.dtype)
    l = tl.dot(weights, ones, state.l * alpha, input_precision="ieee")
    if v_scale is not None:
        weights = (p * v_scale[None, :]).to(v.dtype)
    acc = tl.dot(weights, v, state.acc * alpha, input_precision="ieee")
    return SoftmaxState(m, l, acc)


@triton.jit
def attend_tile(state, rows, kv, mod, page, tile_start, MASKED: tl.constexpr):
    """The state after a tile of keys; ``MASKED`` where some row does not see all of them."""
    k, v = load_kv_tile(kv, page, tile_start, MASKED, rows.q.dtype)
    offs_n = tile_start + tl.arange(0, kv.KEY_TILE)
    if kv.TAIL_DIM > 0:
        qk = tl.dot(rows.q, v.T, input_precision="ieee")
        qk = tl.dot(rows.q_tail, k, qk, input_precision="ieee")
    else:
        qk = tl.dot(rows.q, k, input_precision="ieee")  # [BLOCK_M, KEY_TILE]
    v_scale = None
    if kv.SCALES_OF_TOKENS:
        k_scale, v_scale = load_scales(kv, page, tile_start, MASKED)
        qk = qk * (mod.qk_scale_log2 * k_scale)[None, :]
    elif mod.USE_SOFT_CAP or mod.USE_ALIBI:
        qk = qk * mod.qk_scale_log2
    qk = score_mod(qk, rows, offs_n, kv.kv_end, mod, MASKED)
    if kv.SCALES_OF_TOKENS or mod.USE_SOFT_CAP or mod.USE_ALIBI:
        state = online_softmax_update(state, qk, 1.0, v, v_scale)
    else:
        state = online_softmax_update(state, qk, mod.qk_scale_log2, v, v_scale)
    return state


@triton.jit
def attend_tiles(state, rows, kv, mod, page, begin, end, MASKED: tl.constexpr):
    """The state after the tiles of the keys ``begin`` to ``end - 1``, and the pages of the next tile."""
    for tile_start in range(begin, end, kv.KEY_TILE):
        next_page = load_pages(kv, tile_start + kv.KEY_TILE)
        state = attend_tile(state, rows, kv, mod, page, tile_start, MASKED)
        page = next_page
    return state, page


@triton.jit
def end_split(state, split_state, split, rows, work, partials, MAY_SHARE: tl.constexpr):
    """A finished split goes among the partial results, or straight into the state of its rows."""
    # All columns are equal, so the largest is any of them.
    split_l = tl.max(split_state.l, 1)
    m, l, acc = state.m, state.l, state.acc
    if MAY_SHARE:
        if work.workspace_idx >= 0:
            idx = partial_rows(work, partials, split, rows.q.shape[0])
            tl.store(partials.m_ptr + idx, split_state.m, mask=rows.stored)
            tl.store(partials.l_ptr + idx, split_l, mask=rows.stored)
            offs_d = tl.arange(0, partials.PADDED_HEAD_DIM)
            mask = rows.stored[:, None] & (offs_d < partials.HEAD_DIM)[None, :]
            acc_ptrs = partials.acc_ptr + idx[:, None] * partials.PADDED_HEAD_DIM + offs_d[None, :]
            tl.store(acc_ptrs, split_state.acc, mask=mask)
        else:
            m, l, acc = merge_splits(m, l, acc, split_state.m, split_l, split_state.acc)
    else:
        m, l, acc = merge_splits(m, l, acc, split_state.m, split_l, split_state.acc)
    return SoftmaxState(m, l, acc)


@triton.jit
def attend_splits(
    rows, kv, mod, work, partials, begin, end, tile_start, tile_end, unmasked_end, SPLIT_SEGMENTS: tl.constexpr,
    MAY_SHARE: tl.constexpr,
):  # fmt: skip
    """The state after the splits ``begin`` to ``end - 1``, in a loop over tiles within one over splits; tiles that
    every row sees are not masked, which changes no bit.
    """
    BLOCK_M: tl.constexpr = rows.q.shape[0]
    state = _no_rows(BLOCK_M, kv.PADDED_HEAD_DIM)
    for split in range(begin, end):
        split_state = _no_keys(BLOCK_M, kv.PADDED_HEAD_DIM)
        split_end = min(start_of(split + 1, SPLIT_SEGMENTS), tile_end)
        split_start = max(start_of(split, SPLIT_SEGMENTS), tile_start)
        masked_start = max(min(unmasked_end, split_end), split_start)
        page = load_pages(kv, split_start)
        split_state, page = attend_tiles(split_state, rows, kv, mod, page, split_start, masked_start, False)
        split_state, page = attend_tiles(split_state, rows, kv, mod, page, masked_start, split_end, True)
        state = end_split(state, split_state, split, rows, work, partials, MAY_SHARE)
    return state


@triton.jit
def attend_keys(
    rows, kv, mod, work, partials, tile_start, tile_end, SPLIT_SEGMENTS: tl.constexpr, MAY_SHARE: tl.constexpr,
):  # fmt: skip
    """The state after the keys ``tile_start`` to ``tile_end - 1``, in one loop over tiles, which keeps memory busy
    across the ends of splits.
    """
    BLOCK_M: tl.constexpr = rows.q.shape[0]
    state = _no_rows(BLOCK_M, kv.PADDED_HEAD_DIM)
    split_state = _no_keys(BLOCK_M, kv.PADDED_HEAD_DIM)
    page = load_pages(kv, tile_start)
    for start in range(tile_start, tile_end, kv.KEY_TILE):
        next_page = load_pages(kv, start + kv.KEY_TILE)
        split_state = attend_tile(split_state, rows, kv, mod, page, start, True)
        page = next_page
        if is_end_of_split(start + kv.KEY_TILE, SPLIT_SEGMENTS) | (start + kv.KEY_TILE >= tile_end):
            split = split_of(start, SPLIT_SEGMENTS)
            state = end_split(state, split_state, split, rows, work, partials, MAY_SHARE)
            split_state = _no_keys(BLOCK_M, kv.PADDED_HEAD_DIM)
    return state


@triton.jit
def store_result(state, out, work, token, head, exists):
    """Write the result of those rows that there are, (token of the request, query head) pairs, and its codes."""
    sink = tl.zeros((state.m.shape[0],), tl.float32)
    if out.USE_SINKS:
        sink = tl.load(out.sinks_ptr + head).to(tl.float32) * _LOG2_E
    result = normalize(state.m, state.l, state.acc, sink, out.USE_SINKS)
    if out.SCALES_VALUES:
        result = result * tl.load(out.v_scale_ptr + work.kv_head * out.stride_scale)
    offs_d = tl.arange(0, out.PADDED_HEAD_DIM)
    row = (work.query_start + token).to(tl.int64)
    result = result.to(out.ptr.dtype.element_ty)
    tl.store(
        out.ptr + row[:, None] * out.stride_token + head[:, None] * out.stride_head + offs_d[None, :],
        result,
        mask=exists[:, None] & (offs_d < out.HEAD_DIM)[None, :],
    )
    if out.HAS_CODES:
        codes = out.codes
        LENGTH: tl.constexpr = out.NUM_KV_HEADS * out.QUERIES_PER_KV * out.HEAD_DIM
        store_codes(
            result, row, exists, (head * out.HEAD_DIM)[:, None], codes.ptr, codes.scale_ptr, codes.scale_rows,
            LENGTH, codes.GROUP, codes.QUANTISE,
        )  # fmt: skip


@triton.constexpr_function
def _splits_at_once(elements):
    """Partial results of so many elements that a CTA's registers hold."""
    return max(min(16384 // elements, 32), 1)


@triton.jit
def _merge_some(state, partials, idx, mask, left, AT_ONCE: tl.constexpr, MASKED: tl.constexpr):
    """Merges the next ``AT_ONCE`` partial results, of the rows ``idx``; if ``MASKED``, only the ``left`` of each row
    that there are.
    """
    m, l, acc = state.m, state.l, state.acc
    offs_d = tl.arange(0, partials.PADDED_HEAD_DIM)
    mask_d = mask[:, None] & (offs_d < partials.HEAD_DIM)[None, :]
    ms, ls, accs = (), (), ()
    for number in tl.static_range(AT_ONCE):
        here = idx + number * (partials.NUM_KV_HEADS * partials.ROWS)
        exists, exists_d = mask, mask_d
        if MASKED:
            exists, exists_d = mask & (number < left), mask_d & (number < left)[:, None]
        acc_ptrs = partials.acc_ptr + here[:, None] * partials.PADDED_HEAD_DIM + offs_d[None, :]
        ms += (tl.load(partials.m_ptr + here, mask=exists, other=-float("inf"), cache_modifier=".cg"),)
        ls += (tl.load(partials.l_ptr + here, mask=exists, other=0.0, cache_modifier=".cg"),)
        accs += (tl.load(acc_ptrs, mask=exists_d, other=0.0, cache_modifier=".cg"),)
    for number in tl.static_range(AT_ONCE):
        new_m, new_l, new_acc = merge_splits(m, l, acc, ms[number], ls[number], accs[number])
        if MASKED:
            # An absent one adds a zero, which would make one of -0.
            new_m, new_l = tl.where(number < left, new_m, m), tl.where(number < left, new_l, l)
            new_acc = tl.where((number < left)[:, None], new_acc, acc)
        m, l, acc = new_m, new_l, new_acc
    return SoftmaxState(m, l, acc)


@triton.jit
def merge_partials(out, partials, work, first_split, splits, BLOCK: tl.constexpr):
    """Merges the partial results of a block of rows, in ascending order, and writes the result."""
    offs_r = tl.arange(0, BLOCK)
    token, head = rows_of_block(work, out, BLOCK)
    mask = (offs_r < partials.ROWS) & (token < work.query_len)
    state = _no_rows(BLOCK, out.PADDED_HEAD_DIM)
    idx = partial_rows(work, partials, first_split, BLOCK)
    # Many loads at once: each waits for memory as long as all.
    MANY: tl.constexpr = _splits_at_once(BLOCK * out.PADDED_HEAD_DIM)
    FEW: tl.constexpr = min(MANY, 4)
    by_many = splits // MANY * MANY
    for _ in range(0, by_many, MANY):
        state = _merge_some(state, partials, idx, mask, offs_r, MANY, False)
        idx += MANY * partials.NUM_KV_HEADS * partials.ROWS
    for done in range(by_many, splits, FEW):
        state = _merge_some(state, partials, idx, mask, offs_r * 0 + splits - done, FEW, True)
        idx += FEW * partials.NUM_KV_HEADS * partials.ROWS
    store_result(state, out, work, token, head, mask)


@triton.jit(do_not_specialize=["stride_scale_head", "stride_table", "window", "code_scale_rows"])
def attention_kernel(
    q_ptr,
    k_cache,
    v_cache,
    out_ptr,
    block_table_ptr,
    work_indptr,
    work_ptr,
    partial_m_ptr,
    partial_l_ptr,
    partial_acc_ptr,
    semaphores_ptr,
    slopes_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    stride_scale_page,
    stride_scale_head,
    stride_scale_slot,
    ranges_ptr,
    qk_scale_log2,
    soft_cap,
    window,
    stride_table,
    stride_q_token,
    stride_q_head,
    stride_k_page,
    stride_k_head,
    stride_k_slot,
    stride_v_page,
    stride_v_head,
    stride_v_slot,
    stride_o_token,
    stride_o_head,
    codes_ptr,
    code_scale_ptr,
    code_scale_rows,
    USE_TMA: tl.constexpr,
    PAGED: tl.constexpr,
    HOLDS_CODES: tl.constexpr,
    CONVERTS_E4M3: tl.constexpr,
    SCALES_OF_TOKENS: tl.constexpr,
    USE_SOFT_CAP: tl.constexpr,
    USE_ALIBI: tl.constexpr,
    USE_WINDOW: tl.constexpr,
    USE_SINKS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PREFILL_LIKE: tl.constexpr,
    MAY_SHARE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    QUERIES_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    PADDED_TAIL_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT_SEGMENTS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    PARTIAL_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    QUANTISE: tl.constexpr,
):
    """Works on every item of ``work_ptr``. CTAs that share the splits of a block of rows leave them among the partial
    results; the last one to arrive merges them all, in ascending order.

    Args:
        k_cache, v_cache: [pages, kv_heads, page_size, head_size], pointers or descriptors; uint8 with HOLDS_CODES.
            Without PAGED pages of one key, those of the tokens of the query. With TAIL_DIM keys begin with their value,
            and ``k_cache`` has the columns behind it.
        k_scale_ptr, v_scale_ptr: fp32 with HOLDS_CODES, of each KV head, with SCALES_OF_TOKENS also of each page and
            slot; None without.
        ranges_ptr: [tokens, 2] int32 of causal attention, or None: a token sees these positions, too.
        block_table_ptr: [requests, pages], ``stride_table`` apart; None without PAGED.
        work_indptr: the first item of each CTA, and the end; for prefill-like work the number of items, each of them
            for all KV heads.
        partial_m_ptr, partial_l_ptr, partial_acc_ptr: as in :class:`Partials`, ``PARTIAL_ROWS`` of a block;
            ``PARTIAL_BLOCK`` is the next power of two.
        semaphores_ptr: for each workspace index and KV head, splits that are done; 0 before and after.
        qk_scale_log2, soft_cap, slopes_ptr: times log2(e).
        sinks_ptr: [query heads], as a model has them.
        codes_ptr, code_scale_ptr, code_scale_rows, GROUP, QUANTISE: of
            :func:`..quantise.triton_kernels.store_codes`, of rows of all heads of a token; None: no codes are written.
        PREFILL_LIKE: work is prefill-like, and the tensor cores limit the speed; else memory does.
        MAY_SHARE: some block is shared.
    """
    offs_d = tl.arange(0, PADDED_HEAD_DIM)
    USE_RANGES: tl.constexpr = ranges_ptr is not None
    partials = Partials(
        partial_m_ptr, partial_l_ptr, partial_acc_ptr, NUM_KV_HEADS, PARTIAL_ROWS, HEAD_DIM, PADDED_HEAD_DIM
    )
    codes = OutCodes(codes_ptr, code_scale_ptr, code_scale_rows, GROUP, QUANTISE)
    out = Output(
        out_ptr, stride_o_token, stride_o_head, sinks_ptr, v_scale_ptr, stride_scale_head, USE_SINKS,
        HOLDS_CODES and not SCALES_OF_TOKENS, QUANTISE is not None, codes, NUM_KV_HEADS, QUERIES_PER_KV, HEAD_DIM,
        PADDED_HEAD_DIM,
    )  # fmt: skip
    first_item, end_item, step = items_of_program(work_indptr, NUM_KV_HEADS, PREFILL_LIKE)
    for item in tl.range(first_item, end_item, step):
        work = load_work(work_ptr, item, NUM_KV_HEADS, PREFILL_LIKE)
        own_table_ptr = block_table_ptr
        if PAGED:
            own_table_ptr = block_table_ptr + work.request * stride_table
        keys = keys_of_block(
            work, window, BLOCK_M, QUERIES_PER_KV, SPLIT_SEGMENTS, KEY_TILE, USE_WINDOW, CAUSAL, ranges_ptr
        )
        begin, end = keys.begin_split, keys.end_split
        tile_start = max(start_of(begin, SPLIT_SEGMENTS), keys.first // KEY_TILE * KEY_TILE)
        tile_end = min(start_of(end, SPLIT_SEGMENTS), keys.end)

        token, head = rows_of_block(work, out, BLOCK_M)
        q_pos = work.context_len + token
        stored = (token < work.query_len) & (tl.arange(0, BLOCK_M) < PARTIAL_ROWS)
        row = (work.query_start + token).to(tl.int64)
        mask = elements_of_rows(work, out, token)
        q = tl.load(  # [BLOCK_M, PADDED_HEAD_DIM]
            q_ptr + row[:, None] * stride_q_token + head[:, None] * stride_q_head + offs_d[None, :],
            mask=mask,
            other=0.0,
        )
        slope = tl.zeros((BLOCK_M,), tl.float32)
        if USE_ALIBI:
            slope = tl.load(slopes_ptr + head)
        range_first, range_last = q_pos, q_pos
        if USE_RANGES:
            range_first = tl.load(ranges_ptr + row * 2, mask=token < work.query_len, other=0)
            range_last = tl.load(ranges_ptr + row * 2 + 1, mask=token < work.query_len, other=-1)
        q_tail = q
        if TAIL_DIM > 0:
            offs_t = HEAD_DIM + tl.arange(0, PADDED_TAIL_DIM)
            mask_t = (token < work.query_len)[:, None] & (offs_t < HEAD_DIM + TAIL_DIM)[None, :]
            q_tail = tl.load(
                q_ptr + row[:, None] * stride_q_token + head[:, None] * stride_q_head + offs_t[None, :],
                mask=mask_t,
                other=0.0,
            )
        rows = Rows(q, q_tail, q_pos, slope, stored, range_first, range_last)
        own_scale = qk_scale_log2
        if HOLDS_CODES and not SCALES_OF_TOKENS:
            # Read here and no constant: weights that are replaced bring others, and a CUDA graph stays.
            own_scale = qk_scale_log2 * tl.load(k_scale_ptr + work.kv_head * stride_scale_head)
        mod = ScoreMod(own_scale, soft_cap, window, USE_SOFT_CAP, USE_ALIBI, USE_WINDOW, CAUSAL, USE_RANGES)
        kv = KVCache(
            k_cache, v_cache, own_table_ptr, work.query_start, stride_k_page, stride_k_head, stride_k_slot,
            stride_v_page, stride_v_head, stride_v_slot, work.kv_head, keys.first, keys.end, k_scale_ptr, v_scale_ptr,
            stride_scale_page, stride_scale_head, stride_scale_slot, USE_TMA, PAGED, HOLDS_CODES, CONVERTS_E4M3,
            SCALES_OF_TOKENS, KEY_TILE, PAGE_SIZE, HEAD_DIM, PADDED_HEAD_DIM, TAIL_DIM, PADDED_TAIL_DIM,
        )  # fmt: skip

        if PREFILL_LIKE:
            state = attend_splits(
                rows, kv, mod, work, partials, begin, end, tile_start, tile_end, keys.unmasked_end, SPLIT_SEGMENTS,
                MAY_SHARE,
            )  # fmt: skip
        else:
            state = attend_keys(rows, kv, mod, work, partials, tile_start, tile_end, SPLIT_SEGMENTS, MAY_SHARE)

        if MAY_SHARE:
            share_partials(out, partials, work, semaphores_ptr, keys, SPLIT_SEGMENTS, PARTIAL_BLOCK, merge_partials)
        if work.workspace_idx < 0:
            store_result(state, out, work, token, head, token < work.query_len)
