"""Weights of four bits, read and decoded in a Triton kernel: what a tile's dot takes in the place of a tile of the
matrix, with the matrix's bits.

Codes lie in words of 32 bits, the first of eight in the lowest bits: int32 [rows, K / 8], which are FP4's bytes
[rows, K / 2], too. The formats make numbers of the activations' dtype of integers, without a conversion of single
codes. An integer code q is the last bits of a number of which it is a part, 128 + q in bf16 and 1024 + q in fp16; less
128 + zero it is q - zero, exactly, and the product with the scale is rounded once. A code of e2m1 has a sign, two bits
of exponent and one of mantissa, in the order in which the dtype has them: moved to its place and times a power of two
it is the number, subnormal ones included, and the product with a power of two is exact. Of NVFP4 by steps the power of
two in a code is multiplied with one of two numbers of its group, exactly.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .record import GROUPS, ZEROS, Format


class PackedTile(NamedTuple):
    """What a kernel knows of a format. Of one without a kernel there is none.

    Attributes:
        kind: "int4", "mxfp4" or "nvfp4", which is by steps.
        group: elements of K with one scale, a multiple of 32, of "nvfp4" 16; 0: those of a row.
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
        if form.name == "nvfp4-steps":
            return None if dtype == torch.float16 else cls("nvfp4", form.group, False)
        if form.packing != 8 or GROUPS in form.names or not form.name.startswith("w4a16"):
            return None
        group = 0 if form.name.startswith("w4a16-channel") else form.group
        return None if group % 32 else cls("int4", group, ZEROS in form.names)


@triton.jit
def _halves(pairs, DTYPE: tl.constexpr):
    """The 16 low bits and the 16 high bits of int32 [...] as numbers of DTYPE, [..., 2]."""
    return tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)).to(DTYPE, bitcast=True)


@triton.jit
def _pairs(words):
    """The bytes of words int32 [...], of two codes each, in which the first is the low half: [..., 4]."""
    return (words.expand_dims(-1) >> (8 * tl.arange(0, 4))) & 255


@triton.jit
def _single(words):
    """The codes of words int32 [...]: [..., 4, 2]."""
    pairs = _pairs(words)
    return tl.join(pairs & 15, pairs >> 4)


@triton.jit
def _integers(words, zeros, DTYPE: tl.constexpr):
    """code - zero in DTYPE, [..., 4, 2], of words [...] and of int32 that goes with that; None: zeros of 8."""
    IS_WIDE: tl.constexpr = DTYPE.primitive_bitwidth == 32
    ONES: tl.constexpr = 0 if IS_WIDE else (0x4300 if DTYPE.is_bf16() else 0x6400)
    BASE: tl.constexpr = 0.0 if IS_WIDE else (128.0 if DTYPE.is_bf16() else 1024.0)
    if IS_WIDE:  # noqa: SIM108 - decided when the kernel is compiled
        number = _single(words).to(tl.float32)
    else:  # times 1 + 2^12: the second code's bits go to the upper half
        number = _halves(((_pairs(words) * 0x1001) & 0x000F000F) | (ONES * 0x10001), DTYPE)
    if zeros is None:  # a constant, which moves no tile to another layout
        number -= BASE + 8.0
    elif IS_WIDE:
        number -= zeros.to(tl.float32)
    else:
        number -= (zeros | ONES).to(tl.int16).to(DTYPE, bitcast=True)
    return number


@triton.jit
def _e2m1(words, DTYPE: tl.constexpr):
    """Codes as numbers of DTYPE, 2^126 times too small: [..., 4, 2] of words [...]."""
    IS_WIDE: tl.constexpr = DTYPE.primitive_bitwidth == 32
    if IS_WIDE:
        codes = _single(words)
        number = (((codes & 8) << 28) | ((codes & 7) << 22)).to(tl.float32, bitcast=True)
    else:
        tl.static_assert(DTYPE.is_bf16())
        pairs = _pairs(words)
        number = _halves(((pairs * 0x01001000) & -0x7FFF8000) | ((pairs * 0x00040040) & 0x01C001C0), DTYPE)
    return number


@triton.jit
def _power(codes, DTYPE: tl.constexpr):
    """2^(code - 127) in DTYPE, of codes int32 from 0 to 254."""
    IS_WIDE: tl.constexpr = DTYPE.primitive_bitwidth == 32
    if IS_WIDE:
        number = tl.maximum(codes << 23, 1 << 22).to(tl.float32, bitcast=True)
    else:
        number = tl.maximum(codes << 7, 1 << 6).to(tl.int16).to(DTYPE, bitcast=True)
    return number


