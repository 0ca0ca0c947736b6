"""RMSNorm and rotary embedding of heads on a GPU, in Triton: a program has several heads of one token.

x = qkv * rsqrt(mean(qkv**2) + eps) * weight, head by head
out = x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin
"""

import torch
import triton
import triton.language as tl

from ..common.triton_rows import ALIGNMENT, aligned, on_device_of, row_sums
from ..dependent_launch import LaunchSchedule, wait_for_kernel_before
from ..norm.triton_kernels import rstd_of, weighted
from .reduction import NormRotaryReduction


# 15 parameters: a kernel takes no structure of pointers.
@triton.jit(do_not_specialize=["stride_token"])
def _norm_rotary_kernel(
    qkv_ptr,
    positions_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_sin_cache_ptr,
    query_out_ptr,
    key_out_ptr,
    stride_token,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    LENGTH: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_kernel_before(OVERLAPS)
    QUERY_GROUPS: tl.constexpr = (NUM_HEADS + ROWS_PER_PROGRAM - 1) // ROWS_PER_PROGRAM
    GROUPS: tl.constexpr = QUERY_GROUPS + (NUM_KV_HEADS + ROWS_PER_PROGRAM - 1) // ROWS_PER_PROGRAM
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    x_ptr = qkv_ptr + token * stride_token * STRIDE_UNIT
    if group < QUERY_GROUPS:
        first_head, num_heads, weight_ptr = group * ROWS_PER_PROGRAM, NUM_HEADS, query_weight_ptr
        out_ptr = query_out_ptr + token * (NUM_HEADS * LENGTH)
    else:
        first_head, num_heads, weight_ptr = (group - QUERY_GROUPS) * ROWS_PER_PROGRAM, NUM_KV_HEADS, key_weight_ptr
        x_ptr += NUM_HEADS * LENGTH
        out_ptr = key_out_ptr + token * (NUM_KV_HEADS * LENGTH)
    head = first_head + tl.arange(0, ROWS_PER_PROGRAM)
    # Every tile is [ROWS_PER_PROGRAM, BLOCK]: a half of each head.
    offs = head[:, None] * LENGTH + tl.arange(0, BLOCK)[None, :]
    mask = tl.broadcast_to(head[:, None] < num_heads, offs.shape)
    head_offs = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], offs.shape)
    first = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + offs + BLOCK, mask=mask, other=0.0).to(tl.float32)
    cos_sin_ptr = cos_sin_cache_ptr + tl.load(positions_ptr + token) * LENGTH
    first_weight = tl.load(weight_ptr + head_offs, mask=mask, other=0.0)
    second_weight = tl.load(weight_ptr + head_offs + BLOCK, mask=mask, other=0.0)
    cos = tl.load(cos_sin_ptr + head_offs, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(cos_sin_ptr + head_offs + BLOCK, mask=mask, other=0.0).to(tl.float32)
    rstd = rstd_of(row_sums(first * first + second * second, 32 * NUM_WARPS), LENGTH, eps)[:, None]
    first = weighted(first * rstd, first_weight).to(tl.float32)
    second = weighted(second * rstd, second_weight).to(tl.float32)
    tl.store(out_ptr + offs, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + offs + BLOCK, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=mask)


def norm_rotary(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    heads: int,
    kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    num_tokens, head_size = len(positions), query_weight.shape[0]
    reduction = NormRotaryReduction.of_device("cuda", head_size, qkv.dtype)
    stride_token, stride_element = qkv.stride()
    if stride_element != 1 or stride_token % reduction.stride_unit or qkv.data_ptr() % ALIGNMENT:
        qkv = aligned(qkv)
        stride_token = qkv.shape[1]
    queries = torch.empty(num_tokens, heads * head_size, dtype=qkv.dtype, device=qkv.device)
    keys = torch.empty(num_tokens, kv_heads * head_size, dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        with on_device_of(qkv):
            groups = -(-heads // reduction.rows_per_program) - (-kv_heads // reduction.rows_per_program)
            _norm_rotary_kernel[(num_tokens * groups,)](
                qkv,
                aligned(positions),
                aligned(query_weight),
                aligned(key_weight),
                aligned(cos_sin_cache),
                queries,
                keys,
                stride_token // reduction.stride_unit,
                eps,
                NUM_HEADS=heads,
                NUM_KV_HEADS=kv_heads,
                LENGTH=reduction.length,
                ROWS_PER_PROGRAM=reduction.rows_per_program,
                BLOCK=reduction.block,
                STRIDE_UNIT=reduction.stride_unit,
                NUM_WARPS=reduction.num_warps,
                **LaunchSchedule.of(qkv.device).options,
                num_warps=reduction.num_warps,
                enable_fp_fusion=reduction.enable_fp_fusion,
            )
    return queries, keys
