"""What the kernels on a GPU that normalise rows share: tiles of [BLOCK_M, BLOCK_N], each row reduced by itself.

    y = x * rsqrt(mean(x**2) + eps) * weight

A row's squares are added along the tile's second axis only. Which element lies in which register, lane and warp along
that axis, and so the order of additions, follows the tile's shape and the dtype as long as one binary serves all calls
with them. Launch with ``enable_fp_fusion=False``: a compiler might fuse a product with an addition for some rows only.
"""

import triton
import triton.language as tl


@triton.jit
def sum_halves_first(squares):
    """[BLOCK_M, BLOCK_N] -> [BLOCK_M]: elements i and i + BLOCK_N / 2 are added first."""
    BLOCK_M: tl.constexpr = squares.shape[0]
    HALF_N: tl.constexpr = squares.shape[1] // 2
    return tl.sum(tl.sum(tl.reshape(squares, (BLOCK_M, 2, HALF_N)), 1), 1)


@triton.jit
def rstd_of(sum_of_squares, length, eps):
    """1 / sqrt(sum_of_squares / length + eps), every operation rounded as IEEE says."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(sum_of_squares, length) + eps))


@triton.jit
def weighted(normalised, weight):
    """The product with the weight, rounded to its dtype before and after, as a multiplication in that dtype is."""
    return (normalised.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)
