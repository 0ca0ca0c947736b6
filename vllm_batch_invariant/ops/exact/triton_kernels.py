"""Triton kernels of exact arithmetic but for products and attention: rows on their grids, norms, SiLU, GELU,
soft caps, rotation, softmax and the draw of tokens.

Sums are of int32 and int64, so no tile, program or order can move a bit, and what is tuned is in ``cuda.py``.
"""

import triton
import triton.language as tl

from ..common.dependent_launch import wait_for_kernel_before
from ..common.triton_exact_math import (
    LOWEST_EXPONENT,
    THREE_DIGITS,
    TWO_DIGITS,
    capped,
    exponent,
    finest,
    finest_of_three_digits,
    finest_of_two_digits,
    from_bf16,
    gelu,
    gumbel,
    is_finite,
    last_digit,
    ln_of_masses,
    mass,
    power_of_two,
    rint_24,
    scale_of,
    silu,
    to_bf16,
    to_fp32,
    top_of,
)
from ..common.triton_rows import order_key, value_of
from . import definition

_MEAN_BITS = tl.constexpr(definition.MEAN_BITS)
_SMALLEST_KEY = tl.constexpr(-(1 << 31))
_LAST_TOKEN = tl.constexpr((1 << 32) - 1)


@triton.jit
def _load(ptr, offs, mask):
    return from_bf16(tl.load(ptr + offs, mask=mask, other=0.0))


