"""Parts that several pages have: the map of samples, and batch sizes over time."""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..answers import Answer, compare_answers
from ..harness.metrics import Trace
from ..json_file import run
from ..printing import count, printable
from .chart import Chart, Line, steps
from .html import Cell, Figure, MapFigure, Page, Part, Section, Table, write_html
from .sample_map import Row, letter, map_of

_MOST_LABELS = 8


def pairs(caption: str, rows: dict[str, str]) -> Table:
    """A table of names and values."""
    return Table(caption, ("what", "value"), tuple((Cell(name), Cell(value)) for name, value in rows.items()))


def words(value: Any) -> str:
    """Plain data in a cell: a line for each item of a dictionary."""
    if isinstance(value, dict):
        return "\n".join(f"{name}: {words(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(words, value))
    return f"{value:.1f}" if isinstance(value, float) else printable(str(value))


def write_page(options: argparse.Namespace, page: Page) -> None:
    """Write a command's page to ``options.html``, with when, where and in which environment the command ran.

    Raises:
        NoTestError: the file cannot be written.
    """
    rows = {"command": f"vllm-batch-invariant {options.command}"} | run(options.began)
    table = pairs(
        "When and where it ran", {name.replace("_", " "): words(value) for name, value in rows.items() if value}
    )
    write_html(options.html, replace(page, sections=(*page.sections, Section("command", "The command", (table,)))))


def map_parts(label: str, name: str, samples: Sequence[tuple[str, Answer]]) -> tuple[Part, ...]:
    """The map of samples, and a table of those that differ from the first.

    Args:
        label: whose samples these are.
        name: of the map, unique in its page.
        samples: (label, answer); the others have to equal the first.
    """
    if not samples:
        return (f"{label}: no sample was taken.",)
    if samples[0][1].dtype:
        return _vectors(label, samples)
    found = map_of(samples)
    if not found.different:
        return (f"{label}: all {len(samples)} samples have the same tokens and logprobs, bit for bit.",)
    anchors = {place: f"{name}-row-{place}" for place, row in enumerate(found.rows) if row.logprob is not None}
    description = f"Map of {len(samples)} samples of one request, {label}: " + (
        f"the first token to differ is number {found.first_token}."
        if found.first_token is not None
        else "no token differs, only logprobs."
    )
    caption = (
        f"{label}: a row has all samples with the same bits, a column one token, counted from 0. A letter names the "
        "completion that the samples follow from there on. Each mark leads to its row in the table below."
    )
    if found.not_shown:
        caption += f" {count(found.not_shown, 'sample')} are not drawn."
    header = ("samples", "how many", "completion", "first token to differ", "there", "first logprob to differ")
    rows = tuple(_difference(found.rows[place], anchor) for place, anchor in anchors.items())
    table = Table(f"{label}: samples with other bits than {found.rows[0].labels[0]}", header, rows)
    return MapFigure(caption, found, description, anchors), table.without_empty_columns()


def _vectors(label: str, samples: Sequence[tuple[str, Answer]]) -> tuple[Part, ...]:
    """The same of what a pooling model gave: a row for all samples with the same bits."""
    first, grouped = samples[0][1], dict[Answer, list[str]]()
    for name, answer in samples:
        grouped.setdefault(answer, []).append(name)
    if len(grouped) == 1:
        return (f"{label}: all {len(samples)} samples have the same values, bit for bit.",)
    rows = []
    for answer, names in list(grouped.items())[1:]:
        found = compare_answers([first, answer]).earliest_logprob
        more = len(names) - _MOST_LABELS
        shown = ", ".join(names[:_MOST_LABELS]) + (f" and {more} more" if more > 0 else "")
        there = ("", "") if found is None else (str(found.position), str(found))
        rows.append(tuple(map(Cell, (shown, str(len(names)), *there))))
    header = ("samples", "how many", f"first {first.unit} to differ", "there")
    return (Table(f"{label}: samples with other bits than {samples[0][0]}", header, tuple(rows)),)


def _difference(row: Row, anchor: str) -> tuple[Cell, ...]:
    more = len(row.labels) - _MOST_LABELS
    return (
        Cell(", ".join(row.labels[:_MOST_LABELS]) + (f" and {more} more" if more > 0 else ""), anchor=anchor),
        Cell(str(len(row.labels))),
        Cell(letter(row.follows[-1]) if row.follows else ""),
        Cell("" if row.token is None else str(row.token)),
        Cell(row.difference),
        Cell(str(row.logprob)),
    )


def batch_parts(label: str, traces: Sequence[Trace]) -> tuple[Part, ...]:
    """Batch sizes over time, drawn and in figures."""
    traces = [trace for trace in traces if trace.sizes]
    if not traces:
        return (f"{label}: no batch was seen.",)
    header = ("engine", "smallest batch", "median", "largest", "different sizes", "seconds")
    rows = tuple(tuple(map(Cell, _of_trace(trace))) for trace in traces)
    table = Table(f"{label}: requests in the batch, while there were any", header, rows)
    return *(_over_time(label, trace) for trace in traces), table


def _of_trace(trace: Trace) -> tuple[str, ...]:
    running = [size for size in trace.sizes if size] or [0]
    sizes = str(min(running)), f"{statistics.median(running):g}", str(max(running)), str(len(set(running)))
    return trace.engine, *sizes, f"{trace.seconds[-1] - trace.seconds[0]:.1f}"


def _over_time(label: str, trace: Trace) -> Figure:
    description = f"Requests in the batch over time, {label}: {trace.engine}, up to {max(trace.sizes)}"
    line = Line(trace.engine, steps(tuple(zip(trace.seconds, map(float, trace.sizes), strict=True))))
    chart = Chart(description, "seconds", "requests", (line,))
    return Figure(f"{label}: requests in the batch over time, {trace.engine}.", chart)
