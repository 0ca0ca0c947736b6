"""Parts of a page that more than one report has: the map of samples, and batches over time."""

import statistics
from collections.abc import Sequence

from ..answers import Answer
from ..harness.metrics import Trace
from . import plots
from .html import Cell, Figure, Table
from .sample_map import Row, letter, map_of


def map_parts(label: str, name: str, samples: Sequence[tuple[str, Answer]]) -> tuple[Table | Figure | str, ...]:
    """The map of samples, and a table of those that differ from the first.

    Args:
        label: whose samples these are.
        name: of the map, unique in its page.
        samples: (label, answer), the first one being what the others have to equal.
    """
    if not samples:
        return (f"{label}: no sample was taken.",)
    found = map_of(samples)
    anchors = {place: f"{name}-row-{place}" for place, row in enumerate(found.rows) if row.logprob is not None}
    description = (
        f"Map of {len(samples)} samples of one request, {label}: "
        f"{len(found.rows) - len(found.different)} of {len(found.rows)} rows follow the first in every bit; "
        + (
            f"the first token to differ is number {found.first_token}."
            if found.first_token is not None
            else "no token differs."
        )
    )
    caption = (
        f"{label}: one row a sample, one column a token, counted from 0. A letter names the completion that the sample "
        "follows from there on."
    )
    if anchors:
        caption += " Each mark leads to its row in the table below."
    if found.not_shown:
        caption += f" {found.not_shown} samples are not drawn."
    figure = Figure(caption, plots.sample_map(found, name, description, anchors))
    if not anchors:
        return figure, f"{label}: all {len(samples)} samples have the same tokens and logprobs, bit for bit."
    header = ("sample", "completion", "first token to differ", "there", "first logprob to differ")
    rows = tuple(_difference(found.rows[place], anchor) for place, anchor in anchors.items())
    return figure, Table(f"{label}: samples with other bits than {found.rows[0].label}", header, rows)


def _difference(row: Row, anchor: str) -> tuple[Cell, ...]:
    return (
        Cell(row.label, anchor=anchor),
        Cell(letter(row.follows[-1]) if row.follows else "none"),
        Cell("none" if row.token is None else str(row.token)),
        Cell(row.difference),
        Cell(str(row.logprob)),
    )


def batch_parts(label: str, name: str, traces: Sequence[Trace]) -> tuple[Table | Figure | str, ...]:
    """Batch sizes over time, drawn and in figures."""
    traces = [trace for trace in traces if trace.sizes]
    if not traces:
        return (f"{label}: no batch was seen.",)
    description = f"Requests in the batch over time, {label}: " + "; ".join(
        f"{trace.engine}, {min(trace.sizes)} to {max(trace.sizes)}" for trace in traces
    )
    figure = Figure(f"{label}: requests in the batch over time.", plots.batches_over_time(traces, name, description))
    rows = tuple(
        tuple(
            map(
                Cell,
                (
                    trace.engine,
                    str(min(trace.sizes)),
                    f"{statistics.median(trace.sizes):g}",
                    str(max(trace.sizes)),
                    str(len(set(trace.sizes))),
                    f"{trace.seconds[-1] - trace.seconds[0]:.1f}",
                ),
            )
        )
        for trace in traces
    )
    header = ("engine", "smallest batch", "median", "largest", "different sizes", "seconds")
    return figure, Table(f"{label}: requests in the batch", header, rows)
