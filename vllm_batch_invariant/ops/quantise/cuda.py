"""Rows as codes on a GPU, in Triton."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ..common.launch import launch
from ..common.row_reduction import REDUCTIONS_KEPT, gpu_block, gpu_warps
from ..common.triton_rows import aligned
from .reduction import QuantiseReduction
from .triton_kernels import quantise_kernel

_LARGEST_BLOCK = 8192


class QuantiseNumbers(NamedTuple):
    """Of a :class:`QuantiseReduction`, what the kernel takes as one constant."""

    largest: float
    smallest_static: float
    least: float


@dataclass(frozen=True)
class QuantiseSchedule:
    """Speed only: a row's maximum is the same in every order.

    Attributes:
        block: elements of a row that a program holds.
        num_warps: of a program.
    """

    block: int
    num_warps: int

    @classmethod
    @lru_cache(REDUCTIONS_KEPT)
    def of(cls, length: int) -> "QuantiseSchedule":
        """For rows of ``length`` elements."""
        block = gpu_block(length, _LARGEST_BLOCK)
        return cls(block, gpu_warps(block, 1, 8))


def quantise(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    reduction, length = QuantiseReduction.of_dtype(x.dtype), x.shape[-1]
    schedule = QuantiseSchedule.of(length)
    codes = torch.empty(x.shape, dtype=reduction.codes, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if scales.numel():
        launch(
            quantise_kernel,
            scales.numel(),
            (aligned(x), None if scale is None else aligned(scale), codes, scales),
            on=x,
            waits=True,
            LENGTH=length,
            STATIC=scale is not None,
            QUANTISE=QuantiseNumbers(*(getattr(reduction, name) for name in QuantiseNumbers._fields)),
            BLOCK=schedule.block,
            num_warps=schedule.num_warps,
        )
    return codes, scales
