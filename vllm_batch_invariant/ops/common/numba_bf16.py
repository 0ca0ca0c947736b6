"""bf16 in numba, which has no such type: words of 16 bits, known by being unsigned. Numbers of fp32 and fp64 pass."""

import torch
from numba import types
from numba.extending import overload

from .numba_exact_math import bits_of_float
from .numba_math import float_of_bits

BF16 = types.uint16


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels get it."""
    return tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor


def widened(x):
    """A number of fp32 or fp64 as it is, and of the word of one of bf16 that number, exactly, in fp32."""


@overload(widened)
def _widened(x):
    if x == BF16:
        return lambda x: float_of_bits(types.int32(types.uint32(x) << types.uint32(16)))
    return lambda x: x


def rounded(x, out):
    """A number as an element of the array ``out``: of fp32 the word of bf16, to nearest even and every NaN as one."""


@overload(rounded)
def _rounded(x, out):  # noqa: ARG001 - of which the dtype counts
    if out.dtype != BF16:
        return lambda x, out: x  # noqa: ARG005 - as of the other

    def to_bf16(x, out):  # noqa: ARG001
        bits = types.uint32(bits_of_float(x))
        odd = types.uint32(bits >> types.uint32(16)) & types.uint32(1)
        near = types.uint32(types.uint32(bits + types.uint32(0x7FFF)) + types.uint32(odd)) >> types.uint32(16)
        return types.uint16(0x7FC0) if x != x else types.uint16(near)

    return to_bf16
