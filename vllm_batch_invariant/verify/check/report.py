"""The report of a check, as tables on a console and as JSON."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..outcome import Outcome
from .guarantees import GUARANTEES, GuaranteeResult
from .results import CheckResults

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130
"""The exit status of an interrupted check, as in a shell."""
_STYLES = {Outcome.HOLDS: "green", Outcome.BREAKS: "red", Outcome.NOT_TESTED: "yellow"}


@dataclass(frozen=True)
class Report:
    """A whole check.

    Attributes:
        target: the model or the server.
        preset: "quick", "standard" or "thorough".
        arguments: of the engine.
        began: when it began, in ISO 8601.
        seconds: how long it took.
        runs: the results, one for each setting.
        partial: why the report is incomplete; empty if it is complete.
    """

    target: str
    preset: str
    arguments: tuple[str, ...]
    began: str
    seconds: float
    runs: tuple[CheckResults, ...]
    partial: str = ""

    @property
    def status(self) -> int:
        """The exit status: that of the last setting."""
        return INTERRUPTED if self.partial else int(self.runs[-1].status)

    @property
    def outcome(self) -> Outcome:
        """The status as an outcome."""
        return Outcome.NOT_TESTED if self.partial else self.runs[-1].status.outcome


def summary(results: CheckResults) -> str:
    """One sentence: which guarantees break and where, which hold, and which could not be tested."""
    groups: dict[Outcome, list[str]] = {outcome: [] for outcome in Outcome}
    for result in results.guarantees:
        if not result.not_applicable:
            groups[result.outcome].append(result.guarantee.name + _where(result) + _how_much(result))
    words = ((Outcome.BREAKS, "breaks"), (Outcome.HOLDS, "holds"), (Outcome.NOT_TESTED, "could not test"))
    said = "; ".join(f"{word} {', '.join(groups[outcome])}" for outcome, word in words if groups[outcome])
    return f"{results.label}: {said}"


def _where(result: GuaranteeResult) -> str:
    """The earliest token that differs in the cases of a guarantee, or the earliest logprob."""
    found = [case.comparison for case in result.cases if case.comparison and not case.comparison.identical]
    found = [comparison for comparison in found if comparison.unit != "tensor"] or found
    units = {comparison.unit for comparison in found}
    unit = "the logprobs of token" if units <= {"token"} else "tensor" if units == {"tensor"} else "value"
    for kind, divergences in (
        ("token", [comparison.earliest_token for comparison in found]),
        (unit, [comparison.earliest_logprob for comparison in found]),
    ):
        positions = [divergence.position for divergence in divergences if divergence is not None]
        if positions:
            return f" (from {kind} {min(positions)} on)"
    return ""


def _how_much(result: GuaranteeResult) -> str:
    """How many cases of a guarantee that holds were tested, if not all."""
    if result.outcome is not Outcome.HOLDS or not result.untested:
        return ""
    total = len(result.cases)
    return f" ({total - len(result.untested)} of {total} cases tested)"


def print_report(console: "Console", report: Report) -> None:
    """Print the guarantees, every case, and a sentence for each setting."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="The contract: same bits ...", title_justify="left")
    for heading in ("guarantee", "...", *(escape(run.label) for run in report.runs)):
        table.add_column(heading, overflow="fold")
    for place, guarantee in enumerate(GUARANTEES):
        guarantees = [run.guarantees[place] for run in report.runs]
        cells = [_styled(result.outcome, result.detail) for result in guarantees]
        table.add_row(guarantee.name, escape(guarantee.promise), *cells)
    console.print(table)
    for run in report.runs:
        cases = Table("guarantee", "case", "", "result", title=escape(run.label), title_justify="left")
        for case in run.cases:
            found = f"{case.detail}\nfirst: {case.difference}" if case.difference else case.detail
            cases.add_row(case.guarantee, escape(case.name), _styled(case.outcome), escape(found))
        console.print(cases)
    for run in report.runs:
        style = _STYLES[run.status.outcome]
        console.print(summary(run), style=style, highlight=False, markup=False, soft_wrap=True)
        if "mode" in run.info:
            console.print(f"mode: {run.info['mode']}", highlight=False, markup=False, soft_wrap=True)


def _styled(outcome: Outcome, text: str = "") -> str:
    from rich.markup import escape

    ending = f": {escape(text)}" if text else ""
    return f"[{_STYLES[outcome]}]{outcome.value}[/]{ending}"


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "target": report.target,
        "preset": report.preset,
        "arguments": report.arguments,
        "began": report.began,
        "seconds": report.seconds,
        "partial": report.partial,
        "status": report.status,
        "runs": [_run_as_json(run) for run in report.runs],
    }


def _run_as_json(run: CheckResults) -> dict[str, Any]:
    return {
        "label": run.label,
        "status": int(run.status),
        "failed": run.failed,
        "info": run.info,
        "guarantees": [
            {
                "name": result.guarantee.name,
                "promise": result.guarantee.promise,
                "outcome": result.outcome.value,
                "detail": result.detail,
                "cases": [
                    asdict(case) | {"outcome": case.outcome.value, "difference": case.difference}
                    for case in result.cases
                ],
            }
            for result in run.guarantees
        ],
        "certificates": [asdict(certificate) for certificate in run.certificates],
        "samples": [
            {"label": shown.label, "tokens": shown.answer.tokens, "bits": [bits.hex() for bits in shown.answer.bits]}
            for shown in run.shown
        ],
        "latency": run.latency and run.latency.figures,
        "batches": [asdict(trace) for trace in run.traces],
    }
