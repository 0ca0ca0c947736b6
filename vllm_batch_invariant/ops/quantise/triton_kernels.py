"""The Triton kernel of rows as codes: a program has a row, or some groups of one."""

import triton
import triton.language as tl

from ..common.dependent_launch import wait_for_kernel_before
from ..common.triton_exact_math import e4m3_bits, from_bf16, is_finite, rint, top_of


@triton.jit
def _load(x_ptr, first, ends, start, BLOCK: tl.constexpr):
    """fp32 [GROUPS, BLOCK] from ``start`` of each group on, and where they are."""
    offs = first + start + tl.arange(0, BLOCK)[None, :]
    return from_bf16(tl.load(x_ptr + offs, mask=offs < ends, other=0.0)), offs


@triton.jit
def _codes_of(x, finite, step, inverse, QUANTISE: tl.constexpr, STATIC: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of some elements [GROUPS, BLOCK], given whether the groups are finite, their scales and those' inverses;
    e4m3 as its bits.
    """
    x = tl.where(finite, x, 0.0)
    if STATIC or QUANTISE.divides:
        n = tl.div_rn(x, tl.broadcast_to(step, x.shape))
        n = tl.where(n < QUANTISE.smallest_static, QUANTISE.smallest_static, n)
        n = tl.where(n > QUANTISE.largest, QUANTISE.largest, n)
    else:
        n = x * inverse
    return rint(n).to(tl.int8) if DTYPE.is_int8() else e4m3_bits(n)


@triton.jit
def quantise_kernel(
    x_ptr,
    static_ptr,
    codes_ptr,
    scale_ptr,
    LENGTH: tl.constexpr,
    STATIC: tl.constexpr,
    QUANTISE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """So many groups of a row of x [rows, LENGTH], packed, GROUP elements each: their codes, of e4m3 as uint8, and
    their scales [rows, groups]. ``static_ptr`` has one number with STATIC, and is None without.
    """
    wait_for_kernel_before(OVERLAPS)
    OF_ROW: tl.constexpr = (LENGTH + GROUP - 1) // GROUP
    PROGRAMS: tl.constexpr = (OF_ROW + GROUPS - 1) // GROUPS
    row = tl.program_id(0).to(tl.int64) // PROGRAMS
    group = tl.program_id(0) % PROGRAMS * GROUPS + tl.arange(0, GROUPS)
    x_ptr += row * LENGTH
    codes_ptr += row * LENGTH
    first = (group * GROUP)[:, None]
    ends = tl.minimum(first + GROUP, LENGTH)
    x, offs = _load(x_ptr, first, ends, 0, BLOCK)
    tops = top_of(x[None], 0)
    for start in range(BLOCK, GROUP, BLOCK):
        x, offs = _load(x_ptr, first, ends, start, BLOCK)
        tops = tl.maximum(tops, top_of(x[None], 0))
    top_bits = tl.max(tops, 1)[:, None]
    finite = is_finite(top_bits)
    top = top_bits.to(tl.float32, bitcast=True)
    if STATIC:
        step, inverse = tl.full(top.shape, 0.0, tl.float32) + tl.load(static_ptr), 0.0
    else:
        counts = finite & (top >= QUANTISE.least)
        divisor = tl.where(counts, top, 1.0)
        largest = divisor * 0.0 + QUANTISE.largest
        step = tl.where(counts, tl.div_rn(divisor, largest), QUANTISE.scale_of_zeros)
        inverse = tl.where(counts, tl.div_rn(largest, divisor), 0.0)
        finite = counts  # codes of zeros are 0
    of_row = scale_ptr + row * OF_ROW + group[:, None]
    tl.store(of_row, tl.where(is_finite(top_bits), step, float("nan")), mask=group[:, None] < OF_ROW)
    DTYPE: tl.constexpr = codes_ptr.dtype.element_ty
    if GROUP <= BLOCK:
        tl.store(codes_ptr + offs, _codes_of(x, finite, step, inverse, QUANTISE, STATIC, DTYPE), mask=offs < ends)
    else:
        for start in range(0, GROUP, BLOCK):
            x, offs = _load(x_ptr, first, ends, start, BLOCK)
            tl.store(codes_ptr + offs, _codes_of(x, finite, step, inverse, QUANTISE, STATIC, DTYPE), mask=offs < ends)
