"""What every launch of a kernel on an NVIDIA GPU says, and on which of them it runs."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .dependent_launch import LaunchSchedule

_HERE = nullcontext()


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager:
    """Makes the tensor's GPU the current one, where it is not already: that costs more than all other checks of a
    launch.
    """
    index = tensor.get_device()
    return _HERE if index < 0 or index == torch.cuda.current_device() else torch.cuda.device(index)


def launch(
    kernel: Any,
    grid: int | tuple[int, ...],
    operands: tuple[object, ...],
    *,
    on: torch.Tensor,
    waits: bool = False,
    enable_fp_fusion: bool = False,
    num_warps: int = 4,
    **options: Any,
) -> None:
    """Launch a kernel of Triton or Gluon: ``kernel[grid](*operands, **options)``, which itself calls ``run``.

    Args:
        kernel: to be launched.
        grid: programs.
        operands: of the kernel, that are no compile-time constants, in order.
        on: a tensor on the GPU where it runs.
        waits: whether the kernel calls :func:`.dependent_launch.wait_for_kernel_before`, with a constant OVERLAPS: it
            may be launched before the kernel before has ended.
        enable_fp_fusion: whether the compiler may add a product unrounded. Versions of Triton that are not told differ.
        num_warps: of a program.
        options: compile-time constants of the kernel, and other options of its launch.
    """
    if waits:
        options |= LaunchSchedule.of(on.device).options
    with on_device_of(on):
        kernel.run(
            *operands,
            grid=grid if isinstance(grid, tuple) else (grid,),
            warmup=False,
            enable_fp_fusion=enable_fp_fusion,
            num_warps=num_warps,
            **options,
        )
