"""The HTML page of the fuzzer, and that of a finding that ran again."""

from collections import Counter
from pathlib import Path
from typing import Protocol

from ...envs import FLAG
from ..outcome import Outcome, Status
from ..printing import command_line, count
from ..report.html import Cell, Page, Part, Section, Table, Verdict
from ..report.parts import pairs
from .finding import Finding, Row
from .plan import FuzzPlan
from .report import SEEN, WORDS, figures_of

_HEADLINES = {
    Status.REPRODUCIBLE: "Reproducible. Every answer has the bits of the request alone.",
    Status.DIVERGED: "Not reproducible. An answer differs, or an engine broke.",
    Status.NO_TEST: "Not decided. Nothing ran beside another request, or an engine did not start.",
}


class Results(Protocol):
    """What a page says of a run: attributes of :class:`.command.Fuzzer`."""

    rows: list[Row]
    findings: list[tuple[Path, Finding]]
    refused: Counter[str]
    flags: dict[str, str]

    @property
    def partial(self) -> str: ...

    @property
    def status(self) -> Status: ...


def page_of(plan: FuzzPlan, fuzzer: Results) -> Page:
    """A run as a page."""
    rows = fuzzer.rows
    numbers = (
        (str(sum(row.compared for row in rows)), "answers compared"),
        (str(sum(row.schedules for row in rows)), "random schedules"),
        (str(len(rows)), "engines of random settings"),
    )
    found: tuple[Part, ...] = tuple(_finding(path, finding) for path, finding in fuzzer.findings)
    left_out = [Cell(row.left_out) for row in rows if row.left_out]
    refused = [Cell(f"{count(times, 'request')}: {why}") for why, times in fuzzer.refused.most_common()]
    not_tried = tuple((cell,) for cell in dict.fromkeys([*left_out, *refused]))
    return Page(
        title=f"Random requests in random engines: {plan.model}",
        info=f"vllm-batch-invariant check --fuzz, seed {plan.seed}",
        verdicts=(
            Verdict(
                f"{FLAG}={plan.mode}", fuzzer.status.outcome, _HEADLINES[fuzzer.status], numbers, SEEN[fuzzer.status]
            ),
        ),
        partial=fuzzer.partial,
        sections=(
            Section("found", "What was found", found or ("No answer differs, and no engine broke.",)),
            Section("engines", "Every engine", (_engines(rows, fuzzer.flags),)),
            Section(
                "left-out",
                "What was not tried",
                (Table("Kinds of requests that are left out, and refused ones", ("what, and why",), not_tried),)
                if not_tried
                else ("Nothing was left out, and no request was refused.",),
            ),
        ),
    )


def page_of_replay(finding: Finding, status: Status, seen: str) -> Page:
    """A finding that ran again as a page."""
    headline = "It happens again." if status == Status.DIVERGED else "It does not happen again."
    return Page(
        title=f"A difference, run again: {finding.model}",
        info="vllm-batch-invariant check --replay",
        verdicts=(Verdict(f"{FLAG}={finding.mode}", status.outcome, headline, (), seen),),
        partial="",
        sections=(Section("found", "What was run", (_requests(finding),)),),
    )


def _engines(rows: list[Row], flags: dict[str, str]) -> Table:
    made = tuple(
        (Cell(row.settings), Cell(row.not_run or figures_of(row), _outcome(row)), Cell(flags[row.settings]))
        for row in rows
    )
    return Table("Settings, what ran, and how to serve the same", ("settings", "result", "command"), made)


def _outcome(row: Row) -> Outcome:
    if row.differences or row.broke:
        return Outcome.BREAKS
    return Outcome.HOLDS if row.concurrent and not row.not_run else Outcome.NOT_TESTED


def _finding(path: Path, finding: Finding) -> Table:
    rows = {"difference": finding.text, "engine": finding.settings.label}
    if finding.other_settings:
        rows["the other engine"] = finding.other_settings.label
    rows |= {"seen": finding.seen, "requests": "\n".join(finding.describe())}
    rows["again"] = command_line("check", "--replay", str(path))
    return pairs(f"{WORDS[finding.kind]}: {path.name}", rows)


def _requests(finding: Finding) -> Table:
    rows = {"engine": finding.settings.label, "requests": "\n".join(finding.describe())}
    return pairs(f"{WORDS[finding.kind]}: {finding.text}", rows)
