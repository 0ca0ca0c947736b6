"""Triton kernels around FlexAttention on a GPU: they write its block mask from the block table, gather the query rows
that it attends with, and merge its partial results.

A row is a pair of a token and a query head of the KV head: row r of a request is token ``r // QUERIES_PER_KV``. A block
is ``BLOCK_M`` rows of one request, the same for every KV head. A work item is a block and one split of the keys that it
sees: a query block of FlexAttention. From an item's normalised result ``o`` and its ``lse`` a row becomes

    m' = max(m, lse),  l' = l 2^(m - m') + 2^(lse - m'),  acc' = acc 2^(m - m') + o 2^(lse - m'),  out = acc / l

over the items of its block, ascending, with logarithms to base 2.
"""

import math

import triton
import triton.language as tl

from ...common.triton_names import aggregate
from ..splits import merge_splits, normalize, split_of, start_of

LOG2_E = math.log2(math.e)
_LOG2_E = tl.constexpr(LOG2_E)
_LISTED_AT_ONCE = tl.constexpr(1024)
"""Requests, or blocks, that a program looks at in a step."""

# [blocks, FLEX_BLOCK_SIZE] int32
FLEX_BLOCK_REQUEST = tl.constexpr(0)
FLEX_BLOCK_ROW = tl.constexpr(1)
"""First row of the block, counted in its request."""
FLEX_BLOCK_SPLIT = tl.constexpr(2)
"""First split."""
FLEX_BLOCK_NUM_SPLITS = tl.constexpr(3)
FLEX_BLOCK_NUM_ROWS = tl.constexpr(4)
"""Rows of the request."""
FLEX_BLOCK_QUERY_START = tl.constexpr(5)
"""First token of the request in the query."""
FLEX_BLOCK_CONTEXT_LEN = tl.constexpr(6)
"""Keys of the request before its query."""
FLEX_BLOCK_KV_LEN = tl.constexpr(7)
"""Keys of the request."""
FLEX_BLOCK_SIZE = tl.constexpr(8)

# [items, FLEX_ITEM_SIZE] int32
FLEX_ITEM_BLOCK = tl.constexpr(0)
FLEX_ITEM_LAST_TILE = tl.constexpr(1)
"""Last tile of the request, if the item has it and it holds slots that are not written; -1: none."""
FLEX_ITEM_NUM_WRITTEN = tl.constexpr(2)
"""Written slots of that tile."""
FLEX_ITEM_SIZE = tl.constexpr(4)


@aggregate
class FlexBlock:
    """A block of rows."""

    request: tl.tensor
    first_row: tl.tensor
    first_split: tl.tensor
    num_rows: tl.tensor
    query_start: tl.tensor
    context_len: tl.tensor
    kv_len: tl.tensor


@triton.jit
def load_block(blocks_ptr, block):
    """A :class:`FlexBlock`; its number of splits, which says whether there is one, is loaded before."""
    block_ptr = blocks_ptr + block * FLEX_BLOCK_SIZE
    return FlexBlock(
        tl.load(block_ptr + FLEX_BLOCK_REQUEST),
        tl.load(block_ptr + FLEX_BLOCK_ROW),
        tl.load(block_ptr + FLEX_BLOCK_SPLIT),
        tl.load(block_ptr + FLEX_BLOCK_NUM_ROWS),
        tl.load(block_ptr + FLEX_BLOCK_QUERY_START),
        tl.load(block_ptr + FLEX_BLOCK_CONTEXT_LEN),
        tl.load(block_ptr + FLEX_BLOCK_KV_LEN),
    )


@triton.jit
def _num_blocks(query_start_loc_ptr, request, exists, QUERIES_PER_KV: tl.constexpr, BLOCK_M: tl.constexpr):
    """How many blocks each request has."""
    start = tl.load(query_start_loc_ptr + request, mask=exists, other=0)
    query_len = (tl.load(query_start_loc_ptr + request + 1, mask=exists, other=0) - start).to(tl.int32)
    return tl.cdiv(query_len * QUERIES_PER_KV, BLOCK_M)


