"""Weights of four bits, read and decoded in a Triton kernel: what a tile's dot takes in the place of a tile of the
matrix, with the matrix's bits.

Codes lie in words of 32 bits, the first of eight in the lowest bits: int32 [rows, K / 8], which are MXFP4's bytes
[rows, K / 2], too. Both formats make numbers of the activations' dtype of integers, without a conversion of single
codes. An integer code q is the last bits of a number of which it is a part, 128 + q in bf16 and 1024 + q in fp16; less
128 + zero it is q - zero, exactly, and the product with the scale is rounded once. A code of e2m1 has a sign, two bits
of exponent and one of mantissa, in the order in which the dtype has them: moved to its place and times a power of two
it is the number, subnormal ones included, and the product with a power of two is exact.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .record import GROUPS, ZEROS, Format


class PackedTile(NamedTuple):
    """What a kernel knows of a format. Of one without a kernel there is none.

    Attributes:
        kind: "int4" or "mxfp4".
        group: elements of K with one scale; 0: those of a row.
        has_zeros: whether there are zero points.
    """

    kind: str
    group: int
    has_zeros: bool

    @classmethod
    def of(cls, form: Format, dtype: torch.dtype) -> "PackedTile | None":
        """That of a format and of the activations' dtype; None where no kernel reads it."""
        if form.name == "mxfp4":
            return None if dtype == torch.float16 else cls("mxfp4", form.group, False)
        if form.packing != 8 or GROUPS in form.names or not form.name.startswith("w4a16"):
            return None
        return cls("int4", 0 if form.name.startswith("w4a16-channel") else form.group, ZEROS in form.names)


@triton.jit
def _integers(codes, zeros, DTYPE: tl.constexpr):
    """codes - zeros in DTYPE: int32 from 0 to 31 of shapes that go together."""
    IS_WIDE: tl.constexpr = DTYPE.primitive_bitwidth == 32
    if IS_WIDE:
        number = codes.to(tl.float32) - zeros.to(tl.float32)
    else:
        ONES: tl.constexpr = 0x4300 if DTYPE.is_bf16() else 0x6400
        number = (codes | ONES).to(tl.int16).to(DTYPE, bitcast=True)
        number -= (zeros | ONES).to(tl.int16).to(DTYPE, bitcast=True)
    return number


@triton.jit
def _e2m1(codes, DTYPE: tl.constexpr):
    """Codes int32 from 0 to 15 as numbers of DTYPE, 2^126 times too small."""
    IS_WIDE: tl.constexpr = DTYPE.primitive_bitwidth == 32
    if IS_WIDE:
        number = (((codes & 8) << 28) | ((codes & 7) << 22)).to(tl.float32, bitcast=True)
    else:
        tl.static_assert(DTYPE.is_bf16())
        number = (((codes & 8) << 12) | ((codes & 7) << 6)).to(tl.int16).to(DTYPE, bitcast=True)
    return number


@triton.jit
def _power(codes, DTYPE: tl.constexpr):
    """2^(code - 127) in DTYPE, of codes int32 from 0 to 254."""
    IS_WIDE: tl.constexpr = DTYPE.primitive_bitwidth == 32
    if IS_WIDE:
        number = tl.where(codes == 0, 1 << 22, codes << 23).to(tl.float32, bitcast=True)
    else:
        number = tl.where(codes == 0, 1 << 6, codes << 7).to(tl.int16).to(DTYPE, bitcast=True)
    return number


@triton.jit
def decoded_tile(
    words_ptr, scales_ptr, zeros_ptr, rows, mask_n, start_k, K,
    FORMAT: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_N, BLOCK_K] of a weight, of DTYPE; numbers beyond K are finite.

    Args:
        words_ptr: int32 [.., K / 8].
        scales_ptr: of DTYPE, or uint8 of "mxfp4": [.., K / group].
        zeros_ptr: uint8 as the scales, or None.
        rows: int64 [BLOCK_N] of the weight.
        mask_n: which of them there are.
        start_k: multiple of BLOCK_K.
        FORMAT: a :class:`PackedTile`.
        EVEN_K: whether BLOCK_K divides K.
    """
    GROUP: tl.constexpr = BLOCK_K if FORMAT.group == 0 or FORMAT.group > BLOCK_K else FORMAT.group
    GROUPS_OF_TILE: tl.constexpr = BLOCK_K // GROUP
    group, word = tl.arange(0, GROUPS_OF_TILE), tl.arange(0, GROUP // 8)
    offs = group[:, None] * (GROUP // 8) + word[None, :]  # [GROUPS_OF_TILE, GROUP / 8]
    mask = mask_n[:, None, None]
    mask_words = mask if EVEN_K else mask & (offs[None, :, :] < (K - start_k) // 8)
    ptrs = words_ptr + rows[:, None, None] * (K // 8) + start_k // 8 + offs[None, :, :]
    words = tl.load(ptrs, mask=mask_words, other=0)  # [BLOCK_N, GROUPS_OF_TILE, GROUP / 8]
    if FORMAT.group == 0:
        offs_scale, mask_scale = rows[:, None, None] + 0 * group[None, :, None], mask
    else:
        of_tile = start_k // FORMAT.group + group
        offs_scale = rows[:, None, None] * (K // FORMAT.group) + of_tile[None, :, None]
        mask_scale = mask if EVEN_K else mask & (of_tile[None, :, None] * FORMAT.group < K)
    scales = tl.load(scales_ptr + offs_scale, mask=mask_scale, other=0)[
        :, :, :, None
    ]  # [BLOCK_N, GROUPS_OF_TILE, 1, 1]
    codes = (words[:, :, :, None] >> (4 * tl.arange(0, 8))[None, None, None, :]) & 15
    if FORMAT.kind == "int4":
        if FORMAT.has_zeros:
            zeros = tl.load(zeros_ptr + offs_scale, mask=mask_scale, other=0).to(tl.int32)[:, :, :, None]
        else:
            zeros = tl.full((1, 1, 1, 1), 8, tl.int32)
        tile = _integers(codes, zeros, DTYPE) * scales
    else:
        tl.static_assert(FORMAT.kind == "mxfp4")
        FACTOR: tl.constexpr = 2.0**126
        tile = (_e2m1(codes, DTYPE) * tl.full((1, 1, 1, 1), FACTOR, DTYPE)) * _power(scales.to(tl.int32), DTYPE)
    return tl.reshape(tile, (BLOCK_N, BLOCK_K))
