"""What the kernels on a GPU that normalise rows share: tiles of [BLOCK_M, BLOCK_N], each row reduced by itself.

    y = x * rsqrt(mean(x**2) + eps) * weight

A row's squares are added along the tile's second axis only, as ``common.triton_rows.row_sums`` says. Launch with
``enable_fp_fusion=False``: a compiler might fuse a product with an addition for some rows only.
"""

import triton
import triton.language as tl

from ..common.triton_rows import row_sums


@triton.jit
def halves_added(squares):
    """[BLOCK_M, BLOCK_N] -> [BLOCK_M, BLOCK_N / 2]: elements i and i + BLOCK_N / 2."""
    return tl.sum(tl.reshape(squares, (squares.shape[0], 2, squares.shape[1] // 2)), 1)


@triton.jit
def rstd_of(sum_of_squares, length, eps):
    """1 / sqrt(sum_of_squares / length + eps), every operation rounded as IEEE says."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(sum_of_squares, length) + eps))


@triton.jit
def weighted(normalised, weight):
    """The product with the weight, rounded to its dtype before and after, as a multiplication in that dtype is."""
    return (normalised.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)


@triton.jit
def function_of_gate(gate, GATE: tl.constexpr):
    """One of :data:`.reduction.GATES` of fp32, with a division that is rounded as IEEE says."""
    return tl.div_rn(gate if GATE == "silu" else 1.0, 1.0 + tl.exp(-gate))


@triton.jit
def load_weight(weight_ptr, offs, mask, ADDS_ONE: tl.constexpr = False):
    """The weight for each row, not for one: then it lies where the rows do without a trip through shared memory. With
    ADDS_ONE 1 more, in fp32.
    """
    weight = tl.load(tl.broadcast_to(weight_ptr + offs[None, :], mask.shape), mask=mask, other=0.0)
    return weight.to(tl.float32) + 1.0 if ADDS_ONE else weight


@triton.jit
def normalised(x, offs, eps, VARIANCE_SIZE: tl.constexpr, NORM: tl.constexpr):
    """Rows that lie in one tile, [BLOCK_M, BLOCK_N] fp32 and 0 behind a row's length, without a weight."""
    squares = x * x
    if NORM.length > VARIANCE_SIZE:
        squares = tl.where((offs < VARIANCE_SIZE)[None, :], squares, 0.0)
    if NORM.halves_first:
        squares = halves_added(squares)
    return x * rstd_of(row_sums(squares, 32 * NORM.num_warps), VARIANCE_SIZE, eps)[:, None]


@triton.jit
def norm_of(
    x, weight, offs, out_ptr, residual_out_ptr, starts, columns, mask, eps,
    VARIANCE_SIZE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Normalises rows that lie in one tile, however they came, multiplies them with the weight, and stores them; with
    HAS_RESIDUAL the rows as they came, too. Returns what it stored of the first.

    Args:
        x: [BLOCK_M, BLOCK_N] fp32, 0 behind a row's length.
        weight: [BLOCK_M, BLOCK_N], or nothing without HAS_WEIGHT.
        offs: [BLOCK_N], 0 and up.
        starts, columns: of [BLOCK_M, BLOCK_N] or broadcast to it, what is added to both pointers, one after the other.
        NORM: a :class:`.reduction.NormTile`.
    """
    if HAS_RESIDUAL:
        tl.store(residual_out_ptr + starts + columns, x.to(residual_out_ptr.dtype.element_ty), mask=mask)
    y = normalised(x, offs, eps, VARIANCE_SIZE, NORM)
    if HAS_WEIGHT:
        y = weighted(y, weight)
    y = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + starts + columns, y, mask=mask)
    return y
