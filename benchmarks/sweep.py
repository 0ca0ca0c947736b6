"""What a run over cases finds: rows for the data, a line a row of them for a reader, and problems."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from benchmarks.record import Bits, Measurement, Setting
from benchmarks.roofline import Work
from benchmarks.spread import Spread

Metric = tuple[str, str]
"""A name and a unit."""


@dataclass(kw_only=True)
class Findings:
    """The base of every sweep of a benchmark."""

    setting: Setting
    measurements: list[Measurement] = field(default_factory=list)
    problems: int = 0
    """Values that are not near float64, bits that differ and calls that failed."""

    def add(
        self,
        benchmark: str,
        provider: str,
        case: str,
        time: Spread,
        stock: Spread | None,
        rates: Mapping[Metric, Spread],
        bits: Bits,
        others: Mapping[Metric, tuple[Spread, float | None]] | None = None,
        says: str = "",
    ) -> None:
        """Keep and print what was measured of a provider in a case.

        Args:
            time: microseconds.
            stock: those of stock; None where it was not measured.
            rates: amounts by this time.
            others: what else was measured, with its ratio to stock.
            says: the end of the line.
        """
        slower, faster = (None, None) if stock is None else (time.p50 / stock.p50, stock.p50 / time.p50)
        found = {("time", "us"): (time, slower)} | {metric: (rate, faster) for metric, rate in rates.items()}
        found |= others or {}
        kept = asdict(self.setting) | {"bits": bits}
        self.measurements += (
            Measurement(benchmark, provider, case, *metric, **asdict(value), ratio=ratio, **kept)
            for metric, (value, ratio) in found.items()
        )
        values = "  ".join(f"{value.p50:8.4g} {unit}" for (_, unit), (value, _) in found.items())
        compared = "" if slower is None else f"{slower:6.3f} of stock"
        print(f"  {provider:14}{values}  {compared}  {bits}{says}", flush=True)

    def failed(self, what: str, error: Exception) -> None:
        """Count a call that failed, and say so."""
        self.problem(f"FAILED: {what}: {type(error).__name__}: {error}")

    def problem(self, line: str) -> None:
        """Count a problem, and say it."""
        self.problems += 1
        print(line, file=sys.stderr, flush=True)

    def status(self, kinds: str) -> int:
        """The exit status; says how many problems there were, and under which words."""
        if self.problems:
            print(f"{self.problems} problems, see the lines {kinds} above", file=sys.stderr)
        return 1 if self.problems else 0


def rate_of(work: Work, by_memory: bool, time: Spread) -> dict[Metric, Spread]:
    """The bandwidth or the throughput: the one that bounds it."""
    if by_memory:
        return {("bandwidth", "GB/s"): time.rate(work.moved_bytes / 1e3)}
    return {("throughput", "TFLOP/s"): time.rate(work.operations / 1e6)}
