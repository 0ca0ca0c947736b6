"""Paged attention on a GPU, in Triton: one kernel for prefill and decode.

A program walks all splits of its rows in order, or, where there are few rows, one split, which a second kernel merges
with the others in the same order by the same function: a matter of speed.

A row's bits follow from its own keys by construction: masked keys weigh exactly 0, a tile without a visible key changes
nothing, weights are summed by the tensor cores like the values they weigh, and products and sums of vectors are fused
only where the source says so. What is measured and not constructed: that tensor cores give a row the same bits in a
block of 16 and of 64 rows.
Online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867; tiles as in FlashAttention, Dao et al. 2022,
arXiv:2205.14135; splits as in Flash-Decoding, pytorch.org/blog/flash-decoding.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from ...errors import NotCovered
from .inputs import PagedAttention

_LOG2_E = math.log2(math.e)
_LARGEST_HEAD = 256
_ONES = tl.constexpr(16)
"""Equal columns of the sums of weights: a matrix product has at least so many."""


FEW_ROWS = 16
"""Rows up to which a request gets a small block."""
PROGRAMS_ENOUGH = 528
"""Programs from which on each walks all its splits; below, each takes one. Four a multiprocessor of an H100."""
SPLITS_WORTH_MERGING = 5
"""Splits of the longest request from which on the second launch is earned back."""
MOST_PARTIALS = 1 << 26
"""Elements of partial results above which programs walk their splits, too."""


@dataclass(frozen=True)
class Blocks:
    """How a program holds its query rows, (token, head of the group) pairs of one request: speed only."""

    rows: int
    warps: int
    stages: int


def key_tile(dtype: torch.dtype, split_size: int) -> int:
    """Keys taken in one step of the online softmax; a part of the reduction."""
    return min(32 if dtype == torch.float32 else 64, split_size)


def blocks_for(rows: int, head_size: int, dtype: torch.dtype) -> Blocks:
    """The block for a request with ``rows`` rows."""
    if dtype == torch.float32:
        # Products in fp32 hold whole rows of both operands in registers.
        return Blocks(16, warps=8, stages=1)
    if rows <= FEW_ROWS:
        return Blocks(16, warps=4, stages=3)
    return Blocks(64, warps=8 if head_size > 128 else 4, stages=2)


@triton.jit
def _finite(top):
    """The number to subtract before exp2: 0 where nothing was visible, so that -inf gives a weight of 0 and not NaN."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def _merge_splits(top, weight, acc, split_top, split_weight, split_acc):
    """The running result and one more split; a split without a visible key weighs exactly 0."""
    new_top = tl.maximum(top, split_top)
    old, new = tl.exp2(top - _finite(new_top)), tl.exp2(split_top - _finite(new_top))
    weight = tl.fma(weight, old, split_weight * new)
    acc = tl.fma(acc, old[:, None], split_acc * new[:, None])
    return new_top, weight, acc


@triton.jit
def _normalised(weight, acc):
    return acc / tl.where(weight == 0.0, 1.0, weight)[:, None]


@triton.jit
def _tanh(x):
    """tanh from exp2 alone, off by at most an ulp of 1."""
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    return tl.where(x < 0, e - 1.0, 1.0 - e) / (1.0 + e)


