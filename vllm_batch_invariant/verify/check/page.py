"""The HTML page of a check."""

from typing import Any

from ..outcome import Outcome
from ..printing import printable
from ..report import plots
from ..report.html import Cell, Figure, Page, Section, Table
from ..report.parts import batch_parts, map_parts
from .guarantees import GUARANTEES, Certificate
from .report import Report, outcome_of, summary
from .results import CheckResults

Part = Table | Figure | str


def page_of(report: Report) -> Page:
    """The report as a page."""
    runs = report.runs
    sections = (
        Section("verdict", "Verdict", (_guarantees(runs), *(_cases(run) for run in runs))),
        Section("map", "Map of samples", _each(runs, "map", _map)),
        Section("batches", "Batch size over time", _each(runs, "batches", _batches)),
        Section("latency", "Latency", _latency(runs)),
        Section("operations", "Operations", tuple(part for run in runs for part in _certificates(run))),
        Section("setting", "What was checked", tuple(_setting(report, run) for run in runs)),
    )
    return Page(
        title=f"Batch invariance of {report.target}",
        info=f"vllm-batch-invariant check, {report.preset}, {report.began}, {report.seconds:.0f} s",
        outcome=report.outcome,
        summary=tuple(Cell(summary(run), outcome_of(run)) for run in runs),
        partial=report.partial,
        sections=sections,
    )


def _each(runs: tuple[CheckResults, ...], name: str, parts: Any) -> tuple[Part, ...]:
    return tuple(part for place, run in enumerate(runs) for part in parts(run, f"{name}-{place}"))


def _guarantees(runs: tuple[CheckResults, ...]) -> Table:
    guarantees = [run.guarantees for run in runs]
    rows = tuple(
        (
            Cell(guarantee.name),
            Cell(guarantee.promise),
            *(Cell(of_run[place].detail, of_run[place].outcome) for of_run in guarantees),
        )
        for place, guarantee in enumerate(GUARANTEES)
    )
    return Table("The guarantees of the contract", ("guarantee", "same bits ...", *(run.label for run in runs)), rows)


def _cases(run: CheckResults) -> Table:
    rows = tuple(
        (Cell(case.name), Cell(case.guarantee), Cell(case.detail, case.outcome), Cell(case.difference or "nothing"))
        for case in run.cases
    )
    return Table(f"{run.label}: every case", ("case", "guarantee", "result", "first difference"), rows)


def _map(run: CheckResults, name: str) -> tuple[Part, ...]:
    return map_parts(run.label, name, [(shown.label, shown.answer) for shown in run.shown])


def _batches(run: CheckResults, name: str) -> tuple[Part, ...]:
    return batch_parts(run.label, name, run.traces)


def _latency(runs: tuple[CheckResults, ...]) -> tuple[Part, ...]:
    measured = {run.label: run.latency for run in runs if run.latency is not None}
    if not measured:
        return ("No latency was measured.",)
    figures = {label: latency.figures for label, latency in measured.items()}
    names = next(iter(figures.values()))
    rows = tuple((Cell(name), *(Cell(f"{figures[label][name]:.4g}") for label in measured)) for name in names)
    load = next(iter(measured.values()))
    caption = f"{load.requests} requests at once, {load.tokens // load.requests} tokens each, without a server"
    table = Table(caption, ("", *measured), rows)
    description = "Share of tokens by the time since the token before: " + "; ".join(
        f"{label}, half within {values['between tokens, median (ms)']:.3g} ms" for label, values in figures.items()
    )
    figure = Figure(
        f"{caption}: time between two tokens of a request.", plots.latencies(measured, "latency-plot", description)
    )
    if len(measured) < 2:
        return figure, table, "The other setting was not measured; --compare measures both."
    return figure, table


def _certificates(run: CheckResults) -> tuple[Part, ...]:
    if not run.certificates:
        return (f"{run.label}: no operation was tested.",)
    header = ("operation", "shape", "bits", "batches of", "elements compared", "computed by")
    rows = tuple(_certificate(certificate) for certificate in run.certificates)
    return (Table(f"{run.label}: each operation alone and in larger batches", header, rows),)


def _certificate(certificate: Certificate) -> tuple[Cell, ...]:
    outcome = Outcome.HOLDS if certificate.holds else Outcome.BREAKS if certificate.difference else Outcome.NOT_TESTED
    text = certificate.difference or certificate.untested or certificate.note
    return (
        Cell(certificate.operation),
        Cell(certificate.shape),
        Cell(text, outcome),
        Cell("" if certificate.guarantee == "schedule" else _sizes(certificate.rows)),
        Cell(str(certificate.compared)),
        Cell(certificate.served_by),
    )


def _sizes(rows: tuple[int, ...]) -> str:
    return ", ".join(map(str, rows)) if len(rows) <= 16 else f"{len(rows)} sizes from {rows[0]} to {rows[-1]}"


def _setting(report: Report, run: CheckResults) -> Table:
    rows = [("target", report.target), ("arguments", " ".join(report.arguments) or "none")]
    rows += [(name.replace("_", " "), _words(value)) for name, value in run.info.items()]
    cells = tuple((Cell(name), Cell(value)) for name, value in rows)
    return Table(f"{run.label}: engine, machine and versions", ("what", "value"), cells)


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{name}: {_words(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return f"{value:.1f}" if isinstance(value, float) else printable(str(value))
