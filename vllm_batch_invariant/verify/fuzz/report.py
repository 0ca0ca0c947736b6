"""The report of the fuzzer: each engine, what was left out, and every finding with commands to continue."""

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..printing import printable
from .finding import BROKE, CONCURRENT, SETTINGS, Finding, Row

if TYPE_CHECKING:
    from rich.console import Console

_WORDS = {
    CONCURRENT: "differs from the request alone",
    SETTINGS: "the request alone differs between two engines",
    BROKE: "the engine broke",
}


def print_fuzz(
    out: "Console", rows: Sequence[Row], refused: Counter[str], findings: Sequence[tuple[Path, Finding]]
) -> None:
    """Print everything."""

    def line(text: str, style: str | None = None, indent: int = 0) -> None:
        out.print(" " * indent + printable(text), style=style, highlight=False, markup=False, soft_wrap=True)

    for row in rows:
        if not row.not_run:
            line(f"{row.settings}: {_figures(row)}", "red" if row.differences or row.broke else None)
    for row in rows:
        if row.not_run:
            line(f"not run: {row.settings}: {row.not_run}", "red")
    for left_out in sorted({row.left_out for row in rows if row.left_out}):
        line(f"left out: {left_out}")
    for why, times in refused.most_common():
        line(f"concurrent requests refused, {times} times: {why}")
    for path, finding in findings:
        other = f" instead of {finding.other_settings.label}" if finding.other_settings else ""
        out.print()
        line(f"{_WORDS[finding.kind]}: {finding.text}", "red")
        line(f"{finding.settings.label}{other}, {finding.seen}", indent=3)
        for text in finding.describe():
            line(text, indent=6)
        line(f"again: vllm-batch-invariant check --replay {shlex.quote(str(path))}", indent=3)
        if finding.kind == CONCURRENT:
            command = shlex.join(["vllm-batch-invariant", *finding.bisect_arguments(path)])
            line(f"which operation: {command}", indent=3)
            if not finding.for_bisect:
                line(
                    "(a bisection runs greedy requests that start together, so it may not find this difference)",
                    indent=3,
                )


def _figures(row: Row) -> str:
    figures = [f"{row.schedules} schedules, {row.in_company} of them with concurrent requests"]
    figures += [f"{row.steps} steps ({row.chunked_steps} with a prompt cut, {row.graph_replays} graph replays)"]
    figures += [f"{row.preemptions} preemptions", f"{row.prefix_hits} prefix hits", f"{row.aborts} aborts"]
    figures += [f"{row.resets} resets", f"{row.sleeps} sleeps", f"{row.updates} updates of weights"]
    done = f"{row.compared} answers compared, {row.differences} differ{', and it broke' * row.broke}"
    return f"{', '.join(figures)}: {done}"