@triton.jit
def _by_steps(words, one, three_halves, DTYPE: tl.constexpr):
    """Codes of words [...] times steps of DTYPE that go with them: [..., 4, 2]."""
    IS_WIDE: tl.constexpr = DTYPE.primitive_bitwidth == 32
    MANTISSA: tl.constexpr = 23 if IS_WIDE else 7
    codes = _single(words)
    power = (126 << MANTISSA) + ((codes & 6) << (MANTISSA - 1))  # 0.5 of code 1, 1 of 2 and 3, ...
    power = tl.where((codes & 7) == 0, 0, power)
    if IS_WIDE:
        power = (power | ((codes & 8) << 28)).to(tl.float32, bitcast=True)
    else:
        power = (power | ((codes & 8) << 12)).to(tl.int16).to(DTYPE, bitcast=True)
    return power * tl.where(((codes & 1) != 0) & ((codes & 6) != 0), three_halves, one)


@triton.jit
def decoded_tile(
    words_ptr, scales_ptr, zeros_ptr, rows, mask_n, start_k, K,
    FORMAT: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_N, BLOCK_K] of a weight, of DTYPE; numbers beyond K are finite.

    Args:
        words_ptr: int32 [.., K / 8].
        scales_ptr: of DTYPE, or uint8 of "mxfp4": [.., K / group]; of "nvfp4" two of each group.
        zeros_ptr: uint8 as the scales, or None.
        rows: int64 [BLOCK_N] of the weight.
        mask_n: which of them there are.
        start_k: multiple of BLOCK_K.
        FORMAT: a :class:`PackedTile`.
        EVEN_K: whether BLOCK_K divides K.
    """
    WORDS: tl.constexpr = 2 if FORMAT.kind == "nvfp4" else 4
    SIZE: tl.constexpr = 8 * WORDS
    PARTS: tl.constexpr = BLOCK_K // SIZE  # of one scale each
    part = tl.arange(0, PARTS)
    offs = WORDS * part[:, None] + tl.arange(0, WORDS)[None, :]  # [PARTS, WORDS]
    mask = mask_n[:, None, None]
    mask_words = mask if EVEN_K else mask & (offs[None, :, :] < (K - start_k) // 8)
    ptrs = words_ptr + rows[:, None, None] * (K // 8) + start_k // 8 + offs[None, :, :]
    words = tl.load(ptrs, mask=mask_words, other=0)  # [BLOCK_N, PARTS, WORDS]
    if FORMAT.group == 0:
        offs_scale, mask_scale = rows[:, None, None] + 0 * part[None, :, None], mask
    else:
        group = (start_k // SIZE + part) // (FORMAT.group // SIZE)
        offs_scale = rows[:, None, None] * (K // FORMAT.group) + group[None, :, None]
        mask_scale = mask if EVEN_K else mask & (group[None, :, None] < K // FORMAT.group)
    if FORMAT.kind == "nvfp4":
        offs_scale *= 2
    scales = tl.load(scales_ptr + offs_scale, mask=mask_scale, other=0)  # [BLOCK_N, PARTS, 1]
    if FORMAT.kind == "nvfp4":
        three_halves = tl.load(scales_ptr + offs_scale + 1, mask=mask_scale, other=0)
        tile = _by_steps(words, scales[:, :, :, None, None], three_halves[:, :, :, None, None], DTYPE)
    elif FORMAT.kind == "int4":
        if FORMAT.has_zeros:
            zeros = tl.load(zeros_ptr + offs_scale, mask=mask_scale, other=0).to(tl.int32)[:, :, :, None, None]
        else:
            zeros = None
        tile = _integers(words, zeros, DTYPE) * scales[:, :, :, None, None]
    else:
        tl.static_assert(FORMAT.kind == "mxfp4")
        FACTOR: tl.constexpr = 2.0**126
        power = _power(scales.to(tl.int32), DTYPE)[:, :, :, None, None]
        tile = (_e2m1(words, DTYPE) * tl.full((1, 1, 1, 1, 1), FACTOR, DTYPE)) * power
    return tl.reshape(tile, (BLOCK_N, BLOCK_K))
