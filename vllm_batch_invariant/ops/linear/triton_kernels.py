"""Triton kernels of ``out = a @ b + bias`` with a: [M, K], b: [K, N], bias: [N].

Each element of the result is one accumulator that adds K upwards::

    acc = 0
    for k in range(0, K, BLOCK_K):
        acc += a[m, k : k + BLOCK_K] @ b[k : k + BLOCK_K, n]     # by tensor-core instructions, k_step elements each
    out[m, n] = round(acc + bias[n])

so no tile moves its bits. One kernel reads through pointers and takes any strides, dtypes and batches; the other reads
through the tensor memory accelerator (TMA; compute capability 9.0 and above), which is what keeps a multiprocessor busy
with few warps. A row has the same bits from both, so which one runs is a matter of speed.
"""

import torch
import triton
import triton.language as tl

TL_DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
"""What accumulators are of, in Triton's words."""
_GROUP_M = tl.constexpr(8)
"""Tiles of rows worked on side by side, so that they find their columns of b in the L2 cache."""


@triton.jit
def swizzle_pid(tile, tiles_m, tiles_n):
    """Row and column of a tile in an order that keeps tiles with the same columns together."""
    first_m = tile // (_GROUP_M * tiles_n) * _GROUP_M
    group_m = min(tiles_m - first_m, _GROUP_M)
    in_group = tile % (_GROUP_M * tiles_n)
    return first_m + in_group % group_m, in_group // group_m


@triton.jit(do_not_specialize=["M", "stride_a_batch", "stride_b_batch"])
def gemm_ptr_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_a_batch,
    stride_b_batch,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """a: [batch, M, K], b: [batch, K, N] of any strides, bias: [N] or None, out: [batch, M, N], packed."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    pid_m, pid_n = swizzle_pid(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n)

    # 64-bit, because an operand may have more than 2**31 elements.
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a_ptr + (batch * stride_a_batch + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak)
    b_ptrs = b_ptr + (batch * stride_b_batch + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn)
    mask_m, mask_n = offs_m < M, offs_n < N

    step = tl.full((), BLOCK_K, tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE)
    for start_k in range(0, K, BLOCK_K):
        if EVEN_K:
            a_mask, b_mask = mask_m[:, None], mask_n[None, :]
        else:
            mask_k = offs_k < K - start_k
            a_mask, b_mask = mask_m[:, None] & mask_k[None, :], mask_k[:, None] & mask_n[None, :]
        a = tl.load(a_ptrs, mask=a_mask, other=0.0)  # [BLOCK_M, BLOCK_K]
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)  # [BLOCK_K, BLOCK_N]
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
        a_ptrs += step * stride_ak
        b_ptrs += step * stride_bk
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0)  # [BLOCK_N]
        acc += bias.to(acc.dtype)[None, :]
    out_ptrs = out_ptr + (batch * M * N + offs_m[:, None] * N + offs_n[None, :])
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit(do_not_specialize=["N", "K", "tiles_m"])
def gemm_tma_kernel(
    a_desc,
    b_desc,
    bias_ptr,
    out_desc,
    N,
    K,
    tiles_m,
    A_K_MAJOR: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """a: descriptor of [M, K] (of its transpose unless ``A_K_MAJOR``), b: of [N, K] (of its transpose unless
    ``B_K_MAJOR``), bias: [N] or None, out: of [M, N]. Elements beyond an edge read as zero and are not written.

    A tile of few rows is computed transposed: the tensor core's long side takes the columns of b.
    """
    SWAP_AB: tl.constexpr = BLOCK_M < 64
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        pid_m, pid_n = swizzle_pid(tile, tiles_m, tiles_n)
        first_m, first_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), ACCUMULATE)
        for start_k in range(0, K, BLOCK_K):
            # [BLOCK_M, BLOCK_K] and [BLOCK_N, BLOCK_K]
            a = a_desc.load([first_m, start_k]) if A_K_MAJOR else a_desc.load([start_k, first_m]).T
            b = b_desc.load([first_n, start_k]) if B_K_MAJOR else b_desc.load([start_k, first_n]).T
            acc = tl.dot(b, a.T, acc) if SWAP_AB else tl.dot(a, b.T, acc)
        if HAS_BIAS:
            offs_n = first_n + tl.arange(0, BLOCK_N)
            bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(ACCUMULATE)  # [BLOCK_N]
            acc += bias[:, None] if SWAP_AB else bias[None, :]
        out = acc.to(out_desc.dtype)
        out_desc.store([first_m, first_n], out.T if SWAP_AB else out)
