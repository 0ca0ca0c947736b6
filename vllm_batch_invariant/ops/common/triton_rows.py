"""What the row kernels on a GPU share: rows whose alignment no kernel has to ask for, and the order of values as
integers.

Triton compiles a kernel anew for pointers that are not aligned to 16 bytes, with another layout and so another order of
additions; hence the rows a kernel gets are always aligned.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

from .rows import as_rows

ALIGNMENT = 16
"""Bytes."""
_HERE = nullcontext()
_LOW_BITS = tl.constexpr(0x7FFFFFFF)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and starting at a multiple of 16 bytes."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def aligned_rows(x: torch.Tensor, dims: list[int], dtype: torch.dtype) -> torch.Tensor:
    """:func:`.rows.as_rows`, aligned."""
    return aligned(as_rows(x, dims, dtype))


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager:
    """Makes the tensor's GPU the current one, where it is not already: that costs more than all other checks of a
    launch.
    """
    index = tensor.get_device()
    return _HERE if index < 0 or index == torch.cuda.current_device() else torch.cuda.device(index)


@triton.jit
def order_key(x):
    """int32 that grow with x (fp32): the two zeros have one key, and NaN the largest, so that no comparison needs a
    case for them.
    """
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & _LOW_BITS)
    key = tl.where(x == 0.0, 0, key)
    return tl.where(x != x, _LOW_BITS, key)


@triton.jit
def value_of(key):
    """The fp32 value that has the key."""
    return (key ^ ((key >> 31) & _LOW_BITS)).to(tl.float32, bitcast=True)
