"""What decides the bits of a sum or mean."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch

from ..common.dtypes import accumulate
from ..common.row_reduction import LANES, REDUCTIONS_KEPT, RowReduction, gpu_block, gpu_warps
from ..devices import reduction_of

TERMS = ("sizes", "squares", "numbers")
"""What is added of an element: its absolute value, its square, or itself with 0 in the place of NaN."""
_CHUNK = 1 << 16
_LARGEST_GPU_BLOCK = 8192
_MOST_WARPS = 8


@dataclass(frozen=True, kw_only=True)
class SumReduction(RowReduction):
    """The reduction of a row that is summed, see :class:`RowReduction`. On a GPU the sums of its chunks, in
    ``accumulate``, are a row again, with a reduction of its own. A mean divides in ``accumulate``. One rounding to
    ``dtype``.
    """

    @classmethod
    @lru_cache(REDUCTIONS_KEPT)
    def of_device(cls, device_type: str, length: int, dtype: torch.dtype) -> Self:
        """The reduction of a row of ``length`` elements.

        Raises:
            NotCovered: a dtype that is not fp32, bf16, fp16 or fp64.
        """
        if joined := reduction_of("reduce", device_type):
            return joined(length, dtype)
        row = {"length": length, "dtype": dtype, "accumulate": accumulate(dtype, "a reduction")}
        if device_type == "cpu":
            return cls(**row, lanes=LANES)
        block = gpu_block(length, _LARGEST_GPU_BLOCK)
        num_warps = gpu_warps(block, 1, _MOST_WARPS)
        return cls(**row, block=block, num_warps=num_warps, chunk=_CHUNK, enable_fp_fusion=False)
