"""Samples of a measurement, summed up."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median and the 20th and 80th percentile of some measurements."""

    p50: float
    p20: float
    p80: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """The spread of at least two samples."""
        p20, _, _, p80 = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(statistics.median(samples), p20, p80)

    def rate(self, amount: float) -> "Spread":
        """``amount`` divided by these times: the slow times are the low rates."""
        return Spread(amount / self.p50, amount / self.p80, amount / self.p20)
