"""The paged cache of exact attention, in Triton: keys and values as int8 digits, on the grids of their rows.

A page of a KV head has, in the bytes of its keys and values in bf16,

    k1, k0 [PAGE_SIZE, HEAD_DIM],  v1, v0 [HEAD_DIM, PAGE_SIZE]

and elsewhere the exponents of a slot's grids, of the key and of the value. A row is put on its grid once, when it is
written, and not again for every block of queries that sees it. Values are transposed because int8 tensor cores add
along contiguous elements.
"""

import triton
import triton.language as tl

from ..common.triton_exact_math import digits_of, finest_of_two_digits, from_bf16, is_finite, power_of_two, rint, top_of
from ..common.triton_names import aggregate, value

NOT_FINITE = tl.constexpr(127)
"""In the place of the exponent of a row that has an infinity or NaN; exponents are -126 to 113."""
GROUP = tl.constexpr(16)
"""Slots that lie side by side: a page has a multiple of them, and so has what a tile takes of it."""


@aggregate
class Cache:
    """The keys and values that a block sees of one KV head."""

    digits_ptr: tl.tensor
    exponents_ptr: tl.tensor
    block_table_ptr: tl.tensor  # of the request
    stride_page: value  # bytes
    kv_head: tl.tensor
    first_key: value  # that some row sees
    kv_end: tl.tensor
    NUM_KV_HEADS: tl.constexpr
    KEY_TILE: tl.constexpr
    PAGE_SIZE: tl.constexpr
    HEAD_DIM: tl.constexpr
    PADDED_HEAD_DIM: tl.constexpr


@triton.jit
def on_grids(a, AXIS: tl.constexpr):
    """Rows along an axis of ``a`` fp32 as digits, int8 of its shape; the exponents of their grids; which are finite."""
    top = top_of(a, AXIS)
    finite, e = is_finite(top), finest_of_two_digits(top)
    high, low = digits_of(rint(tl.where(tl.expand_dims(finite, AXIS), a, 0.0) * tl.expand_dims(power_of_two(-e), AXIS)))
    return high, low, tl.where(finite, e, 0), finite


@triton.jit
def load_pages(cache, tile_start):
    """The physical pages of a tile's keys, [KEY_TILE] int64. Asked for a tile ahead: loads whose addresses wait for
    other loads would not be pipelined.
    """
    offs_n = tile_start + tl.arange(0, cache.KEY_TILE)
    # Whole groups of slots, whose addresses load_tile takes for contiguous.
    needed = (offs_n >= cache.first_key // GROUP * GROUP) & (offs_n < cache.kv_end)
    return tl.load(cache.block_table_ptr + offs_n // cache.PAGE_SIZE, mask=needed, other=0).to(tl.int64)


@triton.jit
def load_tile(cache, page, tile_start):
    """Digits ``k1``, ``k0`` [PADDED_HEAD_DIM, KEY_TILE] and ``v1``, ``v0`` [KEY_TILE, PADDED_HEAD_DIM] of a tile, and
    the exponents of keys and values. An unwritten slot has any.
    """
    PLANE: tl.constexpr = cache.PAGE_SIZE * cache.HEAD_DIM
    offs_d, slot = tl.arange(0, cache.PADDED_HEAD_DIM), (tile_start + tl.arange(0, cache.KEY_TILE)) % cache.PAGE_SIZE
    start = page * cache.stride_page + cache.kv_head.to(tl.int64) * (4 * PLANE)
    k_ptrs = cache.digits_ptr + (start + slot * cache.HEAD_DIM)[:, None] + offs_d[None, :]
    offs_v = tl.max_contiguous(tl.multiple_of(start + slot, GROUP), GROUP)
    v_ptrs = cache.digits_ptr + 2 * PLANE + offs_d[:, None] * cache.PAGE_SIZE + offs_v[None, :]
    if cache.HEAD_DIM == cache.PADDED_HEAD_DIM:
        k1, k0 = tl.load(k_ptrs), tl.load(k_ptrs + PLANE)
        v1, v0 = tl.load(v_ptrs), tl.load(v_ptrs + PLANE)
    else:
        in_k, in_v = (offs_d < cache.HEAD_DIM)[None, :], (offs_d < cache.HEAD_DIM)[:, None]
        k1, k0 = tl.load(k_ptrs, mask=in_k, other=0), tl.load(k_ptrs + PLANE, mask=in_k, other=0)
        v1, v0 = tl.load(v_ptrs, mask=in_v, other=0), tl.load(v_ptrs + PLANE, mask=in_v, other=0)
    e_ptrs = cache.exponents_ptr + (page * cache.NUM_KV_HEADS + cache.kv_head) * (2 * cache.PAGE_SIZE) + slot
    k_e, v_e = tl.load(e_ptrs).to(tl.int32), tl.load(e_ptrs + cache.PAGE_SIZE).to(tl.int32)
    return k1.T, k0.T, v1.T, v0.T, k_e, v_e


@triton.jit
def _write_exponents(ptrs, e, finite, written):
    tl.store(ptrs, tl.where(finite, e, NOT_FINITE).to(tl.int8), mask=written)


@triton.jit(do_not_specialize=["tokens"])
def write_cache_kernel(
    k_ptr,
    v_ptr,
    slots_ptr,
    digits_ptr,
    exponents_ptr,
    tokens,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_page,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Writes ROWS tokens of a KV head to their slots.

    Args:
        k_ptr, v_ptr: bf16 [tokens, NUM_KV_HEADS, HEAD_DIM], packed along the last.
        slots_ptr: [tokens] int64, page * PAGE_SIZE + slot; negative for padding.
        digits_ptr: int8, pages at multiples of ``stride_page``.
        exponents_ptr: int8 [pages, NUM_KV_HEADS, 2, PAGE_SIZE].
    """
    PLANE: tl.constexpr = PAGE_SIZE * HEAD_DIM
    token, head = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    place = tl.load(slots_ptr + token, mask=token < tokens, other=-1)
    written, offs_d = place >= 0, tl.arange(0, PADDED_HEAD_DIM)
    page, slot = place // PAGE_SIZE, place % PAGE_SIZE
    mask = written[:, None] & (offs_d < HEAD_DIM)[None, :]
    k_ptrs = k_ptr + token[:, None] * stride_k_token + head * stride_k_head + offs_d[None, :]
    v_ptrs = v_ptr + token[:, None] * stride_v_token + head * stride_v_head + offs_d[None, :]
    k1, k0, k_e, k_finite = on_grids(from_bf16(tl.load(k_ptrs, mask=mask, other=0.0)), 1)
    v1, v0, v_e, v_finite = on_grids(from_bf16(tl.load(v_ptrs, mask=mask, other=0.0)), 1)
    start = page * stride_page + head.to(tl.int64) * (4 * PLANE)
    k_ptrs = digits_ptr + (start + slot * HEAD_DIM)[:, None] + offs_d[None, :]
    v_ptrs = digits_ptr + 2 * PLANE + (start + slot)[:, None] + offs_d[None, :] * PAGE_SIZE
    tl.store(k_ptrs, k1, mask=mask)
    tl.store(k_ptrs + PLANE, k0, mask=mask)
    tl.store(v_ptrs, v1, mask=mask)
    tl.store(v_ptrs + PLANE, v0, mask=mask)
    e_ptrs = exponents_ptr + (page * NUM_KV_HEADS + head) * (2 * PAGE_SIZE) + slot
    _write_exponents(e_ptrs, k_e, k_finite, written)
    _write_exponents(e_ptrs + PAGE_SIZE, v_e, v_finite, written)
