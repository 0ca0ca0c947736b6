"""Rows as codes in Triton: a kernel of which a program has a row, or some groups of one; and what a kernel that has
rows in its tile writes of them.
"""

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
def _scale_of(top_bits, static_ptr, QUANTISE: tl.constexpr, STATIC: tl.constexpr):
    """Of groups with these bits of their largest magnitudes: whether they have codes but 0, scales and inverses."""
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
    return finite, step, inverse


@triton.jit
def store_codes(
    y, row, row_mask, column, codes_ptr, scale_ptr, LENGTH: tl.constexpr, GROUP: tl.constexpr, QUANTISE: tl.constexpr
):
    """Codes and scales of parts of rows that lie in a tile.

    Args:
        y: [M, N] of the dtype that is quantised, 0 behind a row's length; N is a multiple of GROUP.
        row, row_mask: [M], which rows of [rows, LENGTH], and whether there are so many.
        column: of the tile's first column, a multiple of GROUP.
        codes_ptr, scale_ptr: of :func:`quantise_kernel`.
    """
    GROUPS: tl.constexpr = y.shape[1] // GROUP
    OF_ROW: tl.constexpr = (LENGTH + GROUP - 1) // GROUP
    x = tl.reshape(from_bf16(y), (y.shape[0], GROUPS, GROUP))
    top_bits = top_of(x, 2)[:, :, None]
    finite, step, inverse = _scale_of(top_bits, scale_ptr, QUANTISE, False)
    codes = tl.reshape(_codes_of(x, finite, step, inverse, QUANTISE, False, codes_ptr.dtype.element_ty), y.shape)
    start = row.to(tl.int64)[:, None]
    # a thread stores codes of the 16 bytes of y that it has: the layout of y decides in which order a kernel adds it
    offs = column + tl.max_contiguous(tl.arange(0, y.shape[1]), 128 // y.dtype.primitive_bitwidth)
    tl.store(codes_ptr + start * LENGTH + offs[None, :], codes, mask=row_mask[:, None] & (offs < LENGTH)[None, :])
    group = column // GROUP + tl.arange(0, GROUPS)
    scales = tl.reshape(tl.where(is_finite(top_bits), step, float("nan")), (y.shape[0], GROUPS))
    tl.store(scale_ptr + start * OF_ROW + group[None, :], scales, mask=row_mask[:, None] & (group < OF_ROW)[None, :])


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
    finite, step, inverse = _scale_of(top_bits, static_ptr, QUANTISE, STATIC)
    of_row = scale_ptr + row * OF_ROW + group[:, None]
    tl.store(of_row, tl.where(is_finite(top_bits), step, float("nan")), mask=group[:, None] < OF_ROW)
    DTYPE: tl.constexpr = codes_ptr.dtype.element_ty
    if GROUP <= BLOCK:
        tl.store(codes_ptr + offs, _codes_of(x, finite, step, inverse, QUANTISE, STATIC, DTYPE), mask=offs < ends)
    else:
        for start in range(0, GROUP, BLOCK):
            x, offs = _load(x_ptr, first, ends, start, BLOCK)
            tl.store(codes_ptr + offs, _codes_of(x, finite, step, inverse, QUANTISE, STATIC, DTYPE), mask=offs < ends)
