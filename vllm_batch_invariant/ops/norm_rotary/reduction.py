"""What decides the bits of RMSNorm with rotary embedding."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch

from ..common.row_reduction import REDUCTIONS_KEPT
from ..norm.reduction import NormReduction

_TILE = 1024
"""Elements of a program: with 2 warps, a vector of each half of a head in every thread."""
_NUM_WARPS = 2


@dataclass(frozen=True, kw_only=True)
class NormRotaryReduction(NormReduction):
    """The reduction of a head on a GPU, with the bits of :class:`NormReduction`: a program holds the two halves of a
    head as two blocks, adds their squares in pairs, and these as :class:`NormReduction` adds the sums of pairs.

    The normalised head is rounded; the rotation is computed in fp32 and rounded once.
    """

    @classmethod
    @lru_cache(REDUCTIONS_KEPT)
    def of_device(cls, device_type: str, length: int, dtype: torch.dtype) -> Self:
        """The reduction of a head of ``length`` elements."""
        norm = NormReduction.of_device(device_type, length, dtype)
        tile = {"block": length // 2, "num_warps": _NUM_WARPS, "rows_per_program": _TILE // length}
        return cls(**vars(norm) | tile)
