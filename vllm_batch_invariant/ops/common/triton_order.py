"""The order of values on a GPU, as integers: which of two is the larger needs no case for -0.0 and NaN any more."""

import triton
import triton.language as tl

_LOW_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def order_key(x):
    """int32 that grow with x (fp32): the two zeros have one key, and NaN the largest."""
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & _LOW_BITS)
    key = tl.where(x == 0.0, 0, key)
    return tl.where(x != x, _LOW_BITS, key)


@triton.jit
def value_of(key):
    """The fp32 value that has the key."""
    return (key ^ ((key >> 31) & _LOW_BITS)).to(tl.float32, bitcast=True)
