"""RMSNorm and rotary embedding of heads on a GPU, in Triton: a program has several heads of one token.

x = qkv * rsqrt(mean(qkv**2) + eps) * weight, head by head; without norms x = qkv
out = x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin

Keys, and values as they are, may go to their pages of a cache at once, also as codes.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..common.dependent_launch import wait_for_kernel_before
from ..common.kv_cache import CacheSlots, scale_strides
from ..common.launch import launch
from ..common.rows import with_packed_rows
from ..common.triton_rows import ALIGNMENT, aligned, row_sums
from ..kv_cache.triton_kernels import codes_of
from ..norm.triton_kernels import rstd_of, weighted
from .reduction import NormRotaryReduction

if TYPE_CHECKING:
    from . import Sections


@triton.jit
def _position(positions_ptr, token, stride_row, frequency, SECTIONS: tl.constexpr):
    """Of a token, or of each frequency where it has three."""
    if SECTIONS is None:
        position = tl.load(positions_ptr + token)
    else:
        if SECTIONS.interleaved:
            is_height = (frequency % 3 == 1) & (frequency < 3 * SECTIONS.height)
            is_width = (frequency % 3 == 2) & (frequency < 3 * SECTIONS.width)
            row = tl.where(is_height, 1, tl.where(is_width, 2, 0))
        else:
            of_width = frequency >= SECTIONS.time + SECTIONS.height
            row = (frequency >= SECTIONS.time).to(tl.int32) + of_width.to(tl.int32)
        position = tl.load(positions_ptr + row * stride_row + token)
    return position


@triton.jit
def _turned(
    first, second, weight_ptr, cos_sin_ptrs, head_offs, mask, eps, HAS_NORMS: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Both halves of heads, each [rows_per_program, block], normalised and turned."""
    dtype: tl.constexpr = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    cos = tl.load(cos_sin_ptrs, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(cos_sin_ptrs + NORM.block, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORMS:
        first_weight = tl.load(weight_ptr + head_offs, mask=mask, other=0.0)
        second_weight = tl.load(weight_ptr + head_offs + NORM.block, mask=mask, other=0.0)
        rstd = rstd_of(row_sums(first * first + second * second, 32 * NORM.num_warps), NORM.length, eps)[:, None]
        first = weighted(first * rstd, first_weight).to(tl.float32)
        second = weighted(second * rstd, second_weight).to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def _store_halves(out_ptrs, first, second, mask, NORM: tl.constexpr):
    """Both halves of heads, [rows_per_program, block]."""
    tl.store(out_ptrs, first, mask=mask)
    tl.store(out_ptrs + NORM.block, second, mask=mask)


# 26 parameters: a kernel takes no structure of pointers.
@triton.jit(
    do_not_specialize=["stride_scale", "num_slots", "stride_token", "stride_row"],
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"],
)
def _norm_rotary_kernel(
    qkv_ptr,
    positions_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_sin_cache_ptr,
    query_out_ptr,
    key_out_ptr,
    value_out_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    stride_scale,
    num_slots,
    stride_token,
    stride_row,
    stride_page,
    stride_head,
    stride_slot,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HOLDS_CODES: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    SECTIONS: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Turns the heads of a group, of queries or of keys; with PAGE_SIZE there are groups of values, which are copied.

    Args:
        qkv_ptr: [tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * head_size]
        positions_ptr: [tokens] int64; with SECTIONS three such rows, ``stride_row`` apart.
        query_out_ptr: [tokens, NUM_HEADS * head_size]
        key_out_ptr, value_out_ptr: caches [pages, NUM_KV_HEADS, PAGE_SIZE, head_size]; without PAGE_SIZE keys
            [tokens, NUM_KV_HEADS * head_size], and nothing. Codes are uint8.
        slots_ptr: [num_slots] int64, where in the caches the first tokens go. The others go nowhere, as do those with a
            negative one.
        k_scale_ptr, v_scale_ptr: fp32, of each head, ``stride_scale`` apart, with HOLDS_CODES, and None without.
    """
    wait_for_kernel_before(OVERLAPS)
    QUERY_GROUPS: tl.constexpr = (NUM_HEADS + NORM.rows_per_program - 1) // NORM.rows_per_program
    KEY_GROUPS: tl.constexpr = (NUM_KV_HEADS + NORM.rows_per_program - 1) // NORM.rows_per_program
    GROUPS: tl.constexpr = QUERY_GROUPS + KEY_GROUPS * (2 if PAGE_SIZE > 0 else 1)
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    x_ptr = qkv_ptr + token * stride_token * NORM.stride_unit
    is_value = group >= QUERY_GROUPS + KEY_GROUPS
    if group < QUERY_GROUPS:
        first_head, num_heads, weight_ptr = group * NORM.rows_per_program, NUM_HEADS, query_weight_ptr
    else:
        first_head, num_heads, weight_ptr = (group - QUERY_GROUPS) * NORM.rows_per_program, NUM_KV_HEADS, key_weight_ptr
        x_ptr += NUM_HEADS * NORM.length
        if is_value:
            first_head -= KEY_GROUPS * NORM.rows_per_program
            x_ptr += NUM_KV_HEADS * NORM.length
    head = first_head + tl.arange(0, NORM.rows_per_program)
    # Every tile is [rows_per_program, block]: a half of each head.
    offs = head[:, None] * NORM.length + tl.arange(0, NORM.block)[None, :]
    mask = tl.broadcast_to(head[:, None] < num_heads, offs.shape)
    head_offs = tl.broadcast_to(tl.arange(0, NORM.block)[None, :], offs.shape)
    first = tl.load(x_ptr + offs, mask=mask, other=0.0)
    second = tl.load(x_ptr + offs + NORM.block, mask=mask, other=0.0)
    if not is_value:
        position = _position(positions_ptr, token, stride_row, head_offs, SECTIONS)
        cos_sin_ptrs = cos_sin_cache_ptr + position * NORM.length + head_offs
        first, second = _turned(first, second, weight_ptr, cos_sin_ptrs, head_offs, mask, eps, HAS_NORMS, NORM)
    if group < QUERY_GROUPS:
        query_ptrs = query_out_ptr + token * (NUM_HEADS * NORM.length) + offs
        _store_halves(query_ptrs, first, second, mask, NORM)
    elif PAGE_SIZE > 0:
        slot = tl.load(slots_ptr + token, mask=token < num_slots, other=-1)
        mask = tl.broadcast_to(head[:, None] < tl.where(slot < 0, 0, num_heads), offs.shape)
        out_ptr = (value_out_ptr if is_value else key_out_ptr) + slot // PAGE_SIZE * stride_page
        out_ptrs = out_ptr + slot % PAGE_SIZE * stride_slot + head[:, None] * stride_head + head_offs
        if HOLDS_CODES:
            scale_ptrs = (v_scale_ptr if is_value else k_scale_ptr) + head * stride_scale
            scale = tl.broadcast_to(tl.load(scale_ptrs, mask=head < num_heads, other=1.0)[:, None], offs.shape)
            _store_halves(out_ptrs, codes_of(first, scale), codes_of(second, scale), mask, NORM)
        else:
            _store_halves(out_ptrs, first, second, mask, NORM)
    else:
        out_ptrs = key_out_ptr + token * (NUM_KV_HEADS * NORM.length) + offs
        _store_halves(out_ptrs, first, second, mask, NORM)


def norm_rotary(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    eps: float,
    heads: int,
    kv_heads: int,
    cache: CacheSlots | None = None,
    sections: "Sections | None" = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See the operation's package; with a cache keys and values go there, and no keys are returned."""
    num_tokens, head_size = positions.shape[-1], cos_sin_cache.shape[1]
    positions = with_packed_rows(positions)
    angles = aligned(cos_sin_cache)
    weights = [angles if weight is None else aligned(weight) for weight in (query_weight, key_weight)]
    reduction = NormRotaryReduction.of_device("cuda", head_size, qkv.dtype)
    stride_token, stride_element = qkv.stride()
    if stride_element != 1 or stride_token % reduction.stride_unit or qkv.data_ptr() % ALIGNMENT:
        qkv = aligned(qkv)
        stride_token = qkv.shape[1]
    queries = torch.empty(num_tokens, heads * head_size, dtype=qkv.dtype, device=qkv.device)
    if cache is None:
        keys = torch.empty(num_tokens, kv_heads * head_size, dtype=qkv.dtype, device=qkv.device)
        outputs, strides = (keys, None, None, None, None, 0, 0), (0, 0, 0)
    else:
        keys, held, strides = None, (cache.keys, cache.values), cache.keys.stride()[:3]
        if cache.k_scale is not None:
            held = cache.keys.view(torch.uint8), cache.values.view(torch.uint8)
        scales = cache.k_scale, cache.v_scale, scale_strides(cache.k_scale)[1]
        outputs = (*held, cache.slots, *scales, len(cache.slots))
    if num_tokens:
        kinds = (heads, kv_heads) if cache is None else (heads, kv_heads, kv_heads)
        groups = sum(-(-kind // reduction.rows_per_program) for kind in kinds)
        launch(
            _norm_rotary_kernel,
            num_tokens * groups,
            (
                qkv,
                positions,
                *weights,
                angles,
                queries,
                *outputs,
                stride_token // reduction.stride_unit,
                positions.stride(0),
                *strides,
                eps,
            ),
            on=qkv,
            waits=True,
            NUM_HEADS=heads,
            NUM_KV_HEADS=kv_heads,
            PAGE_SIZE=0 if cache is None else cache.page_size,
            HOLDS_CODES=cache is not None and cache.k_scale is not None,
            HAS_NORMS=query_weight is not None,
            SECTIONS=sections,
            **reduction.options,
        )
    return queries, keys
