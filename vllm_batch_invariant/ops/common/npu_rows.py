"""What the row kernels on an Ascend NPU share: a program reduces a row at a time, by blocks that its length sizes.

Kernels take their pointers and whatever follows the batch unspecialised (``do_not_specialize``,
``do_not_specialize_on_alignment``): Triton would else compile other binaries for a count of 1, for multiples of 16 and
for addresses that are multiples of 16.
"""

from dataclasses import dataclass

import torch

from ...errors import NotCovered

_BLOCKS = (128, 512, 2048)
_LARGEST_SIDE = 2**31 - 1


@dataclass(frozen=True)
class RowLayout:
    """How a program holds a row: ``block`` elements at a time. A vector of that many accumulators runs along the row,
    and is reduced once at its end.
    """

    block: int


def layout_for(length: int, largest: int) -> RowLayout:
    """The layout for rows of ``length`` elements; a part of the reduction, so it may see nothing else.

    Args:
        length: elements of a row.
        largest: the largest block with which the kernel fits into the unified buffer (192 KiB) with room to load the
            next block meanwhile. tests/npu/offline asks the compiler.
    """
    return RowLayout(next((block for block in _BLOCKS if length <= block), largest))


def check_covered(what: str, *tensors: torch.Tensor | None) -> None:
    """Refuse what the vector and cube cores cannot compute.

    Raises:
        NotCovered: a dtype that is not fp32, bf16 or fp16, or a tensor whose places need more than 31 bits in a row.
    """
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotCovered(f"{what} in {tensor.dtype} on an NPU", "its cores add in fp32", "use fp32, bf16 or fp16")
        if max(tensor.shape, default=0) > _LARGEST_SIDE:
            raise NotCovered(f"{what} of {list(tensor.shape)} on an NPU", "a side has 2**31 elements", "split it")
