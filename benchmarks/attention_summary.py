"""A run of the attention benchmark on one screen."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.attention_cases import shape_name
from benchmarks.record import Measurement, geometric_means

_PHASES = {"decode": ("decode",), "prefill": ("prefill",), "chunk, mixed": ("chunk", "mixed")}
_SLOW = 1.2
_WORST = 5
_GRID = "ours-triton"
"""The provider whose every ratio is shown."""


def print_summary(measurements: Sequence[Measurement], console: Console) -> None:
    """Print each provider's slowest cases, the ratios of ours-triton one by one, and the mean ratios to stock."""
    times = [measurement for measurement in measurements if measurement.metric == "time"]
    providers = list(dict.fromkeys(measurement.provider for measurement in times))
    console.print(_worst(times, providers))
    ours = [measurement for measurement in times if measurement.provider == _GRID]
    decodes = [measurement for measurement in ours if measurement.keys["phase"] == "decode"]
    others = [measurement for measurement in ours if measurement.keys["phase"] != "decode"]
    console.print(_grid("decode, batch by context", decodes, _shape_and_batch, lambda keys: keys["context"]))
    console.print(_grid("prefill, chunk and mixed, by tokens", others, shape_name, _tokens))
    console.print(_means(times, providers))


def _shape_and_batch(keys: Mapping[str, str]) -> str:
    return f"{shape_name(keys)} x {keys['batch']}"


def _tokens(keys: Mapping[str, str]) -> str:
    if keys["phase"] == "prefill":
        return keys["tokens"] if keys["batch"] == "1" else f"{keys['batch']} x {keys['tokens']}"
    return f"{keys['phase']} {keys['tokens']}"


def _grid(
    title: str,
    times: Iterable[Measurement],
    row_of: Callable[[Mapping[str, str]], str],
    column_of: Callable[[Mapping[str, str]], str],
) -> Table:
    """A row and a column for each value of these functions of the case's keys, in order of appearance."""
    ratios: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for measurement in times:
        column = column_of(measurement.keys)
        columns[column] = None
        ratio = "" if measurement.ratio is None else f"{measurement.ratio:.2f}"
        ratios.setdefault(row_of(measurement.keys), {})[column] = ratio
    table = Table(title=f"{_GRID} against stock: {title}", title_justify="left")
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    for row, found in ratios.items():
        table.add_row(row, *(found.get(column, "") for column in columns))
    return table


def _means(times: Sequence[Measurement], providers: Sequence[str]) -> Table:
    table = Table(title="Time against stock, geometric mean", title_justify="left")
    table.add_column("provider", no_wrap=True)
    for heading in (*_PHASES, f"decode > {_SLOW}", "differ", "no graph", "cases"):
        table.add_column(heading, justify="right")
    means = [
        geometric_means(measurement for measurement in times if measurement.keys["phase"] in phases)
        for phases in _PHASES.values()
    ]
    for provider in providers:
        own = [measurement for measurement in times if measurement.provider == provider]
        slow = [
            measurement
            for measurement in own
            if measurement.keys["phase"] == "decode" and measurement.ratio is not None and measurement.ratio > _SLOW
        ]
        table.add_row(
            provider,
            *(f"{mean[provider,]:.3f}" if (provider,) in mean else "" for mean in means),
            str(len(slow)),
            str(sum(measurement.bits == "differ" for measurement in own)),
            str(sum(measurement.keys.get("graph") == "no" for measurement in own)),
            str(len(own)),
        )
    return table


def _worst(times: Sequence[Measurement], providers: Sequence[str]) -> Table:
    title = f"The {_WORST} slowest cases against stock"
    columns = "phase", "batch", "tokens", "context"
    table = Table("provider", "ratio", "us", "shape", *columns, title=title, title_justify="left")
    for provider in providers:
        if provider == "stock":
            continue
        own = [measurement for measurement in times if measurement.provider == provider and measurement.ratio]
        for measurement in sorted(own, key=lambda measurement: -measurement.ratio)[:_WORST]:
            values = (measurement.keys[column] for column in columns)
            ratio, microseconds = f"{measurement.ratio:.3f}", f"{measurement.p50:.4g}"
            table.add_row(provider, ratio, microseconds, shape_name(measurement.keys), *values)
    return table
