"""What the row kernels on a GPU share: rows whose alignment no kernel has to ask for, sums whose order the source says,
and the order of values as integers.

Triton compiles a kernel anew for pointers that are not aligned to 16 bytes, with another layout; hence the rows a
kernel gets are always aligned.
"""

import torch
import triton
import triton.language as tl

from .rows import as_rows

ALIGNMENT = 16
"""Bytes."""
_LOW_BITS = tl.constexpr(0x7FFFFFFF)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and starting at a multiple of 16 bytes."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def aligned_rows(x: torch.Tensor, dims: list[int], dtype: torch.dtype) -> torch.Tensor:
    """:func:`.rows.as_rows`, aligned."""
    return aligned(as_rows(x, dims, dtype))


@triton.jit
def row_sums(x, NUM_THREADS: tl.constexpr):
    """[M, N] -> [M]: 8 adjacent elements by a tree, then elements half a row apart until each of the program's
    threads has one, then those of lanes and warps.

    Each ``tl.sum`` but the last adds two elements, and the last has one a thread. In which order Triton adds the
    elements of one thread follows its version: 3.6 one after the other, 3.8 by a tree.
    """
    M: tl.constexpr = x.shape[0]
    for _ in tl.static_range(3):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (M, x.shape[1] // 2, 2)), 2)
    for _ in tl.static_range(16):
        if x.shape[1] > NUM_THREADS:
            x = tl.sum(tl.reshape(x, (M, 2, x.shape[1] // 2)), 1)
    return tl.sum(x, 1)


@triton.jit
def row_sum(x, NUM_THREADS: tl.constexpr):
    """:func:`row_sums` of one row: [N] -> []."""
    return tl.sum(row_sums(x[None, :], NUM_THREADS))


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
