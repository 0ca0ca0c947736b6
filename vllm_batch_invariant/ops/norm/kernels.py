"""What the kernels on a GPU that normalise rows share: tiles of [rows, width], each row reduced by itself.

A row's squares are added along the tile's second axis only. Which element lies in which register, lane and warp along
that axis, and so the order of additions, follows the width and the dtype as long as one binary serves all calls with
them. Launch with ``enable_fp_fusion=False``: then no compiler fuses a product with the addition for some rows only.
"""

import triton
import triton.language as tl


@triton.jit
def sum_of_pairs(squares):
    """[rows, width] -> [rows]: element i and i + width / 2 are added first."""
    rows: tl.constexpr = squares.shape[0]
    half: tl.constexpr = squares.shape[1] // 2
    return tl.sum(tl.sum(tl.reshape(squares, (rows, 2, half)), 1), 1)


@triton.jit
def inverse_root_mean(totals, number, eps):
    """1 / sqrt(totals / number + eps), every operation rounded as IEEE says."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(totals, number) + eps))


@triton.jit
def weighted(normalised, weight):
    """The product with the weight, rounded to its dtype before and after, as a multiplication in that dtype is."""
    return (normalised.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)
