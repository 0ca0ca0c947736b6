"""The report of the fuzzer: each engine, what was left out, and every finding with commands to continue."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..outcome import Status
from ..printing import command_line, count, printable
from .finding import BROKE, CONCURRENT, SETTINGS, Finding, Row

if TYPE_CHECKING:
    from rich.console import Console

WORDS = {
    CONCURRENT: "differs from the request alone",
    SETTINGS: "the request alone differs between two engines",
    BROKE: "the engine broke",
}
"""Kinds of findings, in words."""


SEEN = {
    Status.REPRODUCIBLE: "no difference",
    Status.DIVERGED: "differences were found",
    Status.NO_TEST: "no test: no target ran in one step with another request, or an engine did not start",
}
"""What a run of the fuzzer found, in words."""


def print_fuzz(
    out: "Console",
    rows: Sequence[Row],
    refused: Counter[str],
    findings: Sequence[tuple[Path, Finding]],
    flags: Mapping[str, str],
) -> None:
    """Print everything.

    Args:
        flags: of the engines' settings, by their labels: as a shell takes them before and behind ``vllm serve MODEL``.
    """

    def line(text: str, style: str | None = None, indent: int = 0) -> None:
        out.print(" " * indent + printable(text), style=style, highlight=False, markup=False, soft_wrap=True)

    for row in rows:
        if not row.not_run:
            line(f"{row.settings}: {figures_of(row)}", "red" if row.differences or row.broke else None)
            line(f"engine: {flags[row.settings]}", indent=3)
    for row in rows:
        if row.not_run:
            line(f"not run: {row.settings}: {row.not_run}", "red")
            line(f"engine: {flags[row.settings]}", indent=3)
    for left_out in sorted({row.left_out for row in rows if row.left_out}):
        line(f"left out: {left_out}")
    for why, times in refused.most_common():
        line(f"concurrent requests refused, {count(times, 'time')}: {why}")
    for path, finding in findings:
        other = f" instead of {finding.other_settings.label}" if finding.other_settings else ""
        out.print()
        line(f"{WORDS[finding.kind]}: {finding.text}", "red")
        line(f"{finding.settings.label}{other}, {finding.seen}", indent=3)
        for text in finding.describe():
            line(text, indent=6)
        line(f"again: {command_line('check', '--replay', str(path))}", indent=3)
        if finding.kind == CONCURRENT and not finding.pools:
            line(f"which operation: {command_line(*finding.bisect_arguments(path))}", indent=3)
            if not finding.for_bisect:
                line(
                    "(a bisection runs greedy requests that start together, so it may not find this difference)",
                    indent=3,
                )


def figures_of(row: Row) -> str:
    """What an engine did, in words."""
    figures = [f"{count(row.schedules, 'schedule')}, {row.concurrent} of them with concurrent requests"]
    replays = count(row.graph_replays, "graph replay")
    figures += [f"{count(row.steps, 'step')} ({row.chunked_steps} with a prompt cut, {replays})"]
    figures += [count(row.preemptions, "preemption"), count(row.prefix_hits, "prefix hit"), count(row.aborts, "abort")]
    figures += [count(row.resets, "reset"), count(row.sleeps, "sleep"), f"{count(row.updates, 'update')} of weights"]
    done = f"{count(row.compared, 'answer')} compared, {row.differences} differ{', and it broke' * row.broke}"
    return f"{', '.join(figures)}: {done}"
