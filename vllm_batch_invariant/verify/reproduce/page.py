"""The HTML page of a reproducibility run."""

from collections.abc import Sequence

from ..answers import RequestSpec
from ..outcome import Outcome
from ..report.html import Cell, Page, Section, Table
from ..report.parts import batch_parts, map_parts
from .report import ReproduceResult, rows_of


def page_of(target: str, spec: RequestSpec, results: Sequence[ReproduceResult]) -> Page:
    """The results, at least one, as a page."""
    columns = [rows_of(result) for result in results]
    rows = tuple((Cell(name), *(Cell(column[name]) for column in columns)) for name in columns[0])
    verdict = Table(
        "The same request, under a load that varies the batch", ("", *(result.label for result in results)), rows
    )
    samples, batches = [], []
    for place, result in enumerate(results):
        labelled = [(f"sample {number}", answer) for number, answer in enumerate(result.answers)]
        samples += map_parts(result.label, f"map-{place}", labelled)
        batches += batch_parts(result.label, f"batches-{place}", [result.trace])
    request = Table(
        "The request",
        ("what", "value"),
        tuple((Cell(name.replace("_", " ")), Cell(str(value))) for name, value in vars(spec).items()),
    )
    return Page(
        title=f"One request, many times: {target}",
        info="vllm-batch-invariant reproduce",
        outcome=_outcome(results[-1]),
        summary=tuple(Cell(result.verdict, _outcome(result)) for result in results),
        partial="",
        sections=(
            Section("verdict", "Verdict", (verdict,)),
            Section("map", "Map of samples", tuple(samples)),
            Section("batches", "Batch size over time", tuple(batches)),
            Section("request", "The request", (request,)),
        ),
    )


def _outcome(result: ReproduceResult) -> Outcome:
    return Outcome.HOLDS if result.comparison.identical else Outcome.BREAKS
