"""Rows as codes in Triton: a kernel of which a program has a row, or some groups of one; and what a kernel that has
rows in its tile writes of them.
"""

import triton
import triton.language as tl

from ..common.dependent_launch import let_next_begin, wait_for_kernel_before
from ..common.triton_exact_math import e4m3_bits, from_bf16, is_finite, rint, top_of, top_of_numbers
from ..common.triton_names import aggregate, value


@aggregate
class OutCodes:
    """Where a kernel writes the codes of its result, as :func:`store_codes` does."""

    ptr: value  # of codes, or None: it writes none
    scale_ptr: value
    scale_rows: value
    GROUP: tl.constexpr
    QUANTISE: value


@triton.jit
def _load(x_ptr, first, ends, start, BLOCK: tl.constexpr):
    """fp32 [GROUPS, BLOCK] from ``start`` of each group on, and where they are."""
    offs = first + start + tl.arange(0, BLOCK)[None, :]
    return from_bf16(tl.load(x_ptr + offs, mask=offs < ends, other=0.0)), offs


@triton.jit
def quotient(x, step):
    """x / step as IEEE 754 rounds it, of x fp32 with at most 11 significant bits, and 448 at most: a quotient by the
    rounded reciprocal of the step, which groups of x share, and what it lacks (Markstein 1990, "Computation of
    elementary functions on the IBM RISC System/6000 processor"). That no pair of significands is rounded otherwise is
    seen by trying all.
    """
    lift = tl.where(step < 2.0**-60, 2.0**60, 1.0)  # what a quotient lacks is a normal number, too
    step *= lift
    inverse = tl.div_rn(step * 0.0 + 1.0, step)
    x *= lift
    n = x * inverse
    too_much = tl.fma(n, tl.broadcast_to(step, x.shape), -x)  # of -0, +0, which leaves n as it is
    return tl.fma(too_much, tl.broadcast_to(-inverse, x.shape), n)


@triton.jit
def codes_of(
    x,
    finite,
    step,
    inverse,
    QUANTISE: tl.constexpr,
    STATIC: tl.constexpr,
    DTYPE: tl.constexpr,
    OF_16_BITS: tl.constexpr,
):
    """Codes of some elements [GROUPS, BLOCK], given whether the groups are finite, their scales and those' inverses;
    e4m3 as its bits.
    """
    x = tl.where(finite, x, 0.0)
    if QUANTISE.in_hardware and OF_16_BITS and not STATIC:
        # its conversion takes what is above 448 for 448
        codes = quotient(x, step).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        if STATIC or QUANTISE.divides:
            n = tl.div_rn(x, tl.broadcast_to(step, x.shape))
            n = tl.where(n < QUANTISE.smallest_static, QUANTISE.smallest_static, n)
            n = tl.where(n > QUANTISE.largest, QUANTISE.largest, n)
        else:
            n = x * inverse
        codes = rint(n).to(tl.int8) if DTYPE.is_int8() else e4m3_bits(n)
    return codes


@triton.jit
def scale_of(top_bits, static, QUANTISE: tl.constexpr, STATIC: tl.constexpr):
    """Of groups with these bits of their largest magnitudes: whether they have codes but 0, scales and inverses. With
    STATIC their scale is ``static``.
    """
    finite = is_finite(top_bits)
    top = top_bits.to(tl.float32, bitcast=True)
    if STATIC:
        step, inverse = tl.full(top.shape, 0.0, tl.float32) + static, 0.0
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
    y, row, row_mask, column, codes_ptr, scale_ptr, scale_rows,
    LENGTH: tl.constexpr, GROUP: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    """Codes and scales of parts of rows that lie in a tile.

    Args:
        y: [M, N] of the dtype that is quantised, 0 behind a row's length; N is a multiple of GROUP.
        row, row_mask: [M], which rows of [rows, LENGTH], and whether there are so many.
        column: of the tile's first column, or those of each row's [M, 1], multiples of GROUP.
        codes_ptr, scale_ptr, scale_rows: of :func:`quantise_kernel`.
    """
    GROUPS: tl.constexpr = y.shape[1] // GROUP
    OF_ROW: tl.constexpr = (LENGTH + GROUP - 1) // GROUP
    y = tl.reshape(y, (y.shape[0], GROUPS, GROUP))
    top_bits = top_of_numbers(y, 2)[:, :, None]
    finite, step, inverse = scale_of(top_bits, 0.0, QUANTISE, False)
    DTYPE: tl.constexpr = codes_ptr.dtype.element_ty
    OF_16_BITS: tl.constexpr = y.dtype.primitive_bitwidth == 16
    codes = codes_of(from_bf16(y), finite, step, inverse, QUANTISE, False, DTYPE, OF_16_BITS)
    codes = tl.reshape(codes, (y.shape[0], GROUPS * GROUP))
    start = row.to(tl.int64)[:, None]
    # a thread stores codes of the 16 bytes of y that it has: the layout of y decides in which order a kernel adds it
    offs = column + tl.max_contiguous(tl.arange(0, GROUPS * GROUP), 128 // y.dtype.primitive_bitwidth)[None, :]
    tl.store(codes_ptr + start * LENGTH + offs, codes, mask=row_mask[:, None] & (offs < LENGTH))
    group = column // GROUP + tl.arange(0, GROUPS)[None, :]
    scales = tl.reshape(tl.where(is_finite(top_bits), step, float("nan")), (y.shape[0], GROUPS))
    offs = group.to(tl.int64) * scale_rows + start
    tl.store(scale_ptr + offs, scales, mask=row_mask[:, None] & (group < OF_ROW))


@triton.jit(do_not_specialize=["scale_rows"])
def quantise_kernel(
    x_ptr,
    static_ptr,
    codes_ptr,
    scale_ptr,
    scale_rows,
    LENGTH: tl.constexpr,
    STATIC: tl.constexpr,
    PADDED_STATIC: tl.constexpr,
    QUANTISE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """So many groups of a row of x [rows, LENGTH], packed, GROUP elements each: their codes, of e4m3 as uint8, and
    their scales [groups, scale_rows], of rows side by side. ``static_ptr`` has STATIC numbers, of which the largest is
    the scale, or is None.
    """
    let_next_begin(OVERLAPS)
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
    static = 0.0
    if STATIC:
        static = tl.max(tl.load(static_ptr + tl.arange(0, PADDED_STATIC) % STATIC), 0)
    finite, step, inverse = scale_of(top_bits, static, QUANTISE, STATIC > 0)
    of_row = scale_ptr + group.to(tl.int64)[:, None] * scale_rows + row
    tl.store(of_row, tl.where(is_finite(top_bits), step, float("nan")), mask=group[:, None] < OF_ROW)
    DTYPE: tl.constexpr = codes_ptr.dtype.element_ty
    OF_16_BITS: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    if GROUP <= BLOCK:
        codes = codes_of(x, finite, step, inverse, QUANTISE, STATIC > 0, DTYPE, OF_16_BITS)
        tl.store(codes_ptr + offs, codes, mask=offs < ends)
    else:
        for start in range(0, GROUP, BLOCK):
            x, offs = _load(x_ptr, first, ends, start, BLOCK)
            codes = codes_of(x, finite, step, inverse, QUANTISE, STATIC > 0, DTYPE, OF_16_BITS)
            tl.store(codes_ptr + offs, codes, mask=offs < ends)
