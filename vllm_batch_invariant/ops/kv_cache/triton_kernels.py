"""The Triton kernels that write keys and values to a cache."""

import triton
import triton.language as tl

from ..common.dependent_launch import wait_for_kernel_before
from ..common.kv_cache import LARGEST, LEAST_SCALE
from ..common.triton_e4m3 import to_e4m3

_LARGEST = tl.constexpr(LARGEST)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)


@triton.jit
def codes_of(x, scale):
    """Codes uint8 in e4m3 of numbers, with a scale each."""
    n = tl.div_rn(x.to(tl.float32), scale)
    # A comparison with NaN is false.
    n = tl.where(n < -_LARGEST, -_LARGEST, n)
    return to_e4m3(tl.where(n > _LARGEST, _LARGEST, n))


@triton.jit
def _write(x_ptr, held_ptr, scale_ptr, stride_scale, slot, stride_page, stride_head, stride_slot, stride_element,
           HOLDS_CODES: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    offs = tl.arange(0, BLOCK)
    mask = offs < NUM_KV_HEADS * HEAD_DIM
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    held_ptr += slot // PAGE_SIZE * stride_page + slot % PAGE_SIZE * stride_slot
    held_ptrs = held_ptr + offs // HEAD_DIM * stride_head + offs % HEAD_DIM * stride_element
    if HOLDS_CODES:
        scale = tl.load(scale_ptr + offs // HEAD_DIM * stride_scale, mask=mask, other=1.0)
        tl.store(held_ptrs, codes_of(x, scale), mask=mask)
    else:
        tl.store(held_ptrs, x.to(held_ptr.dtype.element_ty), mask=mask)


# 19 parameters: a kernel takes no structure of pointers.
@triton.jit(do_not_specialize=["stride_scale"], do_not_specialize_on_alignment=["slots_ptr"])
def write_kernel(
    key_ptr,
    value_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    stride_scale,
    stride_key,
    stride_value,
    stride_k_page,
    stride_k_head,
    stride_k_slot,
    stride_k_element,
    stride_v_page,
    stride_v_head,
    stride_v_slot,
    stride_v_element,
    HOLDS_CODES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Writes the keys of a token, or in the second row of programs its values. A negative slot is padding.

    Args:
        key_ptr, value_ptr: [tokens, NUM_KV_HEADS * HEAD_DIM], so many elements apart.
        keys_ptr, values_ptr: [pages, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM]; codes are uint8.
        k_scale_ptr, v_scale_ptr: fp32, of each head, ``stride_scale`` apart, with HOLDS_CODES, and None without.
    """
    wait_for_kernel_before(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        if tl.program_id(1) == 0:
            _write(key_ptr + token * stride_key, keys_ptr, k_scale_ptr, stride_scale, slot, stride_k_page,
                   stride_k_head, stride_k_slot, stride_k_element, HOLDS_CODES, NUM_KV_HEADS, HEAD_DIM,
                   PAGE_SIZE, BLOCK)  # fmt: skip
        else:
            _write(value_ptr + token * stride_value, values_ptr, v_scale_ptr, stride_scale, slot, stride_v_page,
                   stride_v_head, stride_v_slot, stride_v_element, HOLDS_CODES, NUM_KV_HEADS, HEAD_DIM,
                   PAGE_SIZE, BLOCK)  # fmt: skip


@triton.jit
def _write_scaled(x_ptr, held_ptr, scale_ptr, slot, stride_page, stride_slot, stride_element, stride_scale_page,
                  stride_scale_slot, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    offs_d = tl.arange(0, BLOCK)
    mask = offs_d < HEAD_DIM
    x = tl.load(x_ptr + offs_d, mask=mask, other=0.0).to(tl.float32)
    page, place = slot // PAGE_SIZE, slot % PAGE_SIZE
    largest = tl.max(tl.where(x == x, tl.abs(x), 0.0), 0)  # of NaN neither
    scale = tl.maximum(tl.div_rn(largest, _LARGEST), _LEAST_SCALE)
    tl.store(scale_ptr + page * stride_scale_page + place * stride_scale_slot, scale)
    held_ptrs = held_ptr + page * stride_page + place * stride_slot + offs_d * stride_element
    tl.store(held_ptrs, codes_of(x, tl.full(x.shape, scale, tl.float32)), mask=mask)


# 23 parameters, as above.
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def write_scaled_kernel(
    key_ptr,
    value_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    stride_key,
    stride_value,
    stride_k_page,
    stride_k_head,
    stride_k_slot,
    stride_k_element,
    stride_v_page,
    stride_v_head,
    stride_v_slot,
    stride_v_element,
    stride_scale_page,
    stride_scale_head,
    stride_scale_slot,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Writes the keys of a token and head with their scale, or in the second row of programs its values. A negative
    slot is padding.

    Args:
        key_ptr, value_ptr: [tokens, kv_heads * HEAD_DIM], so many elements apart.
        keys_ptr, values_ptr: uint8 [pages, kv_heads, PAGE_SIZE, HEAD_DIM]
        k_scale_ptr, v_scale_ptr: fp32 [pages, kv_heads, PAGE_SIZE], of the same strides.
    """
    wait_for_kernel_before(OVERLAPS)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        offs_scale = head * stride_scale_head
        if tl.program_id(2) == 0:
            _write_scaled(key_ptr + token * stride_key + head * HEAD_DIM, keys_ptr + head * stride_k_head,
                          k_scale_ptr + offs_scale, slot, stride_k_page, stride_k_slot, stride_k_element,
                          stride_scale_page, stride_scale_slot, HEAD_DIM, PAGE_SIZE, BLOCK)  # fmt: skip
        else:
            _write_scaled(value_ptr + token * stride_value + head * HEAD_DIM, values_ptr + head * stride_v_head,
                          v_scale_ptr + offs_scale, slot, stride_v_page, stride_v_slot, stride_v_element,
                          stride_scale_page, stride_scale_slot, HEAD_DIM, PAGE_SIZE, BLOCK)  # fmt: skip
