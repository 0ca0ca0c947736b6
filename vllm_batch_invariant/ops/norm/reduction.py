"""What decides the bits of RMSNorm."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch

from ..common.row_reduction import LANES, REDUCTIONS_KEPT, RowReduction, gpu_block, gpu_warps
from ..devices import reduction_of

HEAD_SIZES = (64, 128, 256)
"""Lengths of rows that may be heads. On a GPU their squares are first added in pairs half a row apart: the elements
that a rotary embedding turns, so that one kernel can do both with the two halves of a head in the same places.
"""
GATES = ("silu", "sigmoid")
"""Functions of a gate, which a row is multiplied with element by element."""
_VECTOR = 8
"""Elements in 16 bytes of the narrowest dtype."""
_TILE = 2048
"""Elements that a program of short rows holds: with 4 warps, two vectors a thread."""
_LARGEST_GPU_BLOCK = 16_384
_FEWEST_WARPS, _MOST_WARPS = 4, 16


class NormTile(NamedTuple):
    """Of a :class:`NormReduction`, what a kernel takes as one constant: Triton's hooks write constants as JSON."""

    length: int
    rows_per_program: int
    block: int
    stride_unit: int
    halves_first: bool
    num_warps: int


@dataclass(frozen=True, kw_only=True)
class NormReduction(RowReduction):
    """The reduction of one row: its squares in fp32, added as :class:`RowReduction` says, divided by their number;
    1 / sqrt(mean + eps).

    With a residual, the sum x + residual enters unrounded, and is rounded once for the next layer. The normalised row
    is rounded to the weight's dtype, multiplied by the weight and rounded to x's dtype: the order of vLLM's own layer.
    With a gate, it stays in fp32 until it is multiplied by a function of the gate's element, and is rounded once; or
    the row that is normalised is x times that function, in fp32.

    Attributes:
        gate: the function of the gate, of :data:`GATES`; None without one.
        norm_before_gate: whether the gate's function multiplies what is normalised, or x before; None without a gate.
        rows_per_program: on a GPU, rows that share a program and none of their additions: where a row's elements lie
            follows the shape of the whole tile.
        halves_first: on a GPU, whether element i and i + length / 2 are added first, see :data:`HEAD_SIZES`.
        stride_unit: on a GPU, elements by which every stride must be divisible, and in which it is given to the kernel:
            Triton then knows the alignment of every row, which decides where its elements lie, without looking at the
            strides of a call.
    """

    gate: str | None = None
    norm_before_gate: bool | None = None
    rows_per_program: int | None = None
    halves_first: bool | None = None
    stride_unit: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Of the launch of any kernel on a GPU that normalises rows."""
        tile = NormTile(*(getattr(self, name) for name in NormTile._fields))
        return {"NORM": tile, "num_warps": self.num_warps, "enable_fp_fusion": self.enable_fp_fusion}

    @classmethod
    @lru_cache(REDUCTIONS_KEPT)
    def of_device(
        cls,
        device_type: str,
        length: int,
        dtype: torch.dtype,
        has_residual: bool = False,
        gate: str | None = None,
        norm_before_gate: bool | None = None,
    ) -> Self:
        """The reduction of a row of ``length`` elements; only a device that joined may have another with a residual."""
        if joined := reduction_of("norm", device_type):
            return joined(length, dtype, has_residual)
        row = {"length": length, "dtype": dtype, "gate": gate, "norm_before_gate": norm_before_gate}
        if device_type == "cpu":
            return cls(**row, lanes=LANES)
        block = gpu_block(length, _LARGEST_GPU_BLOCK)
        return cls(
            **row,
            block=block,
            num_warps=gpu_warps(block, _FEWEST_WARPS, _MOST_WARPS),
            rows_per_program=max(_TILE // block, 1),
            halves_first=length in HEAD_SIZES,
            stride_unit=1 if length % _VECTOR else _VECTOR,
            enable_fp_fusion=False,
        )
