"""What the kernels of triton-ascend share: the grids they are launched with, and what they refuse.

A launch is one program a core, and each program walks its share of the work. A grid that followed the work would be
limited to 65535 programs, and starting a program costs more than a row. The number of cores is asked of the device: 20
or 24 cube cores, and twice as many vector cores, by chip. It decides which core computes what, so it moves no bit.

Kernels take their pointers and whatever follows the batch unspecialised (``do_not_specialize``,
``do_not_specialize_on_alignment``): Triton would else compile other binaries for a count of 1, for multiples of 16 and
for addresses that are multiples of 16.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton

from ...errors import NotCovered

_LARGEST_SIDE = 2**31 - 1


def vector_grid(items: int, device: torch.device) -> tuple[int]:
    """The grid for ``items`` pieces of work without a matrix product."""
    return (min(items, _properties(device)["num_vectorcore"]),)


def cube_grid(items: int, device: torch.device) -> tuple[int]:
    """The grid for ``items`` tiles of a matrix product."""
    return (min(items, _properties(device)["num_aicore"]),)


def on(device: torch.device) -> AbstractContextManager[None]:
    """Kernels launched inside go to ``device``, which for the CPU of Triton's interpreter needs nothing."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def check_covered(what: str, *tensors: torch.Tensor | None) -> None:
    """Refuse what the vector and cube cores cannot compute.

    Raises:
        NotCovered: a dtype that is not fp32, bf16 or fp16, or a tensor whose indices need more than 31 bits in a row.
    """
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotCovered(f"{what} in {tensor.dtype} on an NPU", "its cores add in fp32", "use fp32, bf16 or fp16")
        if max(tensor.shape, default=0) > _LARGEST_SIDE:
            raise NotCovered(f"{what} of {list(tensor.shape)} on an NPU", "a side has 2**31 elements", "split it")


def _properties(device: torch.device) -> dict[str, int]:
    index = triton.runtime.driver.active.get_current_device() if device.index is None else device.index
    return triton.runtime.driver.active.utils.get_device_properties(index)