@triton.jit(do_not_specialize=["num_requests", "max_blocks"])
def list_blocks(
    query_start_loc_ptr,
    seq_lens_ptr,
    blocks_ptr,
    num_requests,
    max_blocks,
    QUERIES_PER_KV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_SEGMENTS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Write the blocks of one request, those of all requests in order; the rest of the list gets no splits."""
    request = tl.program_id(0)
    lanes = tl.arange(0, _LISTED_AT_ONCE)
    before, total = tl.zeros((_LISTED_AT_ONCE,), tl.int32), tl.zeros((_LISTED_AT_ONCE,), tl.int32)
    for first in range(0, num_requests, _LISTED_AT_ONCE):
        other = first + lanes
        count = _num_blocks(query_start_loc_ptr, other, other < num_requests, QUERIES_PER_KV, BLOCK_M)
        total += count
        before += tl.where(other < request, count, 0)
    query_start = tl.load(query_start_loc_ptr + request).to(tl.int32)
    num_rows = (tl.load(query_start_loc_ptr + request + 1).to(tl.int32) - query_start) * QUERIES_PER_KV
    kv_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    context_len = kv_len - num_rows // QUERIES_PER_KV
    num_blocks = tl.cdiv(num_rows, BLOCK_M)
    first_block = tl.sum(before)
    for first in range(0, num_blocks, _LISTED_AT_ONCE):
        number = first + lanes
        block_ptrs = blocks_ptr + (first_block + number) * FLEX_BLOCK_SIZE
        exists = number < num_blocks
        first_row = number * BLOCK_M
        last_pos = context_len + (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // QUERIES_PER_KV
        first_key = first_row * 0
        if WINDOW > 0:
            first_key = tl.maximum(context_len + first_row // QUERIES_PER_KV - WINDOW + 1, 0)
        first_split = split_of(first_key, SPLIT_SEGMENTS)
        num_splits = split_of(last_pos, SPLIT_SEGMENTS) + 1 - first_split
        zero = first_row * 0
        tl.store(block_ptrs + FLEX_BLOCK_REQUEST, zero + request, mask=exists)
        tl.store(block_ptrs + FLEX_BLOCK_ROW, first_row, mask=exists)
        tl.store(block_ptrs + FLEX_BLOCK_SPLIT, first_split, mask=exists)
        tl.store(block_ptrs + FLEX_BLOCK_NUM_SPLITS, num_splits, mask=exists)
        tl.store(block_ptrs + FLEX_BLOCK_NUM_ROWS, zero + num_rows, mask=exists)
        tl.store(block_ptrs + FLEX_BLOCK_QUERY_START, zero + query_start, mask=exists)
        tl.store(block_ptrs + FLEX_BLOCK_CONTEXT_LEN, zero + context_len, mask=exists)
        tl.store(block_ptrs + FLEX_BLOCK_KV_LEN, zero + kv_len, mask=exists)
    used = tl.sum(total)
    for first in range(used + request * _LISTED_AT_ONCE, max_blocks, num_requests * _LISTED_AT_ONCE):
        block = first + lanes
        exists = block < max_blocks
        tl.store(blocks_ptr + block * FLEX_BLOCK_SIZE + FLEX_BLOCK_NUM_SPLITS, block * 0, mask=exists)


@triton.jit(
    do_not_specialize=[
        "max_blocks", "max_items", "tiles_per_page", "stride_page_tiles", "num_tiles", "stride_table_request",
    ]
)  # fmt: skip
def list_items(
    block_table_ptr,
    blocks_ptr,
    item_indptr_ptr,
    items_ptr,
    kv_num_blocks_ptr,
    kv_indices_ptr,
    q_pos_ptr,
    head_in_group_ptr,
    first_keys_ptr,
    max_blocks,
    max_items,
    tiles_per_page,
    stride_page_tiles,
    num_tiles,
    stride_table_request,
    QUERIES_PER_KV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_TILES: tl.constexpr,
    SPLIT_SEGMENTS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Write the items of one block, those of all blocks in order; the rest of the list gets no keys.

    Args:
        block_table_ptr: [requests, pages], ``stride_table_request`` apart.
        blocks_ptr: [max_blocks, FLEX_BLOCK_SIZE] int32.
        item_indptr_ptr: [max_blocks] int32, the first item of each block.
        items_ptr: [max_items, FLEX_ITEM_SIZE] int32.
        kv_num_blocks_ptr: [max_items] int32, FlexAttention's: tiles of ``BLOCK_N`` keys of each item.
        kv_indices_ptr: [max_items, MAX_TILES] int32, FlexAttention's: physical tiles, in the order of the positions.
        q_pos_ptr: [max_items * BLOCK_M] int32, the position of each row; -1 where there is none.
        head_in_group_ptr: the same, the query head of each row among those of its KV head.
        first_keys_ptr: [num_tiles] int32, the position of the first key of each physical tile that is listed.
        tiles_per_page: tiles of a page.
        stride_page_tiles: tiles from one page to the next, those of other heads between them.
    """
    block_idx = tl.program_id(0)
    lanes = tl.arange(0, _LISTED_AT_ONCE)
    before, total = tl.zeros((_LISTED_AT_ONCE,), tl.int32), tl.zeros((_LISTED_AT_ONCE,), tl.int32)
    for first in range(0, max_blocks, _LISTED_AT_ONCE):
        other = first + lanes
        exists = other < max_blocks
        count = tl.load(blocks_ptr + other * FLEX_BLOCK_SIZE + FLEX_BLOCK_NUM_SPLITS, mask=exists, other=0)
        total += count
        before += tl.where(other < block_idx, count, 0)
    first_item = tl.sum(before)
    tl.store(item_indptr_ptr + block_idx, first_item)
    for first in range(tl.sum(total) + block_idx * _LISTED_AT_ONCE, max_items, max_blocks * _LISTED_AT_ONCE):
        item = first + lanes
        tl.store(kv_num_blocks_ptr + item, item * 0, mask=item < max_items)

    num_splits = tl.load(blocks_ptr + block_idx * FLEX_BLOCK_SIZE + FLEX_BLOCK_NUM_SPLITS)
    if num_splits > 0:
        block = load_block(blocks_ptr, block_idx)
        last_row = tl.minimum(block.first_row + BLOCK_M, block.num_rows) - 1
        kv_end = block.context_len + last_row // QUERIES_PER_KV + 1
        first_key = block.context_len * 0
        if WINDOW > 0:
            first_key = tl.maximum(block.context_len + block.first_row // QUERIES_PER_KV - WINDOW + 1, 0)
        offs_m = tl.arange(0, BLOCK_M)
        rows = block.first_row + offs_m
        q_pos = tl.where(rows < block.num_rows, block.context_len + rows // QUERIES_PER_KV, -1)
        # Never more than the memory holds, if lengths on the host were others.
        for number in range(tl.minimum(num_splits, max_items - first_item)):
            item = first_item + number
            split_start = start_of(block.first_split + number, SPLIT_SEGMENTS)
            split_end = tl.minimum(start_of(block.first_split + number + 1, SPLIT_SEGMENTS), kv_end)
            first_tile = tl.maximum(split_start, first_key) // BLOCK_N
            count = tl.cdiv(split_end, BLOCK_N) - first_tile
            offs_tile = tl.arange(0, MAX_TILES)
            logical = first_tile + offs_tile
            exists = offs_tile < count
            table_ptr = block_table_ptr + block.request.to(tl.int64) * stride_table_request
            page = tl.load(table_ptr + logical // tiles_per_page, mask=exists, other=0).to(tl.int32)  # [MAX_TILES]
            physical = page * stride_page_tiles + logical % tiles_per_page
            is_listed = exists & (physical >= 0) & (physical < num_tiles)
            tl.store(first_keys_ptr + physical, logical * BLOCK_N, mask=is_listed)
            tl.store(kv_indices_ptr + item.to(tl.int64) * MAX_TILES + offs_tile, tl.where(is_listed, physical, 0))
            tl.store(kv_num_blocks_ptr + item, count)
            last_tile = tl.sum(tl.where(offs_tile == count - 1, physical, 0))
            has_unwritten = (tl.cdiv(split_end, BLOCK_N) * BLOCK_N > block.kv_len) & (block.kv_len % BLOCK_N > 0)
            item_ptr = items_ptr + item * FLEX_ITEM_SIZE
            tl.store(item_ptr + FLEX_ITEM_BLOCK, block_idx)
            tl.store(item_ptr + FLEX_ITEM_LAST_TILE, tl.where(has_unwritten, last_tile, -1))
            tl.store(item_ptr + FLEX_ITEM_NUM_WRITTEN, block.kv_len % BLOCK_N)
            offs_row = item.to(tl.int64) * BLOCK_M + offs_m
            tl.store(q_pos_ptr + offs_row, q_pos)
            tl.store(head_in_group_ptr + offs_row, rows % QUERIES_PER_KV)


@triton.jit(do_not_specialize=["first_item"])
def gather_rows(
    query_ptr,
    value_ptr,
    packed_ptr,
    blocks_ptr,
    items_ptr,
    kv_num_blocks_ptr,
    first_item,
    stride_q_token,
    stride_q_head,
    stride_v_slot,
    stride_v_head,
    NUM_KV_HEADS: tl.constexpr,
    QUERIES_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Copy the query rows of an item for one KV head to ``packed_ptr`` [items, BLOCK_M, NUM_KV_HEADS, HEAD_DIM]; rows
    that do not exist are left as they are.

    Values that nobody wrote and that are not finite become 0: FlexAttention weighs them by 0, which is no help against
    a NaN.
    """
    number, kv_head = tl.program_id(0), tl.program_id(1)
    item = first_item + number
    if tl.load(kv_num_blocks_ptr + item) > 0:
        block = load_block(blocks_ptr, tl.load(items_ptr + item * FLEX_ITEM_SIZE + FLEX_ITEM_BLOCK))
        offs_d = tl.arange(0, PADDED_HEAD_DIM)
        offs_m = tl.arange(0, BLOCK_M)
        rows = block.first_row + offs_m
        exists = (rows < block.num_rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
        token = (block.query_start + rows // QUERIES_PER_KV).to(tl.int64)
        offs_q = token * stride_q_token + (kv_head * QUERIES_PER_KV + rows % QUERIES_PER_KV) * stride_q_head
        # [BLOCK_M, PADDED_HEAD_DIM]
        q = tl.load(query_ptr + offs_q[:, None] + offs_d[None, :], mask=exists, other=0.0)
        offs_packed = ((number * BLOCK_M + offs_m).to(tl.int64) * NUM_KV_HEADS + kv_head) * HEAD_DIM
        tl.store(packed_ptr + offs_packed[:, None] + offs_d[None, :], q, mask=exists)
        last_tile = tl.load(items_ptr + item * FLEX_ITEM_SIZE + FLEX_ITEM_LAST_TILE)
        if last_tile >= 0:
            offs_n = tl.arange(0, BLOCK_N)
            is_unwritten = offs_n >= tl.load(items_ptr + item * FLEX_ITEM_SIZE + FLEX_ITEM_NUM_WRITTEN)
            offs_v = (last_tile.to(tl.int64) * BLOCK_N + offs_n) * stride_v_slot + kv_head.to(tl.int64) * stride_v_head
            mask = is_unwritten[:, None] & (offs_d < HEAD_DIM)[None, :]
            # [BLOCK_N, PADDED_HEAD_DIM]
            v = tl.load(value_ptr + offs_v[:, None] + offs_d[None, :], mask=mask, other=0.0)
            is_finite = tl.abs(v.to(tl.float32)) < float("inf")
            tl.store(value_ptr + offs_v[:, None] + offs_d[None, :], tl.zeros_like(v), mask=mask & (is_finite == 0))


@triton.jit(do_not_specialize=["first_item", "num_items", "stride_lse_head"])
def merge_items(
    out_ptr,
    partial_ptr,
    lse_ptr,
    sinks_ptr,
    running_m_ptr,
    running_l_ptr,
    running_acc_ptr,
    blocks_ptr,
    item_indptr_ptr,
    first_item,
    num_items,
    stride_o_token,
    stride_o_head,
    stride_p_row,
    stride_p_head,
    stride_lse_head,
    WAVE: tl.constexpr,
    USE_SINKS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    QUERIES_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MERGE_M: tl.constexpr,
):
    """Merge the items ``first_item`` to ``first_item + num_items - 1`` into ``MERGE_M`` rows of a block, ascending, for
    one KV head. A block that begins before them goes on from the running result that the last wave left; one that ends
    after them leaves one.

    Args:
        partial_ptr: normalised results, row ``i * BLOCK_M + r`` of item ``first_item + i``.
        lse_ptr: [NUM_KV_HEADS, rows] fp32, natural.
        sinks_ptr: [query_heads] fp32, in units of log2(e), if ``USE_SINKS``: added once, after the last split.
        running_m_ptr, running_l_ptr, running_acc_ptr: [2, NUM_KV_HEADS, BLOCK_M(, PADDED_HEAD_DIM)] fp32; ``WAVE`` says
            which is read.
    """
    block_idx, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(item_indptr_ptr + block_idx)
    end = begin + tl.load(blocks_ptr + block_idx * FLEX_BLOCK_SIZE + FLEX_BLOCK_NUM_SPLITS)
    low, high = tl.maximum(begin, first_item), tl.minimum(end, first_item + num_items)
    if low < high:
        block = load_block(blocks_ptr, block_idx)
        offs_m = part * MERGE_M + tl.arange(0, MERGE_M)
        offs_d = tl.arange(0, PADDED_HEAD_DIM)
        rows = block.first_row + offs_m
        row_mask = (rows < block.num_rows) & (offs_m < BLOCK_M)
        acc_mask = row_mask[:, None] & (offs_d < HEAD_DIM)[None, :]
        m = tl.full((MERGE_M,), -float("inf"), tl.float32)
        l = tl.zeros((MERGE_M,), tl.float32)
        acc = tl.zeros((MERGE_M, PADDED_HEAD_DIM), tl.float32)
        if low > begin:
            idx = (WAVE * NUM_KV_HEADS + kv_head) * BLOCK_M + offs_m
            m = tl.load(running_m_ptr + idx, mask=row_mask, other=-float("inf"))  # [MERGE_M]
            l = tl.load(running_l_ptr + idx, mask=row_mask, other=0.0)  # [MERGE_M]
            acc_ptrs = running_acc_ptr + idx[:, None] * PADDED_HEAD_DIM + offs_d[None, :]
            acc = tl.load(acc_ptrs, mask=acc_mask, other=0.0)  # [MERGE_M, PADDED_HEAD_DIM]
        for item in range(low, high):
            offs_row = (item - first_item).to(tl.int64) * BLOCK_M + offs_m
            # [MERGE_M]
            lse = tl.load(lse_ptr + kv_head * stride_lse_head + offs_row, mask=row_mask, other=-float("inf"))
            partial_ptrs = partial_ptr + offs_row[:, None] * stride_p_row + kv_head * stride_p_head + offs_d[None, :]
            o = tl.load(partial_ptrs, mask=acc_mask, other=0.0).to(tl.float32)  # [MERGE_M, PADDED_HEAD_DIM]
            one = tl.full((MERGE_M,), 1.0, tl.float32)
            m, l, acc = merge_splits(m, l, acc, lse * _LOG2_E, one, o)
        if high == end:
            head = kv_head * QUERIES_PER_KV + rows % QUERIES_PER_KV
            token = (block.query_start + rows // QUERIES_PER_KV).to(tl.int64)
            offs_o = token * stride_o_token + head * stride_o_head
            sink = m
            if USE_SINKS:
                sink = tl.load(sinks_ptr + head, mask=row_mask, other=0.0)  # [MERGE_M]
            out = normalize(m, l, acc, sink, USE_SINKS)
            tl.store(out_ptr + offs_o[:, None] + offs_d[None, :], out.to(out_ptr.dtype.element_ty), mask=acc_mask)
        else:
            idx = ((1 - WAVE) * NUM_KV_HEADS + kv_head) * BLOCK_M + offs_m
            tl.store(running_m_ptr + idx, m, mask=row_mask)
            tl.store(running_l_ptr + idx, l, mask=row_mask)
            tl.store(running_acc_ptr + idx[:, None] * PADDED_HEAD_DIM + offs_d[None, :], acc, mask=acc_mask)
