"""What decides the bits of RMSNorm."""

from dataclasses import dataclass

import torch

from ..reduce.reduction import SumReduction

HEAD_SIZES = (64, 128, 256)
"""Lengths of rows that may be heads. On a GPU their squares are first added in pairs half a row apart: the elements
that a rotary embedding turns, so that one kernel can do both with the two halves of a head in the same places.
"""


@dataclass(frozen=True)
class NormReduction:
    """The reduction of one row: the squares in fp32, summed by :class:`SumReduction`, divided by their number; 1 /
    sqrt(mean + eps).

    With a residual, the sum x + residual enters unrounded, and is rounded once for the next layer. The normalised row
    is rounded to the weight's dtype, multiplied by the weight and rounded to x's dtype: the order of vLLM's own layer.
    """

    length: int
    dtype: torch.dtype

    @property
    def squares(self) -> SumReduction:
        return SumReduction(self.length, torch.float32)
