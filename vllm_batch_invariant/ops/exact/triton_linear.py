"""The Triton kernel of exact products: out[m, n] = bf16(sum over segments of fp32(T) * scale_w * scale_x, + bias).

Of one segment of K, with the digits of ``x = x2 2^16 + x1 2^8 + x0`` and ``w = w1 2^8 + w0``, all of them int8:

    hi = x1 w1,  mid = x1 w0 + x0 w1,  lo = x0 w0          (int32)
    top = x2 w1,  hi += x2 w0                              (where an x2 is not 0)
    T = top 2^24 + hi 2^16 + mid 2^8 + lo                  (int64)

Segments are added by a tree of neighbours. All else is integers, so tiles, stages and the kind of the tensor cores'
operands are schedules: with K up to :data:`.definition.LARGEST_K` no int32 overflows, and digits held in fp16 have
exact sums in fp32 while no more than :data:`FP16_CHUNK` elements are added.
Products of digits: Ootomo et al., arXiv:2306.11975.
"""

import triton
import triton.language as tl

from ..common.triton_exact_math import from_bf16, to_bf16, to_fp32
from ..linear.triton_kernels import swizzle_pid

FP16_CHUNK = tl.constexpr(512)
"""Elements of K that an fp32 accumulator takes: two products of digits each, of up to 2**14."""


@triton.jit
def dot_digits(a, b, acc, INT8: tl.constexpr):
    """acc + a @ b of digits: int8 tensor cores and an int32 accumulator, or fp16 and fp32."""
    return tl.dot(a, b, acc, out_dtype=tl.int32) if INT8 else tl.dot(a.to(tl.float16), b.to(tl.float16), acc)


@triton.jit
def _load_digits(ptr, row_offs, k, mask_rows, end, EVEN_K: tl.constexpr):
    """[rows, BLOCK_K] int8 of rows at offsets ``row_offs``, zero where there is none."""
    mask = mask_rows[:, None] if EVEN_K else mask_rows[:, None] & (k < end)[None, :]
    return tl.load(ptr + row_offs[:, None] + k[None, :], mask=mask, other=0)


