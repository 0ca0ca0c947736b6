"""The Triton kernels of products of codes. Of int8::

    out[m, n] = round(fp32(sum over K) * weight_scale[n] * scale[m] + bias[n])

The sum is an int32, so that tiles, stages and instructions are schedules. Of e4m3 each 128 elements of K are a sum of
the tensor core from zero, and these are added in fp32: tiles and stages are schedules, and the instruction is not.
"""

import triton
import triton.language as tl

from ..common.triton_exact_math import from_bf16, to_bf16
from ..linear.triton_kernels import swizzle_pid


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """fp32 rounded to a dtype, also by Triton's interpreter, whose own conversion to bf16 truncates."""
    return to_bf16(x) if tl.bfloat16 == DTYPE else x.to(DTYPE)


@triton.jit
def _load_tile(ptr, offs, mask, K, start, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Some rows of codes [.., K] from ``start`` on: [rows, BLOCK_K]."""
    k = start + tl.arange(0, BLOCK_K)
    mask = mask[:, None] if EVEN_K else mask[:, None] & (k < K)[None, :]
    ZERO: tl.constexpr = 0 if ptr.dtype.element_ty.is_int() else 0.0  # of an int Triton makes no e4m3
    return tl.load(ptr + offs[:, None] * K + k[None, :], mask=mask, other=ZERO)


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
        a = _load_tile(codes_ptr, offs_m, mask_m, K, start, EVEN_K, BLOCK_K)
        b = _load_tile(weight_ptr, offs_n, mask_n, K, start, EVEN_K, BLOCK_K)
        acc = tl.dot(a, b.T, acc, out_dtype=tl.int32)
    weight_scale = tl.load(weight_scale_ptr + offs_n, mask=mask_n, other=0.0)
    scale = tl.load(scale_ptr + offs_m, mask=mask_m, other=0.0)
    out = acc.to(tl.float32) * weight_scale[None, :] * scale[:, None]
    if HAS_BIAS:
        out += from_bf16(tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0))[None, :]
    out_ptrs = out_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(out_ptrs, rounded(out, out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit(do_not_specialize=["scale_row", "scale_group", "M"])
def scaled_linear_e4m3_kernel(
    codes_ptr,
    scale_ptr,
    scale_row,
    scale_group,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
):
    """A tile of the result of codes [M, K], weight [N, K], bias [N] or None: [M, N]. With IN_BLOCKS scale is
    [M, groups], of these strides, and weight_scale [ceil(N / 128), groups], else [M] and [N]. BLOCK_K is the
    reduction's ``promote``, and BLOCK_N a divisor of 128.
    """
    pid_m, pid_n = swizzle_pid(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
    # 64-bit, because an operand may have more than 2**31 elements.
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    groups = tl.cdiv(K, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), tl.float32)
    for group in range(groups):
        a = _load_tile(codes_ptr, offs_m, mask_m, K, group * BLOCK_K, EVEN_K, BLOCK_K)
        b = _load_tile(weight_ptr, offs_n, mask_n, K, group * BLOCK_K, EVEN_K, BLOCK_K)
        # All of BLOCK_K in the tensor core: a smaller number would promote sooner, and 0 have the addition below in it.
        sums = (
            tl.dot(b, a.T, max_num_imprecise_acc=BLOCK_K) if SWAP_AB else tl.dot(a, b.T, max_num_imprecise_acc=BLOCK_K)
        )
        if IN_BLOCKS:
            offs = offs_m * scale_row + group * scale_group
            scale = tl.load(scale_ptr + offs, mask=mask_m, other=0.0)
            scale *= tl.load(weight_scale_ptr + pid_n.to(tl.int64) * BLOCK_N // BLOCK_K * groups + group)
        else:
            scale = tl.full((BLOCK_M,), 1.0, tl.float32)
        scale = tl.broadcast_to(scale[None, :] if SWAP_AB else scale[:, None], total.shape)
        total = tl.fma(scale, sums, total)
    if SWAP_AB:
        total = total.T
    if not IN_BLOCKS:
        scale = tl.load(scale_ptr + offs_m, mask=mask_m, other=0.0)
        weight_scale = tl.load(weight_scale_ptr + offs_n, mask=mask_n, other=0.0)
        total = total * scale[:, None] * weight_scale[None, :]
    if HAS_BIAS:
        total += from_bf16(tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0))[None, :]
    out_ptrs = out_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(out_ptrs, rounded(total, out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])
