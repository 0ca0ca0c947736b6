"""Work items of paged attention on a GPU: ``plan_kernel`` writes them, the kernels in Triton and Gluon read them.

A list of work is [items, WORK_SIZE] int32 on the GPU. The names of the fields are constexprs of both languages.
"""

import triton
import triton.language as tl

from ..common.triton_names import aggregate

WORK_REQUEST = tl.constexpr(0)
WORK_ROW = tl.constexpr(1)
"""First row of the block, in prefill-like work: an item is for all KV heads."""
WORK_KV_HEAD = WORK_ROW
"""KV head, in decode-like work: an item has all rows of its request."""
WORK_SPLIT = tl.constexpr(2)
"""First split."""
WORK_NUM_SPLITS = tl.constexpr(3)
WORK_WORKSPACE_IDX = tl.constexpr(4)
"""Index in the workspace of the partial result that split 0 of the block would have; -1: none, the item is all of the
block.
"""
WORK_QUERY_START = tl.constexpr(5)
"""First row of the request in the query."""
WORK_QUERY_LEN = tl.constexpr(6)
"""Tokens of the request in the query."""
WORK_CONTEXT_LEN = tl.constexpr(7)
"""Keys of the request before its query."""
WORK_SIZE = tl.constexpr(8)
"""Numbers of an item."""


@aggregate
class Work:
    """A work item for one KV head."""

    request: tl.tensor  # int64
    kv_head: tl.tensor
    first_row: tl.tensor  # 0 in decode-like work
    first_split: tl.tensor
    num_splits: tl.tensor
    workspace_idx: tl.tensor
    query_start: tl.tensor
    query_len: tl.tensor
    context_len: tl.tensor


@triton.jit
def load_work(work_ptr, idx, NUM_KV_HEADS: tl.constexpr, PREFILL_LIKE: tl.constexpr):
    """A :class:`Work`: item ``idx`` of decode-like work; of prefill-like work, head ``idx % NUM_KV_HEADS`` of item
    ``idx // NUM_KV_HEADS``.
    """
    if PREFILL_LIKE:
        kv_head = idx % NUM_KV_HEADS
        item_ptr = work_ptr + idx // NUM_KV_HEADS * WORK_SIZE
        first_row = tl.load(item_ptr + WORK_ROW)
    else:
        item_ptr = work_ptr + idx * WORK_SIZE
        kv_head = tl.load(item_ptr + WORK_KV_HEAD)
        first_row = kv_head * 0  # a field of an aggregate is a tensor
    return Work(
        tl.load(item_ptr + WORK_REQUEST).to(tl.int64),
        kv_head,
        first_row,
        tl.load(item_ptr + WORK_SPLIT),
        tl.load(item_ptr + WORK_NUM_SPLITS),
        tl.load(item_ptr + WORK_WORKSPACE_IDX),
        tl.load(item_ptr + WORK_QUERY_START),
        tl.load(item_ptr + WORK_QUERY_LEN),
        tl.load(item_ptr + WORK_CONTEXT_LEN),
    )


@triton.jit
def store_work(
    item_ptrs, request, row_or_head, first_split, num_splits, workspace_idx, query_start, query_len, context_len, mask
):
    """Write items at ``item_ptrs``; ``first_split`` has their shape, what all have alike may be a scalar."""
    zero = first_split * 0
    tl.store(item_ptrs + WORK_REQUEST, zero + request, mask=mask)
    tl.store(item_ptrs + WORK_ROW, zero + row_or_head, mask=mask)
    tl.store(item_ptrs + WORK_SPLIT, first_split, mask=mask)
    tl.store(item_ptrs + WORK_NUM_SPLITS, num_splits, mask=mask)
    tl.store(item_ptrs + WORK_WORKSPACE_IDX, zero + workspace_idx, mask=mask)
    tl.store(item_ptrs + WORK_QUERY_START, zero + query_start, mask=mask)
    tl.store(item_ptrs + WORK_QUERY_LEN, zero + query_len, mask=mask)
    tl.store(item_ptrs + WORK_CONTEXT_LEN, zero + context_len, mask=mask)
