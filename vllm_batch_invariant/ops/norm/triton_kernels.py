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
def load_weight(weight_ptr, offs, mask):
    """The weight for each row, not for one: then it lies where the rows do without a trip through shared memory."""
    return tl.load(tl.broadcast_to(weight_ptr + offs[None, :], mask.shape), mask=mask, other=0.0)


@triton.jit
def normalised_tile(
    x,
    weight,
    offs,
    eps,
    VARIANCE_SIZE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NORM: tl.constexpr,
):
    """Rows that lie in one tile, normalised and multiplied with the weight.

    Args:
        x: [BLOCK_M, BLOCK_N] fp32, 0 behind a row's length.
        weight: [BLOCK_M, BLOCK_N], or nothing without HAS_WEIGHT.
        offs: [BLOCK_N], 0 and up.
        NORM: a :class:`.reduction.NormTile`.

    Returns:
        [BLOCK_M, BLOCK_N] in the weight's dtype, or fp32 without one.
    """
    squares = x * x
    if NORM.length > VARIANCE_SIZE:
        squares = tl.where((offs < VARIANCE_SIZE)[None, :], squares, 0.0)
    if NORM.halves_first:
        squares = halves_added(squares)
    y = x * rstd_of(row_sums(squares, 32 * NORM.num_warps), VARIANCE_SIZE, eps)[:, None]
    if HAS_WEIGHT:
        y = weighted(y, weight)
    return y
