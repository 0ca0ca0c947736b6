"""What decides which candidates top-k and top-p keep."""

import math
from dataclasses import dataclass
from typing import Self

import torch

from ..common.row_reduction import exp_of


@dataclass(frozen=True, kw_only=True)
class TopKTopPReduction:
    """The weight of a candidate is exp(x - max) in fp32, cut to a whole number of ``unit``; weights are added as
    integers, which have no order. So how a row is divided among programs, and what is looked at, is a schedule.

    The sum that is asked for is p times the row's, in fp64, rounded up to a whole number. Weights below the unit count
    as 0: of 262144 candidates they are less than 3e-7 of the largest weight together.

    Attributes:
        exp: the function that computes exp.
        unit_bits: the unit is 2**-unit_bits.
        accumulate: the dtype of every addition.
    """

    exp: str
    unit_bits: int = 40
    accumulate: torch.dtype = torch.int64

    @property
    def unit(self) -> float:
        return 2.0**-self.unit_bits

    @property
    def weightless(self) -> float:
        """A logit that far below the largest, or farther, weighs less than the unit: need not be weighed."""
        return float(math.floor(-self.unit_bits * math.log(2)))

    @classmethod
    def of_device(cls, device_type: str) -> Self:
        """The reduction of every row on a device."""
        return cls(exp=exp_of(device_type))