@triton.jit(do_not_specialize=["table_stride"])
def _attention_kernel(
    query,
    key_cache,
    value_cache,
    out,
    table,
    seq_lens,
    query_start_loc,
    work,
    slopes,
    partial_top,
    partial_weight,
    partial_acc,
    scale,
    soft_cap,
    window,
    page_size,
    table_stride,
    stride_q_token,
    stride_q_head,
    stride_q_dim,
    stride_k_page,
    stride_k_head,
    stride_k_slot,
    stride_v_page,
    stride_v_head,
    stride_v_slot,
    stride_o_token,
    stride_o_head,
    stride_o_dim,
    has_soft_cap: tl.constexpr,
    has_slopes: tl.constexpr,
    has_window: tl.constexpr,
    group: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
    split: tl.constexpr,
    tile: tl.constexpr,
    block_rows: tl.constexpr,
    one_split: tl.constexpr,
):
    work += 3 * tl.program_id(0)
    request = tl.load(work).to(tl.int64)
    first_row = tl.load(work + 1)
    kv_head = tl.program_id(1)
    start = tl.load(query_start_loc + request)
    tokens = (tl.load(query_start_loc + request + 1) - start).to(tl.int32)
    past = tl.load(seq_lens + request).to(tl.int32) - tokens

    rows = first_row + tl.arange(0, block_rows)
    token = rows // group
    head = kv_head * group + rows % group
    position = past + token
    dims = tl.arange(0, padded_size)
    in_head = dims < head_size
    exists = (token < tokens)[:, None] & in_head[None, :]
    place = (start + token).to(tl.int64)
    q = tl.load(
        query + place[:, None] * stride_q_token + head[:, None] * stride_q_head + dims[None, :] * stride_q_dim,
        mask=exists,
        other=0.0,
    )
    if has_slopes:
        slope = tl.load(slopes + head)

    # Keys that some row of the block sees; beyond them may lie anything, NaN included.
    stop = past + min((first_row + block_rows - 1) // group, tokens - 1) + 1
    first_key = 0
    if has_window:
        first_key = max(past + first_row // group - window + 1, 0)
    table += request * table_stride
    key_cache += kv_head.to(tl.int64) * stride_k_head
    value_cache += kv_head.to(tl.int64) * stride_v_head
    ones = tl.full((tile, _ONES), 1.0, value_cache.dtype.element_ty)

    top = tl.full((block_rows,), -float("inf"), tl.float32)
    weight = tl.zeros((block_rows,), tl.float32)
    acc = tl.zeros((block_rows, padded_size), tl.float32)
    first_split = first_key // split
    end = stop
    if one_split:
        first_split = tl.load(work + 2)
        end = min(stop, (first_split + 1) * split)
    for split_start in range(first_split * split, end, split):
        split_top = tl.full((block_rows,), -float("inf"), tl.float32)
        split_weight = tl.zeros((block_rows, _ONES), tl.float32)
        split_acc = tl.zeros((block_rows, padded_size), tl.float32)
        first_tile = max(split_start, first_key // tile * tile)
        for tile_start in range(first_tile, min(split_start + split, stop), tile):
            keys = tile_start + tl.arange(0, tile)
            needed = (keys >= first_key) & (keys < stop)
            page = tl.load(table + keys // page_size, mask=needed, other=0).to(tl.int64)
            slot = keys % page_size
            k = tl.load(
                key_cache + page[None, :] * stride_k_page + slot[None, :] * stride_k_slot + dims[:, None],
                mask=needed[None, :] & in_head[:, None],
                other=0.0,
            )
            v = tl.load(
                value_cache + page[:, None] * stride_v_page + slot[:, None] * stride_v_slot + dims[None, :],
                mask=needed[:, None] & in_head[None, :],
                other=0.0,
            )
            # In units of log2(e), which the arguments bring along.
            score = tl.dot(q, k, input_precision="ieee") * scale
            if has_soft_cap:
                score = soft_cap * _tanh(score / soft_cap)
            distance = position[:, None] - keys[None, :]
            if has_slopes:
                score -= slope[:, None] * distance.to(tl.float32)
            visible = distance >= 0
            if has_window:
                visible &= distance < window
            score = tl.where(visible, score, -float("inf"))
            new_top = tl.maximum(split_top, tl.max(score, 1))
            p = tl.exp2(score - _finite(new_top)[:, None]).to(v.dtype)
            old = tl.exp2(split_top - _finite(new_top))[:, None]
            split_weight = tl.dot(p, ones, split_weight * old, input_precision="ieee")
            split_acc = tl.dot(p, v, split_acc * old, input_precision="ieee")
            split_top = new_top
        # All columns are equal, so the largest is any of them.
        top, weight, acc = _merge_splits(top, weight, acc, split_top, tl.max(split_weight, 1), split_acc)

    if one_split:
        # Merging one split with nothing changed no bit of it.
        item = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + kv_head
        slots = item * block_rows + tl.arange(0, block_rows)
        tl.store(partial_top + slots, top, mask=token < tokens)
        tl.store(partial_weight + slots, weight, mask=token < tokens)
        tl.store(partial_acc + slots[:, None] * padded_size + dims[None, :], acc, mask=exists)
    else:
        tl.store(
            out + place[:, None] * stride_o_token + head[:, None] * stride_o_head + dims[None, :] * stride_o_dim,
            _normalised(weight, acc).to(out.dtype.element_ty),
            mask=exists,
        )


@triton.jit
def _merge_kernel(
    partial_top,
    partial_weight,
    partial_acc,
    blocks,
    query_start_loc,
    out,
    stride_o_token,
    stride_o_head,
    stride_o_dim,
    group: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
    block_rows: tl.constexpr,
):
    """One row of a block: its splits ascending."""
    blocks += 4 * (tl.program_id(0) // block_rows)
    request = tl.load(blocks)
    row_of_block = tl.program_id(0) % block_rows
    first_item = tl.load(blocks + 2).to(tl.int64)
    splits = tl.load(blocks + 3)
    kv_head = tl.program_id(1)
    start = tl.load(query_start_loc + request).to(tl.int64)
    tokens = tl.load(query_start_loc + request + 1) - start
    row = tl.load(blocks + 1) + row_of_block
    if row // group >= tokens:
        return
    dims = tl.arange(0, padded_size)
    in_head = (dims < head_size)[None, :]
    top = tl.full((1,), -float("inf"), tl.float32)
    weight = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, padded_size), tl.float32)
    for item in tl.range(first_item, first_item + splits, loop_unroll_factor=8):
        slot = (item * tl.num_programs(1) + kv_head) * block_rows + row_of_block + tl.arange(0, 1)
        split_top = tl.load(partial_top + slot)
        split_weight = tl.load(partial_weight + slot)
        split_acc = tl.load(partial_acc + slot[:, None] * padded_size + dims[None, :], mask=in_head, other=0.0)
        top, weight, acc = _merge_splits(top, weight, acc, split_top, split_weight, split_acc)
    out += (start + row // group) * stride_o_token + (kv_head * group + row % group) * stride_o_head
    tl.store(out + dims[None, :] * stride_o_dim, _normalised(weight, acc).to(out.dtype.element_ty), mask=in_head)


def _plan(call: PagedAttention, requests: np.ndarray, group: int, block_rows: int) -> tuple[np.ndarray, ...]:
    """The blocks of query rows of the requests, those with the most keys first.

    Returns:
        request, first row, first split and number of splits of each block.
    """
    tokens = np.diff(call.starts)
    counts = -(-tokens[requests] * group // block_rows)
    request = np.repeat(requests, counts)
    first_row = (np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)) * block_rows
    past = (call.lengths - tokens)[request]
    stop = past + np.minimum((first_row + block_rows - 1) // group, tokens[request] - 1) + 1
    window = call.sliding_window or int(stop.max())
    first_split = np.maximum(past + first_row // group - window + 1, 0) // call.reduction.split_size
    splits = (stop - 1) // call.reduction.split_size + 1 - first_split
    order = np.argsort(-stop, kind="stable")
    return tuple(column[order] for column in (request, first_row, first_split, splits))


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def paged_attention(call: PagedAttention, out: torch.Tensor) -> None:
    """Write the attention of ``call`` to ``out``; see the operation's package for the contract.

    A request's own keys and values must be finite: a row weighs the later ones of its block by 0.

    Raises:
        NotCovered: a head size above 256.
    """
    heads, head_size = call.query.shape[1:]
    if head_size > _LARGEST_HEAD:
        raise NotCovered(
            f"attention heads of size {head_size}", f"the kernel has sizes up to {_LARGEST_HEAD}", "serve another model"
        )
    rows = np.diff(call.starts) * (heads // call.key_cache.shape[1])
    with torch.cuda.device_of(call.query):
        for requests in (np.flatnonzero(rows > FEW_ROWS), np.flatnonzero((rows > 0) & (rows <= FEW_ROWS))):
            if len(requests):
                _attend(call, out, requests, blocks_for(int(rows[requests[0]]), head_size, call.query.dtype))


def _attend(call: PagedAttention, out: torch.Tensor, requests: np.ndarray, blocks: Blocks) -> None:
    """The rows of some requests, in blocks of one size."""
    device = call.query.device
    (heads, head_size), kv_heads = call.query.shape[1:], call.key_cache.shape[1]
    shape = {
        "group": heads // kv_heads,
        "head_size": head_size,
        "padded_size": triton.next_power_of_2(head_size),
        "block_rows": blocks.rows,
    }
    request, first_row, first_split, splits = _plan(call, requests, shape["group"], blocks.rows)
    partial_size = int(splits.sum()) * kv_heads * blocks.rows * shape["padded_size"]
    few = len(request) * kv_heads < PROGRAMS_ENOUGH and partial_size <= MOST_PARTIALS
    one_split = few and int(splits.max()) >= SPLITS_WORTH_MERGING
    first_item = np.cumsum(splits) - splits
    if one_split:
        work = [np.repeat(column, splits) for column in (request, first_row, first_split - first_item)]
        work[2] += np.arange(len(work[2]))
    else:
        work = [request, first_row, first_split]
    items = len(work[0])
    partials: list[torch.Tensor | None] = [None] * 3
    if one_split:
        sizes = ((), (), (shape["padded_size"],))
        partials = [torch.empty(items, kv_heads, blocks.rows, *size, device=device) for size in sizes]
    table, starts = _unit_stride(call.block_table.to(device)), call.query_start_loc.to(device).contiguous()
    key_cache, value_cache = _unit_stride(call.key_cache), _unit_stride(call.value_cache)
    slopes = None if call.alibi_slopes is None else call.alibi_slopes.to(device, torch.float32) * _LOG2_E
    _attention_kernel[(items, kv_heads)](
        call.query,
        key_cache,
        value_cache,
        out,
        table,
        call.seq_lens.to(device).contiguous(),
        starts,
        _on(device, work),
        slopes,
        *partials,
        call.scale * _LOG2_E,
        (call.logits_soft_cap or 0.0) * _LOG2_E,
        call.sliding_window or 0,
        call.page_size,
        table.stride(0),
        *call.query.stride(),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *out.stride(),
        has_soft_cap=call.logits_soft_cap is not None,
        has_slopes=slopes is not None,
        has_window=call.sliding_window is not None,
        split=call.reduction.split_size,
        tile=key_tile(call.query.dtype, call.reduction.split_size),
        one_split=one_split,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        enable_fp_fusion=False,
        **shape,
    )
    if one_split:
        _merge_kernel[(len(request) * blocks.rows, kv_heads)](
            *partials,
            _on(device, [request, first_row, first_item, splits]),
            starts,
            out,
            *out.stride(),
            num_warps=1,
            enable_fp_fusion=False,
            **shape,
        )


def _on(device: torch.device, columns: list[np.ndarray]) -> torch.Tensor:
    """The columns side by side, int32, on the device."""
    return torch.from_numpy(np.stack(columns, axis=1).astype(np.int32)).to(device)
