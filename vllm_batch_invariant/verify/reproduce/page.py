"""The HTML page of a reproducibility run."""

from collections.abc import Sequence
from typing import Any

from ..answers import RequestSpec, binned
from ..outcome import Outcome
from ..report.html import Cell, Page, Part, Section, Table, Verdict
from ..report.parts import batch_parts, count, map_parts, pairs, words
from .report import ReproduceResult, rows_of

_TABULATED = ("samples whose ", ", by ")
"""How names of rows begin and go on that are bars on the console, and a table of their own on the page."""


def page_of(target: str, spec: RequestSpec, results: Sequence[ReproduceResult]) -> Page:
    """The results, at least one, as a page."""
    columns = [rows_of(result) for result in results]
    rows = tuple(
        (Cell(name), *(Cell(column[name]) for column in columns))
        for name in columns[0]
        if not all(part in name for part in _TABULATED)
    )
    header = ("", *(result.label for result in results))
    run = Table("The same request, under a load that varies the batch", header, rows)
    samples: list[Part] = []
    batches: list[Part] = []
    for place, result in enumerate(results):
        labelled = [(f"sample {number}", answer) for number, answer in enumerate(result.answers)]
        samples += [*map_parts(result.label, f"map-{place}", labelled), *_positions(result)]
        batches += batch_parts(result.label, [result.trace])
    return Page(
        title=f"One request, many times: {target}",
        info="vllm-batch-invariant reproduce",
        verdicts=tuple(map(_verdict, results)),
        partial="",
        sections=(
            Section("run", "The run", (run,)),
            Section("map", "Map of samples", tuple(samples)),
            Section("batches", "Batch size over time", tuple(batches)),
            Section("request", "The request", (pairs("The request", _rows(spec.asked)),)),
            Section("tested", "What was tested", tuple(_tested(result) for result in results)),
        ),
    )


def _rows(data: dict[str, Any]) -> dict[str, str]:
    return {name.replace("_", " "): words(value) for name, value in data.items()}


def _tested(result: ReproduceResult) -> Table:
    return pairs(f"{result.label}: engine or server", _rows(result.info))


def _verdict(result: ReproduceResult) -> Verdict:
    found, running = result.comparison, result.batches.running
    counts = {"completion": found.completions, "logprob sequence": found.logprob_sequences}
    counts = {"vector": found.logprob_sequences} if result.pools else counts
    different = [(str(number), what + "s" * (number != 1)) for what, number in counts.items()]
    numbers = (
        (str(found.samples), "answers to one request"),
        *different,
        (f"{min(running)} to {max(running)}", "requests in the batch"),
    )
    outcome = Outcome.HOLDS if found.identical else Outcome.BREAKS
    return Verdict(result.label, outcome, result.headline, numbers, f"mode: {result.info['mode']}")


def _positions(result: ReproduceResult) -> tuple[Part, ...]:
    """In how many samples a token or a logprob differs first, by its position."""
    found = result.comparison
    if found.identical:
        return ()
    length = max(result.length, *found.token_positions, *found.logprob_positions)
    ranges = (binned(positions, length) for positions in (found.token_positions, found.logprob_positions))
    header: tuple[str, ...] = ("tokens", "first token to differ", "first logprob to differ")
    if result.pools:
        header = (f"{found.unit}s", f"first {found.unit} to differ")
    rows = tuple(
        (Cell(f"{first} to {last}"), *map(Cell, (str(logprobs),) if result.pools else (str(tokens), str(logprobs))))
        for (first, last, tokens), (_, _, logprobs) in zip(*ranges, strict=True)
        if tokens or logprobs
    )
    caption = f"{result.label}: {count(len(result.answers), 'sample')} by where they first differ from the first"
    return (Table(caption, header, rows),)
