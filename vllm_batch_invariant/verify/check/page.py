"""The HTML page of a check."""

from ..outcome import Outcome
from ..report.chart import Chart, Line, distribution
from ..report.html import Cell, Figure, Page, Part, Section, Table, Verdict
from ..report.parts import batch_parts, map_parts, pairs, words
from .guarantees import GUARANTEES, Certificate, GuaranteeResult
from .report import Report, summary
from .results import CheckResults

_WITH = {"run": "from run to run", "batch": "with the batch", "schedule": "with the schedule"}
"""How a guarantee that breaks shows, in plain words."""


def page_of(report: Report) -> Page:
    """The report as a page."""
    runs = report.runs
    sections = (
        Section("guarantees", "Guarantees", (_guarantees(runs), *(_cases(run) for run in runs))),
        Section("map", "Map of samples", tuple(part for place, run in enumerate(runs) for part in _map(run, place))),
        Section("batches", "Batch size over time", tuple(part for run in runs for part in _batches(run))),
        Section("latency", "Latency", _latency(runs)),
        Section("operations", "Operations", tuple(part for run in runs for part in _certificates(run))),
        Section("setting", "What was checked", tuple(_setting(report, run) for run in runs)),
    )
    return Page(
        title=f"Batch invariance of {report.target}",
        info=f"vllm-batch-invariant check, {report.preset}, {report.began}, {report.seconds:.0f} s",
        verdicts=tuple(map(_verdict, runs)),
        partial=report.partial,
        sections=sections,
    )


def _verdict(run: CheckResults) -> Verdict:
    cases = [case for case in run.cases if case.required]
    tested = [case for case in cases if case.outcome is not Outcome.NOT_TESTED]
    held = [case for case in cases if case.outcome is Outcome.HOLDS]
    broken = [_WITH[result.guarantee.name] for result in run.guarantees if result.outcome is Outcome.BREAKS]
    outcome = run.status.outcome
    if outcome is Outcome.BREAKS:
        headline = f"Not reproducible. Bits change {' and '.join(broken)}."
    elif outcome is Outcome.HOLDS:
        headline = "Reproducible. No bit changed in any case."
    else:
        headline = f"Not decided. {len(cases) - len(tested)} of {len(cases)} cases could not be tested."
    numbers = [(f"{len(held)} of {len(cases)}", "cases with the same bits")]
    if run.largest:
        numbers.append((str(max(run.largest.values())), "requests in the largest batch"))
    if answers := sum(map(len, run.samples.values())):
        numbers.append((str(answers), "answers compared"))
    return Verdict(run.label, outcome, headline, tuple(numbers), summary(run))


def _guarantees(runs: tuple[CheckResults, ...]) -> Table:
    guarantees = [run.guarantees for run in runs]
    rows = tuple(
        (
            Cell(guarantee.name),
            Cell(guarantee.promise),
            *(_of_guarantee(of_run[place]) for of_run in guarantees),
        )
        for place, guarantee in enumerate(GUARANTEES)
    )
    return Table("The guarantees of the contract", ("guarantee", "same bits ...", *(run.label for run in runs)), rows)


def _of_guarantee(result: GuaranteeResult) -> Cell:
    if result.not_applicable:
        return Cell(f"no check can test it: {result.detail}")
    return Cell(result.detail, result.outcome)


def _cases(run: CheckResults) -> Table:
    rows = tuple(
        (Cell(case.name), Cell(case.guarantee), Cell(case.detail, case.outcome), Cell(case.difference))
        for case in run.cases
    )
    header = ("case", "guarantee", "result", "first difference")
    return Table(f"{run.label}: every case", header, rows).without_empty_columns()


def _map(run: CheckResults, place: int) -> tuple[Part, ...]:
    return map_parts(run.label, f"map-{place}", [(shown.label, shown.answer) for shown in run.shown])


def _batches(run: CheckResults) -> tuple[Part, ...]:
    return batch_parts(run.label, run.traces)


def _latency(runs: tuple[CheckResults, ...]) -> tuple[Part, ...]:
    measured = {run.label: run.latency for run in runs if run.latency is not None}
    if not measured:
        return ("No latency was measured.",)
    figures = {label: latency.figures for label, latency in measured.items()}
    names = next(iter(figures.values()))
    rows = tuple((Cell(name), *(Cell(f"{figures[label][name]:.4g}") for label in measured)) for name in names)
    load = next(iter(measured.values()))
    each = f", {load.tokens // load.requests} tokens each" if load.between_tokens else ""
    caption = f"{load.requests} requests at once{each}, without a server"
    table = Table(caption, ("", *measured), rows)
    if not load.between_tokens:
        return (table,)
    description = "Share of tokens by the time since the token before: " + "; ".join(
        f"{label}, half within {values['between tokens, median (ms)']:.3g} ms" for label, values in figures.items()
    )
    lines = tuple(
        Line(label, distribution([1e3 * seconds for seconds in latency.between_tokens]))
        for label, latency in measured.items()
    )
    chart = Chart(description, "milliseconds since the token before", "of all tokens", lines)
    figure = Figure(f"{caption}: time between two tokens of a request.", chart)
    if len(measured) < 2:
        return figure, table, "The other setting was not measured; --compare measures both."
    return figure, table


def _certificates(run: CheckResults) -> tuple[Part, ...]:
    if not run.certificates:
        return (f"{run.label}: no operation was tested.",)
    header = ("operation", "shape", "bits", "batches of", "elements compared", "computed by")
    rows = tuple(_certificate(certificate) for certificate in run.certificates)
    table = Table(f"{run.label}: each operation alone and in larger batches", header, rows)
    return (table.without_empty_columns(),)


def _certificate(certificate: Certificate) -> tuple[Cell, ...]:
    outcome = Outcome.HOLDS if certificate.holds else Outcome.BREAKS if certificate.difference else Outcome.NOT_TESTED
    text = certificate.difference or certificate.untested or certificate.note
    return (
        Cell(certificate.operation),
        Cell(certificate.shape),
        Cell(text, outcome),
        Cell("" if certificate.guarantee == "schedule" else _sizes(certificate.rows)),
        Cell(str(certificate.compared)),
        Cell(_short(certificate.served_by)),
    )


def _short(function: str) -> str:
    """The name of a class or function and its package; JSON has the whole path."""
    package, _, path = function.partition(".")
    return f"{path.rpartition('.')[2]} of {package}" if path else function


def _sizes(rows: tuple[int, ...]) -> str:
    return ", ".join(map(str, rows)) if len(rows) <= 16 else f"{len(rows)} sizes from {rows[0]} to {rows[-1]}"


def _setting(report: Report, run: CheckResults) -> Table:
    rows = {"target": report.target, "arguments": " ".join(report.arguments) or "none"}
    rows |= {name.replace("_", " "): words(value) for name, value in run.info.items()}
    return pairs(f"{run.label}: engine, machine and versions", rows)
