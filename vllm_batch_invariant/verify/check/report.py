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
from .guarantees import RUNGS, Outcome, Verdict
from .results import Findings

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
    runs: tuple[Findings, ...]
    partial: str = ""

    @property
    def status(self) -> int:
        """The exit status, which is the last setting's."""
        return INTERRUPTED if self.partial else int(self.runs[-1].status)

    @property
    def outcome(self) -> Outcome:
        """The same as an outcome."""
        return Outcome.NOT_TESTED if self.partial else outcome_of(self.runs[-1])


def outcome_of(findings: Findings) -> Outcome:
    """What came of one setting."""
    return _OUTCOMES[findings.status]


def summary(findings: Findings) -> str:
    """One sentence: which rungs hold, which break and where, and of which nothing is known."""
    groups: dict[Outcome, list[str]] = {outcome: [] for outcome in Outcome}
    for verdict in findings.verdicts:
        if not verdict.rung.out_of_reach:
            groups[verdict.outcome].append(verdict.rung.name + _where(verdict) + _how_much(verdict))
    words = ((Outcome.BREAKS, "breaks"), (Outcome.HOLDS, "holds"), (Outcome.NOT_TESTED, "could not test"))
    said = "; ".join(f"{word} {', '.join(groups[outcome])}" for outcome, word in words if groups[outcome])
    return f"{findings.label}: {said}"


def _where(verdict: Verdict) -> str:
    """The earliest token to differ among the facts of a rung that break, or the earliest logprob."""
    found = [fact.comparison for fact in verdict.facts if fact.comparison and not fact.comparison.identical]
    for kind, partings in (
        ("token", [comparison.earliest_token for comparison in found]),
        ("the logprobs of token", [comparison.earliest_logprob for comparison in found]),
    ):
        positions = [parting.position for parting in partings if parting is not None]
        if positions:
            return f" (from {kind} {min(positions)} on)"
    return ""


def _how_much(verdict: Verdict) -> str:
    """How many facts of a rung that holds were tested, where that is not all."""
    if verdict.outcome is not Outcome.HOLDS or not verdict.untested:
        return ""
    total = len(verdict.facts)
    return f" ({total - len(verdict.untested)} of {total} facts tested)"


def print_report(console: Console, report: Report) -> None:
    """Print the verdicts, every fact, and a sentence for each setting."""
    table = Table(title="The contract: same bits ...", title_justify="left")
    for heading in ("rung", "...", *(escape(run.label) for run in report.runs)):
        table.add_column(heading, overflow="fold")
    for place, rung in enumerate(RUNGS):
        verdicts = [run.verdicts[place] for run in report.runs]
        cells = [_styled(verdict.outcome, verdict.detail) for verdict in verdicts]
        table.add_row(rung.name, escape(rung.promise), *cells)
    console.print(table)
    for run in report.runs:
        facts = Table("rung", "fact", "", "what was found", title=escape(run.label), title_justify="left")
        for fact in run.facts:
            found = f"{fact.detail}\nfirst: {fact.difference}" if fact.difference else fact.detail
            facts.add_row(fact.rung, escape(fact.name), _styled(fact.outcome), escape(found))
        console.print(facts)
    for run in report.runs:
        style = _STYLES[outcome_of(run)]
        console.print(summary(run), style=style, highlight=False, markup=False, soft_wrap=True)
        if "mode" in run.about:
            console.print(f"mode: {run.about['mode']}", highlight=False, markup=False, soft_wrap=True)


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


def _run_as_json(run: Findings) -> dict[str, Any]:
    return {
        "label": run.label,
        "status": int(run.status),
        "failed": run.failed,
        "about": run.about,
        "rungs": [
            {
                "name": verdict.rung.name,
                "promise": verdict.rung.promise,
                "outcome": verdict.outcome.value,
                "detail": verdict.detail,
                "facts": [
                    asdict(fact) | {"outcome": fact.outcome.value, "difference": fact.difference}
                    for fact in verdict.facts
                ],
            }
            for verdict in run.verdicts
        ],
        "certificates": [asdict(certificate) for certificate in run.certificates],
        "samples": [
            {"label": shown.label, "tokens": shown.answer.tokens, "bits": [bits.hex() for bits in shown.answer.bits]}
            for shown in run.shown
        ],
        "latency": run.latency and run.latency.figures,
        "batches": [asdict(trace) for trace in run.traces],
    }