@triton.jit
def _two_digits(
    x_ptr, w_ptr, x_plane, w_plane, x_rows, w_rows, mask_m, mask_n, begin, end, INT8: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """hi, mid and lo over the elements ``begin`` to ``end - 1``, [BLOCK_M, BLOCK_N] int32."""
    dtype: tl.constexpr = tl.int32 if INT8 else tl.float32
    hi, mid, lo = (
        tl.zeros((BLOCK_M, BLOCK_N), dtype),
        tl.zeros((BLOCK_M, BLOCK_N), dtype),
        tl.zeros((BLOCK_M, BLOCK_N), dtype),
    )
    for start in range(begin, end, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x1 = _load_digits(x_ptr, x_rows, k, mask_m, end, EVEN_K)
        x0 = _load_digits(x_ptr + x_plane, x_rows, k, mask_m, end, EVEN_K)
        w1 = _load_digits(w_ptr, w_rows, k, mask_n, end, EVEN_K).T
        w0 = _load_digits(w_ptr + w_plane, w_rows, k, mask_n, end, EVEN_K).T
        hi = dot_digits(x1, w1, hi, INT8)
        mid = dot_digits(x1, w0, mid, INT8)
        mid = dot_digits(x0, w1, mid, INT8)
        lo = dot_digits(x0, w0, lo, INT8)
    return hi.to(tl.int32), mid.to(tl.int32), lo.to(tl.int32)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x_ptr,
    third_ptr,
    high_digit_mask_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    PARTS: tl.constexpr,
    LENGTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    MASK_STEP: tl.constexpr,
    INT8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of the result.

    Args:
        x_ptr: int8 [2, M, K], x1 and x0.
        third_ptr: int8 [M, K], x2.
        high_digit_mask_ptr: int64 [M, PARTS], as in :func:`.triton_kernels.quantize_kernel`.
        x_scale_ptr: fp32 [M, PARTS].
        w_ptr: int8 [2, N, K], w1 and w0.
        w_scale_ptr: fp32 [N, PARTS].
        bias_ptr: [N], or None.
        out_ptr: bf16 [M, N].
        PARTS: 1 or 8 segments of LENGTH elements.
    """
    pid_m, pid_n = swizzle_pid(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
    # 64-bit, because an operand may have more than 2**31 elements.
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    step = tl.full((), 1, tl.int64)
    x_plane, w_plane = step * M * K, step * N * K
    ones = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # of the tree: a segment's, ...
    twos, fours, total = ones, ones, ones  # ... the sum of two and of four; each is written before it is read
    for part in range(PARTS):
        x_rows, w_rows = offs_m * K + part * LENGTH, offs_n * K + part * LENGTH
        if INT8:
            hi, mid, lo = _two_digits(
                x_ptr, w_ptr, x_plane, w_plane, x_rows, w_rows, mask_m, mask_n, 0, LENGTH, INT8, EVEN_K, BLOCK_M,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            hi, mid, lo = (
                tl.zeros((BLOCK_M, BLOCK_N), tl.int32),
                tl.zeros((BLOCK_M, BLOCK_N), tl.int32),
                tl.zeros((BLOCK_M, BLOCK_N), tl.int32),
            )
            for begin in range(0, LENGTH, FP16_CHUNK):
                more_hi, more_mid, more_lo = _two_digits(
                    x_ptr, w_ptr, x_plane, w_plane, x_rows, w_rows, mask_m, mask_n, begin,
                    min(begin + FP16_CHUNK, LENGTH), INT8, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                hi, mid, lo = hi + more_hi, mid + more_mid, lo + more_lo
        t = (hi.to(tl.int64) << 16) + (mid.to(tl.int64) << 8) + lo.to(tl.int64)

        # Few elements of few rows have a third digit, so these steps are not pipelined.
        high_digit_mask = tl.load(high_digit_mask_ptr + offs_m * PARTS + part, mask=mask_m, other=0)
        some = tl.reduce(high_digit_mask, 0, _or)
        if some != 0:
            for bit in range(tl.cdiv(LENGTH, MASK_STEP)):
                if (some >> bit) & 1 != 0:
                    marked = mask_m & ((high_digit_mask >> bit) & 1 != 0)
                    end = min((bit + 1) * MASK_STEP, LENGTH)
                    for start in range(bit * MASK_STEP, end, BLOCK_K):
                        k = start + tl.arange(0, BLOCK_K)
                        x2 = _load_digits(third_ptr, x_rows, k, marked, end, EVEN_K)
                        w1 = _load_digits(w_ptr, w_rows, k, mask_n, end, EVEN_K).T
                        w0 = _load_digits(w_ptr + w_plane, w_rows, k, mask_n, end, EVEN_K).T
                        zero = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if INT8 else tl.float32)
                        t += dot_digits(x2, w1, zero, INT8).to(tl.int64) << 24
                        t += dot_digits(x2, w0, zero, INT8).to(tl.int64) << 16
        w_scale = tl.load(w_scale_ptr + offs_n * PARTS + part, mask=mask_n, other=0.0)
        x_scale = tl.load(x_scale_ptr + offs_m * PARTS + part, mask=mask_m, other=0.0)
        one = to_fp32(t) * w_scale[None, :] * x_scale[:, None]
        if PARTS == 1:
            total = one
        else:
            two = ones + one
            four = twos + two
            total = fours + four
            ones = tl.where(part % 2 == 0, one, ones)
            twos = tl.where(part % 4 == 1, two, twos)
            fours = tl.where(part % 8 == 3, four, fours)
    if HAS_BIAS:
        total += from_bf16(tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0))[None, :]
    out_ptrs = out_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(out_ptrs, to_bf16(total), mask=mask_m[:, None] & mask_n[None, :])