@triton.jit
def _grid_of_activations(top, total, LENGTH: tl.constexpr):
    """The exponent of a row's grid, given the bits of its largest magnitude and the sum of its magnitudes' integers."""
    mean = tl.maximum(total // LENGTH, 1).to(tl.float32)
    by_mean = (mean.to(tl.int32, bitcast=True) >> 23) - 127 + exponent(top) - 22 - _MEAN_BITS
    coarsest = tl.minimum(finest(top, 15, TWO_DIGITS), by_mean)
    return tl.maximum(tl.maximum(coarsest, finest(top, 23, THREE_DIGITS)), LOWEST_EXPONENT)


@triton.jit(do_not_specialize=["rows"])
def quantize_kernel(
    x_ptr,
    digits_ptr,
    third_ptr,
    high_digit_mask_ptr,
    scale_ptr,
    rows,
    stride_row,
    PARTS: tl.constexpr,
    LENGTH: tl.constexpr,
    ACTIVATIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASK_STEP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Puts one part of a row on its grid: each integer is x1 * 2**8 + x0, of activations sometimes x2 * 2**16 more.

    Args:
        x_ptr: [rows, PARTS * LENGTH], rows ``stride_row`` apart.
        digits_ptr: int8 [2, rows, PARTS * LENGTH], x1 and x0.
        third_ptr: int8 [rows, PARTS * LENGTH], x2.
        high_digit_mask_ptr: int64 [rows, PARTS]: bit b is set where one of the elements b * MASK_STEP to
            (b + 1) * MASK_STEP - 1 has an x2.
        scale_ptr: fp32 [rows, PARTS].
    """
    wait_for_kernel_before(OVERLAPS)
    part = tl.program_id(0) % PARTS
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x_ptr += row * stride_row + part * LENGTH
    top = top_of(_load(x_ptr, offs, offs < LENGTH), 0)
    for start in range(BLOCK, LENGTH, BLOCK):
        top = tl.maximum(top, top_of(_load(x_ptr, start + offs, start + offs < LENGTH), 0))
    end = tl.where(is_finite(top), LENGTH, 0)  # a row that is not finite is read as zeros
    if ACTIVATIONS:
        factor = power_of_two(22 - exponent(top))
        total = tl.zeros((), tl.int64)
        for start in range(0, LENGTH, BLOCK):
            a = _load(x_ptr, start + offs, start + offs < end)
            total += tl.sum(rint_24(tl.abs(a) * factor).to(tl.int64))
        e = _grid_of_activations(top, total, LENGTH)
    else:
        e = finest_of_two_digits(top)
    inverse, high_digit_mask = power_of_two(-e), tl.zeros((), tl.int64)
    out = row * PARTS * LENGTH + part * LENGTH
    plane = rows.to(tl.int64) * PARTS * LENGTH
    for start in range(0, LENGTH, BLOCK):
        mask = start + offs < LENGTH
        integers = rint_24(_load(x_ptr, start + offs, start + offs < end) * inverse)
        x0, rest = last_digit(integers)
        if ACTIVATIONS:
            x1, x2 = last_digit(rest)
            some = tl.max(tl.reshape((x2 != 0).to(tl.int64), (BLOCK // MASK_STEP, MASK_STEP)), 1)
            bit = start // MASK_STEP + tl.arange(0, BLOCK // MASK_STEP)
            high_digit_mask |= tl.sum(some << bit)
            tl.store(third_ptr + out + start + offs, x2.to(tl.int8), mask=mask)
        else:
            x1 = rest
        tl.store(digits_ptr + out + start + offs, x1.to(tl.int8), mask=mask)
        tl.store(digits_ptr + plane + out + start + offs, x0.to(tl.int8), mask=mask)
    tl.store(scale_ptr + row * PARTS + part, scale_of(top, e))
    if ACTIVATIONS:
        tl.store(high_digit_mask_ptr + row * PARTS + part, high_digit_mask)


@triton.jit(do_not_specialize=["rows", "x_inner_size", "residual_inner_size"])
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    rows,
    x_inner_size,
    stride_x_outer,
    stride_x_inner,
    residual_inner_size,
    stride_residual_outer,
    stride_residual_inner,
    eps,
    LENGTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """z * (1 / sqrt(mean(z**2) + eps)) * weight of z = x + residual, unrounded; the squares are of z's integers.

    Row r of x begins at (r // x_inner_size) * stride_x_outer + (r % x_inner_size) * stride_x_inner, of residual alike;
    the results are packed.
    """
    row = tl.program_id(0) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)
    outer, inner = (row // x_inner_size).to(tl.int64), (row % x_inner_size).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (offs < LENGTH)[None, :]  # [ROWS_PER_PROGRAM, BLOCK]
    out = row.to(tl.int64)[:, None] * LENGTH + offs[None, :]
    z = _load(x_ptr, (outer * stride_x_outer + inner * stride_x_inner)[:, None] + offs[None, :], mask)
    if HAS_RESIDUAL:
        outer, inner = (row // residual_inner_size).to(tl.int64), (row % residual_inner_size).to(tl.int64)
        starts = outer * stride_residual_outer + inner * stride_residual_inner
        z += _load(residual_ptr, starts[:, None] + offs[None, :], mask)
        tl.store(residual_out_ptr + out, to_bf16(z), mask=mask)
    top = top_of(z, 1)
    e = finest_of_three_digits(top)
    integers = rint_24(tl.where(is_finite(top)[:, None], z, 0.0) * power_of_two(-e)[:, None]).to(tl.int64)
    scale = scale_of(top, e)
    mean = tl.div_rn(to_fp32(tl.sum(integers * integers, 1)) * scale * scale, LENGTH * 1.0)
    y = z * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]
    if HAS_WEIGHT:
        y = y * _load(weight_ptr, tl.broadcast_to(offs[None, :], mask.shape), mask)
    tl.store(out_ptr + out, to_bf16(y), mask=mask)


@triton.jit
def gate_and_mul_kernel(
    x_ptr, out_ptr, stride_row, GELU: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """SiLU or GELU of g, times u, of a block of a row's halves g and u, of LENGTH each."""
    blocks = tl.cdiv(LENGTH, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    offs = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = offs < LENGTH
    gate, up = _load(x_ptr + row * stride_row, offs, mask), _load(x_ptr + row * stride_row + LENGTH, offs, mask)
    y = (gelu(gate) if GELU else silu(gate)) * up
    tl.store(out_ptr + row * LENGTH + offs, to_bf16(y), mask=mask)


@triton.jit
def capped_kernel(x_ptr, out_ptr, soft_cap, numel, BLOCK: tl.constexpr):
    """A soft cap of a block of bf16 numbers."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < numel
    tl.store(out_ptr + offs, to_bf16(capped(_load(x_ptr, offs, mask), soft_cap)), mask=mask)


@triton.jit
def rotate_kernel(
    x_ptr,
    table_ptr,
    out_ptr,
    stride_token,
    stride_head,
    stride_table,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """a * cos - b * sin and b * cos + a * sin of the halves a and b of some heads of a token, HALF each."""
    programs = tl.cdiv(NUM_HEADS, HEADS_PER_PROGRAM)
    token = (tl.program_id(0) // programs).to(tl.int64)
    head = tl.program_id(0) % programs * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    offs = tl.arange(0, BLOCK)[None, :]
    mask = (head < NUM_HEADS)[:, None] & (offs < HALF)  # [HEADS_PER_PROGRAM, BLOCK]
    x = token * stride_token + head[:, None] * stride_head + offs
    a, b = _load(x_ptr, x, mask), _load(x_ptr, x + HALF, mask)
    cosine = _load(table_ptr, token * stride_table + offs, offs < HALF)
    sine = _load(table_ptr, token * stride_table + HALF + offs, offs < HALF)
    out = (token * NUM_HEADS + head[:, None]) * (2 * HALF) + offs
    tl.store(out_ptr + out, to_bf16(a * cosine - b * sine), mask=mask)
    tl.store(out_ptr + out + HALF, to_bf16(b * cosine + a * sine), mask=mask)


@triton.jit
def _chunk(x_ptr, length, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """A program's row, its elements, which of them exist, and their values."""
    row = (tl.program_id(0) // NUM_CHUNKS).to(tl.int64)
    offs = tl.program_id(0) % NUM_CHUNKS * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * length + offs, mask=offs < length, other=-float("inf"))
    return row, offs, offs < length, x


@triton.jit
def _top_of_row(keys_ptr, row, NUM_CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr):
    """The largest of a row, and NaN where there is one."""
    chunk = tl.arange(0, PADDED_CHUNKS)
    keys = tl.load(keys_ptr + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=_SMALLEST_KEY)
    return value_of(tl.max(keys))


@triton.jit
def chunk_top_kernel(x_ptr, keys_ptr, length, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """The key of each chunk's largest element: int32 [rows, NUM_CHUNKS]. NaN has the largest key."""
    _row, _offs, mask, x = _chunk(x_ptr, length, NUM_CHUNKS, BLOCK)
    tl.store(keys_ptr + tl.program_id(0), tl.max(tl.where(mask, order_key(x), _SMALLEST_KEY)))


@triton.jit
def chunk_mass_kernel(
    x_ptr, keys_ptr, masses_ptr, length, NUM_CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum of the integers of each chunk's weights: int64 [rows, NUM_CHUNKS]."""
    row, _offs, mask, x = _chunk(x_ptr, length, NUM_CHUNKS, BLOCK)
    top = _top_of_row(keys_ptr, row, NUM_CHUNKS, PADDED_CHUNKS)
    tl.store(masses_ptr + tl.program_id(0), tl.sum(tl.where(mask, mass(x - top), 0)))


@triton.jit
def softmax_kernel(
    x_ptr,
    keys_ptr,
    masses_ptr,
    out_ptr,
    length,
    LOG: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """weight / sum of weights, or (x - max) - ln(sum of weights), of a chunk; NaN if the row has no finite maximum."""
    row, offs, mask, x = _chunk(x_ptr, length, NUM_CHUNKS, BLOCK)
    top = _top_of_row(keys_ptr, row, NUM_CHUNKS, PADDED_CHUNKS)
    chunk = tl.arange(0, PADDED_CHUNKS)
    total = tl.sum(tl.load(masses_ptr + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=0))
    nothing = top - top  # 0, or NaN
    if LOG:
        y = (x - top) - (ln_of_masses(tl.where(nothing == 0.0, total, 1)) + nothing)
    else:
        y = tl.div_rn(to_fp32(mass(x - top)), to_fp32(total)) + nothing
    tl.store(out_ptr + row * length + offs, y, mask=mask)


@triton.jit
def chunk_draw_kernel(
    x_ptr,
    row_keys_ptr,
    temperatures_ptr,
    best_ptr,
    length,
    MAY_BE_GREEDY: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of each chunk the largest sum of logit and noise and, of equal ones, the lowest token: int64 [rows, NUM_CHUNKS],
    the sum's key * 2**32 + (2**32 - 1 - token). A row whose temperature is 0 has no noise.
    """
    row, offs, mask, x = _chunk(x_ptr, length, NUM_CHUNKS, BLOCK)
    noise = gumbel(tl.load(row_keys_ptr + row).to(tl.uint64), offs.to(tl.uint64))
    if MAY_BE_GREEDY:
        noise = tl.where(tl.load(temperatures_ptr + row) == 0.0, 0.0, noise)
    key = order_key(x + noise)
    packed = (key.to(tl.int64) << 32) + (offs.to(tl.int64) ^ _LAST_TOKEN)
    tl.store(best_ptr + tl.program_id(0), tl.max(tl.where(mask, packed, -(1 << 63))))


@triton.jit
def draw_kernel(best_ptr, tokens_ptr, NUM_CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr):
    """The token of the best chunk of each row: int64 [rows]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED_CHUNKS)
    best = tl.max(tl.load(best_ptr + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=-(1 << 63)))
    tl.store(tokens_ptr + row, (best & _LAST_TOKEN) ^ _LAST_TOKEN)
