"""What the kernels on a GPU that normalise rows share: tiles of [BLOCK_M, BLOCK_N], each row reduced by itself.

    y = x * rsqrt(mean(x**2) + eps) * weight

A row's squares are added along the tile's second axis only, as ``common.triton_rows.row_sums`` says. Launch with
``enable_fp_fusion=False``: a compiler might fuse a product with an addition for some rows only.
"""

import triton
import triton.language as tl


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
