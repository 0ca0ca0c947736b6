"""The order of values on a CPU, as integers: which of two is the larger needs no case for -0.0 and NaN any more."""

import numpy as np
from numba import njit, types

_LOW_BITS = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)


@njit(inline="always")
def order_key(bits):
    """int32 that grow with the fp32 value of those bits: the two zeros have one key, and NaN the largest."""
    magnitude = bits & _LOW_BITS
    key = bits ^ ((bits >> types.int32(31)) & _LOW_BITS)
    key = types.int32(0) if magnitude == 0 else key
    return _LOW_BITS if magnitude > _INFINITY else key
