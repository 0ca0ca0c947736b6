"""What the row kernels on a GPU share: a program reduces one row, by a layout that the row's length alone decides.

Triton compiles a kernel anew for pointers that are not aligned to 16 bytes, with another layout and so another order of
additions; hence the rows a kernel gets are always aligned.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton

from .rows import as_rows

ALIGNMENT = 16
"""Bytes."""
_LARGEST_BLOCK = 8192
_HERE = nullcontext()


@dataclass(frozen=True)
class RowLayout:
    """How a program holds a row: ``block`` elements at a time, in ``warps`` warps."""

    block: int
    warps: int


def layout_for(length: int) -> RowLayout:
    """The layout for rows of ``length`` elements; a part of the reduction, so it may see nothing else."""
    block = min(max(triton.next_power_of_2(length), 32), _LARGEST_BLOCK)
    return RowLayout(block, min(max(block // 512, 1), 8))


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
