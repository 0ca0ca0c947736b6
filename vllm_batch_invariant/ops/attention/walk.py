"""What every kernel of paged attention in Triton does around its arithmetic: which items a program works on, which keys
and splits a block of rows has, where its rows lie, and who merges the partial results of a block that programs share.

What a state is, a tile adds to it and a partial result holds, is the kernel's: of floats in :mod:`.triton_kernels`, of
integers in :mod:`..exact.triton_attention`.
"""

import triton
import triton.language as tl

from ..common.triton_names import aggregate, value
from .splits import split_of


@aggregate
class Output:
    """Where the result goes, and of floats the sinks that it has a part in."""

    ptr: tl.tensor
    stride_token: value
    stride_head: value
    sinks_ptr: value
    v_scale_ptr: value  # of values that are codes
    stride_scale: value  # from that of a KV head to that of the next
    USE_SINKS: tl.constexpr
    SCALES_VALUES: tl.constexpr
    HAS_CODES: tl.constexpr
    codes: value  # of rows of all heads
    NUM_KV_HEADS: tl.constexpr
    QUERIES_PER_KV: tl.constexpr
    HEAD_DIM: tl.constexpr
    PADDED_HEAD_DIM: tl.constexpr


@aggregate
class Keys:
    """What a block of rows sees."""

    first: value  # key that some row sees
    unmasked_end: value  # of whole tiles that every row sees; 0 with a window
    end: tl.tensor
    begin_split: tl.tensor  # of those that are the item's
    end_split: tl.tensor


@triton.jit
def items_of_program(work_indptr, NUM_KV_HEADS: tl.constexpr, PREFILL_LIKE: tl.constexpr):
    """First item, end and step: of prefill-like work, one for all KV heads, ``work_indptr`` has the number of items; of
    decode-like work the first item of each program, and the end.
    """
    first_item, end_item, step = tl.program_id(0), 0, 1
    if PREFILL_LIKE:
        end_item, step = tl.load(work_indptr) * NUM_KV_HEADS, tl.num_programs(0)
    else:
        end_item = tl.load(work_indptr + first_item + 1)
        first_item = tl.load(work_indptr + first_item)
    return first_item, end_item, step


@triton.jit
def keys_of_block(
    work, window, BLOCK_M: tl.constexpr, QUERIES_PER_KV: tl.constexpr, SPLIT_SEGMENTS: tl.constexpr,
    KEY_TILE: tl.constexpr, USE_WINDOW: tl.constexpr, CAUSAL: tl.constexpr = True, ranges=None,
):  # fmt: skip
    """The :class:`Keys` that some row of the block sees; ``ranges``, of causal rows, are those of the tokens of the
    query.
    """
    last_token = min((work.first_row + BLOCK_M - 1) // QUERIES_PER_KV, work.query_len - 1)
    kv_end = work.context_len + last_token + 1
    first_key = 0
    first_token = work.first_row // QUERIES_PER_KV
    unmasked_end = (work.context_len + first_token + 1) // KEY_TILE * KEY_TILE
    if not CAUSAL:
        kv_len = work.context_len + work.query_len
        if USE_WINDOW:
            kv_end = min(kv_end - 1 + window, kv_len)
        else:
            kv_end = kv_len
            unmasked_end = kv_end // KEY_TILE * KEY_TILE
    if USE_WINDOW:
        first_key = max(work.context_len + first_token - window + 1, 0)
        unmasked_end = 0
    if ranges is not None:  # what rows see begins and ends no earlier than for the rows before
        first_key = min(first_key, tl.load(ranges + (work.query_start + first_token) * 2))
        kv_end = max(kv_end, tl.load(ranges + (work.query_start + last_token) * 2 + 1) + 1)
    begin = max(work.first_split, split_of(first_key, SPLIT_SEGMENTS))
    end = min(work.first_split + work.num_splits, split_of(kv_end - 1, SPLIT_SEGMENTS) + 1)
    return Keys(first_key, unmasked_end, kv_end, begin, end)


@triton.jit
def rows_of_block(work, out, BLOCK: tl.constexpr):
    """The token of the request and the query head of each row."""
    offs_m = work.first_row + tl.arange(0, BLOCK)
    return offs_m // out.QUERIES_PER_KV, work.kv_head * out.QUERIES_PER_KV + offs_m % out.QUERIES_PER_KV


@triton.jit
def elements_of_rows(work, out, token):
    """Which elements of the result there are, [rows, PADDED_HEAD_DIM]."""
    offs_d = tl.arange(0, out.PADDED_HEAD_DIM)
    return (token < work.query_len)[:, None] & (offs_d < out.HEAD_DIM)[None, :]


@triton.jit
def result_rows(work, out, BLOCK: tl.constexpr):
    """What :func:`rows_of_block` and :func:`elements_of_rows` say of a block."""
    token, head = rows_of_block(work, out, BLOCK)
    return token, head, elements_of_rows(work, out, token)


@triton.jit
def partial_rows(work, partials, split, BLOCK: tl.constexpr):
    """Where the rows of a block are in the partial results of a split."""
    idx = (work.workspace_idx + split).to(tl.int64) * partials.NUM_KV_HEADS + work.kv_head
    return idx * partials.ROWS + tl.arange(0, BLOCK)


@triton.jit
def share_partials(
    out, partials, work, semaphores_ptr, keys, SPLIT_SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, MERGE: tl.constexpr
):
    """Counts the partial results that the item has brought; the program that brings a block's last has ``MERGE`` merge
    them all, in ascending order, and write the result.
    """
    if (work.workspace_idx >= 0) & (keys.begin_split < keys.end_split):
        first_split = split_of(keys.first, SPLIT_SEGMENTS)
        splits = split_of(keys.end - 1, SPLIT_SEGMENTS) + 1 - first_split
        semaphore_ptr = semaphores_ptr + work.workspace_idx * partials.NUM_KV_HEADS + work.kv_head
        tl.debug_barrier()
        brought = keys.end_split - keys.begin_split
        if tl.atomic_add(semaphore_ptr, brought, sem="acq_rel") == splits - brought:
            tl.debug_barrier()
            tl.store(semaphore_ptr, 0)
            MERGE(out, partials, work, first_split, splits, BLOCK)
