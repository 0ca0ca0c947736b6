"""The Triton kernel of rows as codes: a program has one row."""

import triton
import triton.language as tl

from ..common.dependent_launch import wait_for_kernel_before
from ..common.triton_exact_math import from_bf16, is_finite, rint, top_of


@triton.jit
def _codes_of(x, finite, step, inverse, QUANTISE: tl.constexpr, STATIC: tl.constexpr):
    """int8 of some elements of a row, given whether the row is finite, its scale and that scale's inverse."""
    x = tl.where(finite, x, 0.0)
    if STATIC:
        n = tl.div_rn(x, tl.full(x.shape, step, tl.float32))
        n = tl.where(n < QUANTISE.smallest_static, QUANTISE.smallest_static, n)
        n = tl.where(n > QUANTISE.largest, QUANTISE.largest, n)
    else:
        n = x * inverse
    return rint(n).to(tl.int8)


@triton.jit
def quantise_kernel(
    x_ptr,
    static_ptr,
    codes_ptr,
    scale_ptr,
    LENGTH: tl.constexpr,
    STATIC: tl.constexpr,
    QUANTISE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A row of x [rows, LENGTH], packed: its codes, and its scale at its number. ``static_ptr`` has one number with
    STATIC, and is None without.
    """
    wait_for_kernel_before(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * LENGTH
    codes_ptr += row * LENGTH
    tops = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, LENGTH, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = from_bf16(tl.load(x_ptr + offs, mask=offs < LENGTH, other=0.0))
        tops = tl.maximum(tops, top_of(x[None, :], 0))
    top_bits = tl.max(tops, 0)
    finite = is_finite(top_bits)
    top = top_bits.to(tl.float32, bitcast=True)
    if STATIC:
        step, inverse = tl.load(static_ptr), 0.0
    else:
        counts = finite & (top >= QUANTISE.least)
        divisor = tl.where(counts, top, 1.0)
        largest = divisor * 0.0 + QUANTISE.largest
        step = tl.where(counts, tl.div_rn(divisor, largest), 0.0)
        inverse = tl.where(counts, tl.div_rn(largest, divisor), 0.0)
    tl.store(scale_ptr + row, tl.where(finite, step, float("nan")))
    for start in range(0, LENGTH, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = from_bf16(tl.load(x_ptr + offs, mask=offs < LENGTH, other=0.0))
        tl.store(codes_ptr + offs, _codes_of(x, finite, step, inverse, QUANTISE, STATIC), mask=offs < LENGTH)
