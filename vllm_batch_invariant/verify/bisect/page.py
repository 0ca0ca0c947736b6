"""The HTML page of a bisection."""

from collections.abc import Sequence

from ..outcome import Outcome, Status
from ..printing import count
from ..report.html import Cell, Page, Section, Table, Verdict
from ..report.parts import pairs
from .engine import BisectResult, Case, Setting
from .report import EAGER, rows_of, verdict, where


def page_of(setting: Setting, runs: Sequence[tuple[Case, BisectResult]]) -> Page:
    """The runs, at least one, as a page; a run that finds a difference is the last one."""
    last = runs[-1]
    return Page(
        title=f"The first operation whose bits depend on the batch: {setting.model}",
        info=f"vllm-batch-invariant bisect, vLLM {setting.vllm}, {setting.device}, {setting.dtype}",
        verdicts=(_verdict(setting, runs),),
        partial="",
        sections=(
            Section("found", "What was found", (pairs(verdict(*last), rows_of(setting, *last)), EAGER)),
            Section("runs", "Every run", (_runs(runs),)),
        ),
    )


def _verdict(setting: Setting, runs: Sequence[tuple[Case, BisectResult]]) -> Verdict:
    case, result = runs[-1]
    steps, outputs = (str(sum(getattr(result.coverage, name) for _, result in runs)) for name in ("steps", "compared"))
    numbers = [(str(len(runs)), "run" + "s" * (len(runs) > 1)), (outputs, "outputs compared"), (steps, "steps")]
    detail = f"mode: {setting.mode}"
    if result.status == Status.REPRODUCIBLE:
        return Verdict(
            "", Outcome.HOLDS, "Nothing differs. Every output has the same bits as alone.", tuple(numbers), detail
        )
    if result.found is None:
        return Verdict("", Outcome.BREAKS, "The answer differs, and no recorded output does.", tuple(numbers), detail)
    found = result.found.comparison
    numbers.insert(0, (f"{found.different} of {found.elements}", "elements differ there"))
    others = count(len(case.concurrent), "concurrent request")
    headline = f"Bits first differ in {where(result.found)}, with {others}."
    return Verdict("", Outcome.BREAKS, headline, tuple(numbers), detail)


def _runs(runs: Sequence[tuple[Case, BisectResult]]) -> Table:
    rows = tuple(
        (
            Cell(count(len(case.prompt), "token")),
            Cell(str(len(case.concurrent))),
            Cell(verdict(case, result), result.status.outcome),
            Cell(str(result.coverage.compared)),
        )
        for case, result in runs
    )
    return Table(
        "The prompt alone and with concurrent requests",
        ("prompt", "concurrent requests", "result", "outputs compared"),
        rows,
    )
