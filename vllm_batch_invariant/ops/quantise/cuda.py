"""Rows as codes on a GPU, in Triton."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton

from ..common.launch import launch
from ..common.nvidia_gpus import converts_e4m3
from ..common.row_reduction import REDUCTIONS_KEPT, gpu_block, gpu_warps, next_power_of_two
from ..common.triton_rows import ALIGNMENT, aligned
from .kept import keep, kept
from .reduction import E4M3, QuantiseReduction
from .triton_kernels import quantise_kernel

_LARGEST_BLOCK = 8192
_GROUPED_BLOCK = 1024
"""Elements that a program has of groups."""
ROWS = 4
"""A library multiplies so many rows at once (:mod:`..scaled_linear.library`)."""
_STORED = {E4M3: torch.uint8}
"""What codes are to a kernel, where Triton has not their dtype on every GPU."""


def filled_up(rows: int) -> int:
    """The next multiple of :data:`ROWS`."""
    return -(-rows // ROWS) * ROWS


def side_by_side(scale: torch.Tensor) -> torch.Tensor:
    """Scales [M, groups] with rows side by side, columns of which begin M, filled up to a multiple of 4, apart: as they
    are, or copied.
    """
    rows = filled_up(len(scale))
    if scale.stride() == (1, rows) and scale.data_ptr() % ALIGNMENT == 0:
        return scale
    return scale.new_empty(scale.shape[1], rows)[:, : len(scale)].t().copy_(scale)


class QuantiseNumbers(NamedTuple):
    """Of a :class:`QuantiseReduction`, what the kernel takes as one constant."""

    largest: float
    smallest_static: float
    least: float
    divides: bool
    scale_of_zeros: float
    in_hardware: bool
    """Whether the GPU converts to e4m3, and divides by a fused multiply-add: speed only."""

    @classmethod
    def of(cls, reduction: QuantiseReduction, device: torch.device) -> "QuantiseNumbers":
        """Those of a reduction."""
        in_hardware = reduction.codes == E4M3 and not triton.knobs.runtime.interpret
        in_hardware = in_hardware and converts_e4m3(torch.cuda.get_device_capability(device))
        return cls(*(getattr(reduction, name) for name in cls._fields[:-1]), in_hardware)


@dataclass(frozen=True)
class QuantiseSchedule:
    """Speed only: a maximum is the same in every order.

    Attributes:
        block: elements of a group that a program holds.
        groups: of a row that a program has.
        num_warps: of a program.
    """

    block: int
    groups: int
    num_warps: int

    @classmethod
    @lru_cache(REDUCTIONS_KEPT)
    def of(cls, length: int, group: int | None = None) -> "QuantiseSchedule":
        """For rows of ``length`` elements, in groups of a power of two or as a whole."""
        block = gpu_block(group or length, _LARGEST_BLOCK)
        groups = 1 if group is None else min(next_power_of_two(-(-length // group)), _GROUPED_BLOCK // block)
        return cls(block, groups, gpu_warps(block * groups, 1, 8))


def quantise(
    x: torch.Tensor, scale: torch.Tensor | None, reduction: QuantiseReduction
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package; what a kernel has kept of the rows is not made again."""
    if scale is None and (found := kept(x, reduction)) is not None:
        return found
    length, counts = x.shape[-1], reduction.scales_of(x.shape[-1])
    schedule = QuantiseSchedule.of(length, reduction.group)
    codes, scales, scale_rows = empty(x, reduction)
    if scales.numel():
        launch(
            quantise_kernel,
            x.shape[:-1].numel() * -(-(counts or 1) // schedule.groups),
            (aligned(x), None if scale is None else aligned(scale), codes, scales, scale_rows),
            on=x,
            waits=True,
            LENGTH=length,
            STATIC=0 if scale is None else scale.numel(),
            PADDED_STATIC=1 if scale is None else next_power_of_two(scale.numel()),
            QUANTISE=QuantiseNumbers.of(reduction, x.device),
            GROUP=reduction.group or max(length, 1),
            BLOCK=schedule.block,
            GROUPS=schedule.groups,
            num_warps=schedule.num_warps,
        )
    return codes.view(reduction.codes), scales


def empty(x: torch.Tensor, reduction: QuantiseReduction) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Codes of x, as a kernel takes them, and scales that nobody has written, and how many rows both have memory for, a
    multiple of ``ROWS``. Scales of groups lie with rows side by side, so many for each group, as libraries read them.
    """
    counts = reduction.scales_of(x.shape[-1])
    rows = x.shape[:-1].numel()
    held = filled_up(rows)
    dtype = _STORED.get(reduction.codes, reduction.codes)
    codes = torch.empty(held, x.shape[-1], dtype=dtype, device=x.device)[:rows].view(x.shape)
    groups = 1 if counts is None else counts
    scales = torch.empty(groups, held, dtype=torch.float32, device=x.device)[:, :rows].t()
    return codes, scales.view(x.shape[:-1] if counts is None else (*x.shape[:-1], counts)), held


class Quantised(NamedTuple):
    """Codes that another kernel writes beside its rows: operands (codes, scales, rows of memory that each group has of
    scales) and constants of its launch.
    """

    operands: tuple[torch.Tensor | None, torch.Tensor | None, int] = (None, None, 0)
    constants: Mapping[str, Any] = MappingProxyType({"GROUP": None, "QUANTISE": None})


NOT_QUANTISED = Quantised()


def quantised(out: torch.Tensor, codes: QuantiseReduction) -> Quantised:
    """What a kernel writes beside ``out`` [..., K], a new packed tensor, as :func:`.triton_kernels.store_codes` takes
    it; from then on that is kept with ``out``.
    """
    stored, scales, scale_rows = empty(out, codes)
    keep(out, stored.view(codes.codes), scales, codes)
    return Quantised(
        (stored, scales, scale_rows), {"GROUP": codes.group, "QUANTISE": QuantiseNumbers.of(codes, out.device)}
    )
