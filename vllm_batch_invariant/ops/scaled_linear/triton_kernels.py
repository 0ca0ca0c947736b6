"""The Triton kernel of products of codes::

    out[m, n] = round(fp32(sum over K) * weight_scale[n] * scale[m] + bias[n])

The sum is an int32, so that tiles, stages and instructions are schedules.
"""

import triton
import triton.language as tl

from ..common.triton_exact_math import from_bf16, to_bf16
from ..linear.triton_kernels import swizzle_pid


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """fp32 rounded to a dtype, also by Triton's interpreter, whose own conversion to bf16 truncates."""
    return to_bf16(x) if tl.bfloat16 == DTYPE else x.to(DTYPE)


@triton.jit(do_not_specialize=["M"])
def scaled_linear_kernel(
    codes_ptr,
    scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of the result of codes [M, K], scale [M], weight [N, K], weight_scale [N], bias [N] or None: [M, N]."""
    pid_m, pid_n = swizzle_pid(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
    # 64-bit, because an operand may have more than 2**31 elements.
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            a_mask, b_mask = mask_m[:, None], mask_n[:, None]
        else:
            a_mask, b_mask = mask_m[:, None] & (k < K)[None, :], mask_n[:, None] & (k < K)[None, :]
        a = tl.load(codes_ptr + offs_m[:, None] * K + k[None, :], mask=a_mask, other=0)  # [BLOCK_M, BLOCK_K]
        b = tl.load(weight_ptr + offs_n[:, None] * K + k[None, :], mask=b_mask, other=0)  # [BLOCK_N, BLOCK_K]
        acc = tl.dot(a, b.T, acc, out_dtype=tl.int32)
    weight_scale = tl.load(weight_scale_ptr + offs_n, mask=mask_n, other=0.0)
    scale = tl.load(scale_ptr + offs_m, mask=mask_m, other=0.0)
    out = acc.to(tl.float32) * weight_scale[None, :] * scale[:, None]
    if HAS_BIAS:
        out += from_bf16(tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0))[None, :]
    out_ptrs = out_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(out_ptrs, rounded(out, out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])
