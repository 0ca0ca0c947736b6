"""How kernels of triton-ascend are launched: one program a core, and each program walks its share of the work.

A grid that followed the work would be limited to 65535 programs, and starting a program costs more than a row. The
number of cores is asked of the device: 20 or 24 cube cores, and twice as many vector cores, by chip. It decides only
which core computes what, so it moves no bit.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton


def vector_grid(items: int, device: torch.device) -> tuple[int]:
    """The grid for ``items`` pieces of work without a matrix product."""
    return (min(items, _properties(device)["num_vectorcore"]),)


def cube_grid(items: int, device: torch.device) -> tuple[int]:
    """The grid for ``items`` tiles of a matrix product."""
    return (min(items, _properties(device)["num_aicore"]),)


def on(device: torch.device) -> AbstractContextManager[None]:
    """Kernels launched inside go to ``device``, which for the CPU of Triton's interpreter needs nothing."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def _properties(device: torch.device) -> dict[str, int]:
    index = triton.runtime.driver.active.get_current_device() if device.index is None else device.index
    return triton.runtime.driver.active.utils.get_device_properties(index)
