"""What a check found, as tables for people, as JSON for machines and as a page."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..outcome import Status
from ..report.files import write
from .guarantees import GUARANTEES, Outcome, GuaranteeResult
from .results import CheckResults

INTERRUPTED = 130
"""The exit status of an interrupted check, as a shell says it."""
_STYLES = {Outcome.HOLDS: "green", Outcome.BREAKS: "red", Outcome.NOT_TESTED: "yellow"}
_OUTCOMES = {
    Status.REPRODUCIBLE: Outcome.HOLDS,
    Status.DIVERGED: Outcome.BREAKS,
    Status.NO_TEST: Outcome.NOT_TESTED,
}


@dataclass(frozen=True)
class Report:
    """A whole check.

    Attributes:
        target: the model or the server.
        size: "quick", "standard" or "thorough".
        arguments: for the engine.
        began: when, in ISO 8601.
        seconds: how long it took.
        runs: what was found, one for each setting.
        partial: why the report is not whole; empty where it is.
    """

    target: str
    size: str
    arguments: tuple[str, ...]
    began: str
    seconds: float
    runs: tuple[CheckResults, ...]
    partial: str = ""

    @property
    def status(self) -> int:
        """The exit status, which is the last setting's."""
        return INTERRUPTED if self.partial else int(self.runs[-1].status)

    @property
    def outcome(self) -> Outcome:
        """The same as an outcome."""
        return Outcome.NOT_TESTED if self.partial else outcome_of(self.runs[-1])


def outcome_of(results: CheckResults) -> Outcome:
    """What came of one setting."""
    return _OUTCOMES[results.status]


def summary(results: CheckResults) -> str:
    """One sentence: which rungs hold, which break and where, and of which nothing is known."""
    groups: dict[Outcome, list[str]] = {outcome: [] for outcome in Outcome}
    for of_guarantee in results.guarantee_results:
        if not of_guarantee.guarantee.not_applicable:
            groups[of_guarantee.outcome].append(of_guarantee.guarantee.name + _where(of_guarantee) + _how_much(of_guarantee))
    words = ((Outcome.BREAKS, "breaks"), (Outcome.HOLDS, "holds"), (Outcome.NOT_TESTED, "could not test"))
    said = "; ".join(f"{word} {', '.join(groups[outcome])}" for outcome, word in words if groups[outcome])
    return f"{results.label}: {said}"


def _where(of_guarantee: GuaranteeResult) -> str:
    """The earliest token to differ among the facts of a rung that break, or the earliest logprob."""
    found = [case.comparison for case in of_guarantee.cases if case.comparison and not case.comparison.identical]
    for kind, divergences in (
        ("token", [comparison.earliest_token for comparison in found]),
        ("the logprobs of token", [comparison.earliest_logprob for comparison in found]),
    ):
        positions = [divergence.position for divergence in divergences if divergence is not None]
        if positions:
            return f" (from {kind} {min(positions)} on)"
    return ""


def _how_much(of_guarantee: GuaranteeResult) -> str:
    """How many facts of a rung that holds were tested, where that is not all."""
    if of_guarantee.outcome is not Outcome.HOLDS or not of_guarantee.untested:
        return ""
    total = len(of_guarantee.cases)
    return f" ({total - len(of_guarantee.untested)} of {total} facts tested)"


def print_report(console: Console, report: Report) -> None:
    """Print the verdicts, every fact, and a sentence for each setting."""
    table = Table(title="The contract: same bits ...", title_justify="left")
    for heading in ("rung", "...", *(escape(run.label) for run in report.runs)):
        table.add_column(heading, overflow="fold")
    for place, guarantee in enumerate(GUARANTEES):
        guarantee_results = [run.guarantee_results[place] for run in report.runs]
        cells = [_styled(of_guarantee.outcome, of_guarantee.detail) for of_guarantee in guarantee_results]
        table.add_row(guarantee.name, escape(guarantee.promise), *cells)
    console.print(table)
    for run in report.runs:
        cases = Table("rung", "fact", "", "what was found", title=escape(run.label), title_justify="left")
        for case in run.cases:
            found = f"{case.detail}\nfirst: {case.difference}" if case.difference else case.detail
            cases.add_row(case.guarantee, escape(case.name), _styled(case.outcome), escape(found))
        console.print(cases)
    for run in report.runs:
        style = _STYLES[outcome_of(run)]
        console.print(summary(run), style=style, highlight=False, markup=False, soft_wrap=True)
        if "mode" in run.info:
            console.print(f"mode: {run.info['mode']}", highlight=False, markup=False, soft_wrap=True)


def _styled(outcome: Outcome, text: str = "") -> str:
    ending = f": {escape(text)}" if text else ""
    return f"[{_STYLES[outcome]}]{outcome.value}[/]{ending}"


def write_json(path: Path, report: Report) -> None:
    """Write everything that was found."""
    write(path, json.dumps(as_json(report), indent=1) + "\n")


def as_json(report: Report) -> dict[str, Any]:
    """Everything that was found as plain data."""
    return {
        "target": report.target,
        "size": report.size,
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
        "about": run.info,
        "rungs": [
            {
                "name": of_guarantee.guarantee.name,
                "promise": of_guarantee.guarantee.promise,
                "outcome": of_guarantee.outcome.value,
                "detail": of_guarantee.detail,
                "facts": [
                    asdict(case) | {"outcome": case.outcome.value, "difference": case.difference}
                    for case in of_guarantee.cases
                ],
            }
            for of_guarantee in run.guarantee_results
        ],
        "certificates": [asdict(certificate) for certificate in run.certificates],
        "samples": [
            {"label": shown.label, "tokens": shown.answer.tokens, "bits": [bits.hex() for bits in shown.answer.bits]}
            for shown in run.shown
        ],
        "latency": run.latency and run.latency.figures,
        "batches": [asdict(trace) for trace in run.traces],
    }
