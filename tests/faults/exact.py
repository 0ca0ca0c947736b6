"""Faults of kernels of exact arithmetic: each takes the place of a function of its name."""

import triton
import triton.language as tl

from vllm_batch_invariant.ops.common.triton_exact_math import _highest_power as highest_power
from vllm_batch_invariant.ops.common.triton_exact_math import last_digit
from vllm_batch_invariant.ops.exact.triton_linear import _two_digits as two_digits

_LIMIT = tl.constexpr(2**15 - 1)


@triton.jit
def rounded_twice(integers):
    return integers.to(tl.float64).to(tl.float32)


@triton.jit
def contracted(x, COEFFICIENTS: tl.constexpr):
    HIGHEST: tl.constexpr = highest_power(COEFFICIENTS)
    value = x * 0.0 + COEFFICIENTS[HIGHEST]
    for power in tl.static_range(1, HIGHEST + 1):
        value = tl.fma(value, x, x * 0.0 + COEFFICIENTS[HIGHEST - power])
    return value


@triton.jit
def truncated(x):
    return x.to(tl.int32)


@triton.jit
def saturated(a, b, acc, INT8: tl.constexpr):
    """As an instruction that adds pairs in int16."""
    y = tl.minimum(tl.maximum(tl.dot(a, b, out_dtype=tl.int32), -_LIMIT), _LIMIT)
    return acc + y.to(acc.dtype)


@triton.jit
def without_the_last_product(
    x_ptr, w_ptr, x_plane, w_plane, x_rows, w_rows, mask_m, mask_n, begin, end, INT8: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    hi, mid, lo = two_digits(
        x_ptr, w_ptr, x_plane, w_plane, x_rows, w_rows, mask_m, mask_n, begin, end, INT8, EVEN_K, BLOCK_M, BLOCK_N,
        BLOCK_K,
    )  # fmt: skip
    return hi, mid, lo * 0


@triton.jit
def of_two_digits(integers):
    """Clamped to what two digits hold."""
    return last_digit(tl.minimum(tl.maximum(integers, -_LIMIT), _LIMIT - 128))


@triton.jit
def of_one_digit(a1, a0, b1, b0, INT8: tl.constexpr):
    """The products with the first digit of b alone."""
    y = tl.dot(a1, b1, out_dtype=tl.int32) << 8
    return y + tl.dot(a0, b1, out_dtype=tl.int32)
