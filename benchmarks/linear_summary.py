"""A run of the linear benchmark on one screen."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.record import Measurement, geometric_means

_RANGES = {"M ≤ 64": range(1, 65), "64 < M < 256": range(65, 256), "M ≥ 256": range(256, 1 << 62)}
_SLOW = 1.3
_WORST = 10


def print_summary(measurements: Sequence[Measurement], console: Console) -> None:
    """Print the mean ratios to stock, and each provider's slowest cases."""
    times = [measurement for measurement in measurements if measurement.metric == "time"]
    providers = list(dict.fromkeys(measurement.provider for measurement in times))
    console.print(_worst(times, providers))
    console.print(_means(times, providers))


def _means(times: Sequence[Measurement], providers: Sequence[str]) -> Table:
    table = Table(title="Time against stock, geometric mean", title_justify="left")
    table.add_column("provider", no_wrap=True)
    for heading in (*_RANGES, f"> {_SLOW}", "differ", "cases"):
        table.add_column(heading, justify="right")
    means = [
        geometric_means(measurement for measurement in times if int(measurement.keys["M"]) in rows)
        for rows in _RANGES.values()
    ]
    for provider in providers:
        own = [measurement for measurement in times if measurement.provider == provider]
        table.add_row(
            provider,
            *(f"{mean[provider,]:.3f}" if (provider,) in mean else "" for mean in means),
            str(sum(measurement.ratio is not None and measurement.ratio > _SLOW for measurement in own)),
            str(sum(measurement.bits == "differ" for measurement in own)),
            str(len(own)),
        )
    return table


def _worst(times: Sequence[Measurement], providers: Sequence[str]) -> Table:
    title = f"The {_WORST} slowest cases against stock"
    table = Table("provider", "ratio", "us", "case", title=title, title_justify="left")
    for provider in providers:
        if provider == "stock":
            continue
        own = [measurement for measurement in times if measurement.provider == provider and measurement.ratio]
        for measurement in sorted(own, key=lambda measurement: -measurement.ratio)[:_WORST]:
            table.add_row(provider, f"{measurement.ratio:.3f}", f"{measurement.p50:.4g}", measurement.case)
    return table
