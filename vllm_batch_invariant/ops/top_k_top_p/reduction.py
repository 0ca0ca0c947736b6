"""What decides which candidates top-p keeps."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TopPReduction:
    """The weight of a candidate is exp(x - max) in fp32, cut to a whole number of ``unit``; weights are added as
    integers, which have no order. So how a row is divided among programs, and what is looked at, is a schedule.

    exp is the one of ``numba_math`` on a CPU, and Triton's on a GPU. The sum that is asked for is p times the row's, in
    fp64, rounded up to a whole number. Weights below the unit count as 0: of 262144 candidates they are less than 3e-7
    of the largest weight together.
    """

    unit_bits: int = 40

    @property
    def unit(self) -> float:
        return 2.0**-self.unit_bits

    @property
    def weightless(self) -> float:
        """A logit that far below the largest, or farther, weighs less than the unit: need not be weighed."""
        return float(math.floor(-self.unit_bits * math.log(2)))


REDUCTION = TopPReduction()
