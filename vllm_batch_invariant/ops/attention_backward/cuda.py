"""Gradients of attention on a GPU, in Triton: a program has a tile of one sequence's queries, or of its keys.

The first kernel goes through a tile's keys twice: for the sums of its softmax and for delta, then for the gradient of
the queries. The second goes through the queries that see a tile of keys. No result is added to by two programs.
"""

import math
from itertools import pairwise

import torch
import triton
import triton.language as tl

from ..common.launch import launch
from ..common.triton_rows import aligned
from .reduction import AttentionBackwardReduction, AttentionBackwardSchedule


@triton.jit
def _sequence_and_tile(tiles_ptr, tile):
    """First and last + 1 row of a sequence, and first row of a tile of it."""
    ptr = tiles_ptr + 3 * tile
    return tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2)


@triton.jit
def _load_tile(
    ptr, rows, head, stop, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Rows [BLOCK, PADDED_HEAD_DIM] of a head, 0 from ``stop`` on."""
    offs_d = tl.arange(0, PADDED_HEAD_DIM)
    offs = (rows.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + offs_d[None, :]
    return tl.load(ptr + offs, mask=(rows < stop)[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _store_tile(
    ptr, tile, rows, head, stop, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr
):  # fmt: skip
    offs_d = tl.arange(0, PADDED_HEAD_DIM)
    offs = (rows.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + offs_d[None, :]
    mask = (rows < stop)[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(ptr + offs, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scores_log2(q, k, rows, keys, scale_log2):
    """Scores [BLOCK_M, BLOCK_N] in units of log2(e); -inf for keys after the row's."""
    qk = tl.dot(q, k.T, input_precision="ieee") * scale_log2
    return tl.where(keys[None, :] <= rows[:, None], qk, -float("inf"))


# These kernels have more than 12 parameters: a kernel takes no structure of pointers.
@triton.jit
def _query_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, of_q_ptr, lse_ptr, delta_ptr, tiles_ptr, scale, scale_log2,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of a tile of queries, and of each row log2 of the sum of its weights, and delta."""
    tile, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    start, stop, first = (
        tl.load(tiles_ptr + 3 * tile),
        tl.load(tiles_ptr + 3 * tile + 1),
        tl.load(tiles_ptr + 3 * tile + 2),
    )
    rows = first + tl.arange(0, BLOCK_M)
    q = _load_tile(q_ptr, rows, head, stop, NUM_HEADS, HEAD_DIM, PADDED_HEAD_DIM)
    do = _load_tile(grad_ptr, rows, head, stop, NUM_HEADS, HEAD_DIM, PADDED_HEAD_DIM)
    end = min(first + BLOCK_M, stop)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    weighted_dp = tl.zeros((BLOCK_M,), tl.float32)
    for key_start in range(start, end, BLOCK_N):
        keys = key_start + tl.arange(0, BLOCK_N)
        k = _load_tile(k_ptr, keys, kv_head, stop, NUM_KV_HEADS, HEAD_DIM, PADDED_HEAD_DIM)
        v = _load_tile(v_ptr, keys, kv_head, stop, NUM_KV_HEADS, HEAD_DIM, PADDED_HEAD_DIM)
        qk = _scores_log2(q, k, rows, keys, scale_log2)
        new_m = tl.maximum(m, tl.max(qk, 1))
        alpha = tl.exp2(m - new_m)
        p = tl.exp2(qk - new_m[:, None])
        dp = tl.dot(do, v.T, input_precision="ieee")
        l = l * alpha + tl.sum(p, 1)
        weighted_dp = weighted_dp * alpha + tl.sum(p * dp, 1)
        m = new_m
    lse, delta = m + tl.log2(l), weighted_dp / l
    of_row = rows.to(tl.int64) * NUM_HEADS + head
    tl.store(lse_ptr + of_row, lse, mask=rows < stop)
    tl.store(delta_ptr + of_row, delta, mask=rows < stop)
    dq = tl.zeros((BLOCK_M, PADDED_HEAD_DIM), tl.float32)
    for key_start in range(start, end, BLOCK_N):
        keys = key_start + tl.arange(0, BLOCK_N)
        k = _load_tile(k_ptr, keys, kv_head, stop, NUM_KV_HEADS, HEAD_DIM, PADDED_HEAD_DIM)
        v = _load_tile(v_ptr, keys, kv_head, stop, NUM_KV_HEADS, HEAD_DIM, PADDED_HEAD_DIM)
        p = tl.exp2(_scores_log2(q, k, rows, keys, scale_log2) - lse[:, None])
        ds = p * (tl.dot(do, v.T, input_precision="ieee") - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    _store_tile(of_q_ptr, dq * scale, rows, head, stop, NUM_HEADS, HEAD_DIM, PADDED_HEAD_DIM)


@triton.jit
def _key_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, of_k_ptr, of_v_ptr, lse_ptr, delta_ptr, tiles_ptr, scale, scale_log2,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of a tile of keys and values."""
    QUERIES_PER_KV: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    start, stop, first = (
        tl.load(tiles_ptr + 3 * tile),
        tl.load(tiles_ptr + 3 * tile + 1),
        tl.load(tiles_ptr + 3 * tile + 2),
    )
    keys = first + tl.arange(0, BLOCK_N)
    k = _load_tile(k_ptr, keys, kv_head, stop, NUM_KV_HEADS, HEAD_DIM, PADDED_HEAD_DIM)
    v = _load_tile(v_ptr, keys, kv_head, stop, NUM_KV_HEADS, HEAD_DIM, PADDED_HEAD_DIM)
    dk = tl.zeros((BLOCK_N, PADDED_HEAD_DIM), tl.float32)
    dv = tl.zeros((BLOCK_N, PADDED_HEAD_DIM), tl.float32)
    first_row = start + (first - start) // BLOCK_M * BLOCK_M
    for head in range(kv_head * QUERIES_PER_KV, (kv_head + 1) * QUERIES_PER_KV):
        for row_start in range(first_row, stop, BLOCK_M):
            rows = row_start + tl.arange(0, BLOCK_M)
            q = _load_tile(q_ptr, rows, head, stop, NUM_HEADS, HEAD_DIM, PADDED_HEAD_DIM)
            do = _load_tile(grad_ptr, rows, head, stop, NUM_HEADS, HEAD_DIM, PADDED_HEAD_DIM)
            of_row = rows.to(tl.int64) * NUM_HEADS + head
            # A row that is not there weighs nothing.
            lse = tl.load(lse_ptr + of_row, mask=rows < stop, other=float("inf"))
            delta = tl.load(delta_ptr + of_row, mask=rows < stop, other=0.0)
            p = tl.exp2(_scores_log2(q, k, rows, keys, scale_log2) - lse[:, None])
            ds = p * (tl.dot(do, v.T, input_precision="ieee") - delta[:, None])
            dv = tl.dot(p.to(do.dtype).T, do, dv, input_precision="ieee")
            dk = tl.dot(ds.to(q.dtype).T, q, dk, input_precision="ieee")
    _store_tile(of_k_ptr, dk * scale, keys, kv_head, stop, NUM_KV_HEADS, HEAD_DIM, PADDED_HEAD_DIM)
    _store_tile(of_v_ptr, dv, keys, kv_head, stop, NUM_KV_HEADS, HEAD_DIM, PADDED_HEAD_DIM)


def _tiles(cu_seqlens: list[int], block: int, device: torch.device) -> torch.Tensor:
    """[tiles, 3] int32: first and last + 1 token of the sequence, first token of the tile."""
    listed = [(start, stop, first) for start, stop in pairwise(cu_seqlens) for first in range(start, stop, block)]
    return torch.tensor(listed, dtype=torch.int32).reshape(-1, 3).to(device)


def attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: list[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    (tokens, heads, head_size), kv_heads = query.shape, key.shape[1]
    reduction = AttentionBackwardReduction.of_device("cuda", head_size, query.dtype)
    schedule = AttentionBackwardSchedule.of_dtype(query.dtype)
    grad, query, key, value = (aligned(tensor) for tensor in (grad, query, key, value))
    of_query, of_key, of_value = (torch.empty_like(tensor) for tensor in (query, key, value))
    lse, delta = (torch.empty(tokens, heads, dtype=reduction.accumulate, device=query.device) for _ in range(2))
    query_tiles = _tiles(cu_seqlens, reduction.block_m, query.device)
    key_tiles = _tiles(cu_seqlens, reduction.block_n, query.device)
    if not tokens:
        return of_query, of_key, of_value
    scales = (scale, scale * math.log2(math.e))
    constants = {
        "NUM_HEADS": heads,
        "NUM_KV_HEADS": kv_heads,
        "HEAD_DIM": head_size,
        "PADDED_HEAD_DIM": triton.next_power_of_2(head_size),
        "BLOCK_M": reduction.block_m,
        "BLOCK_N": reduction.block_n,
        "num_warps": reduction.num_warps,
        "num_stages": schedule.num_stages,
        "enable_fp_fusion": reduction.enable_fp_fusion,
    }
    inputs = (grad, query, key, value)
    launch(
        _query_kernel,
        (len(query_tiles), heads),
        (*inputs, of_query, lse, delta, query_tiles, *scales),
        on=query,
        **constants,
    )
    launch(
        _key_kernel,
        (len(key_tiles), kv_heads),
        (*inputs, of_key, of_value, lse, delta, key_tiles, *scales),
        on=query,
        **constants,
    )
    return of_query, of_key, of_value
