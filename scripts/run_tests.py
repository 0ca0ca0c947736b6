"""Runs every test that this machine can run: engines, and beside them, with the cores that they leave idle, the other
tests of the environment and the parts that need an environment or a process of their own.

usage: python -m scripts.run_tests [--exhaustive] [--alone] [--write]      as make test and make test-all
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from scripts import marks
from scripts.compatibility import ROOT

PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- runs: python -m scripts.run_tests --write -->\n", "<!-- /runs -->\n"
HEADER = "| command | date | machine | minutes | parts, in seconds | outcome |\n|---|---|---|---|---|---|\n"
ENGINES, OTHERS = "engine or server", "not engine and not server"
"""Tests by marker."""
HAVE_ENGINES = ("tests/engine", "tests/hf", "tests/server")
"""Folders with tests of the first marker: all others take a quarter of a minute to look through."""
OF_EXPERTS = "tests/ops/moe"
"""Whose tests in the interpreter take as long as half of the others: two parts may run at a time."""
COUNTED = re.compile(r"^=+ (.*) in [\d.]+s", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """Tests that one command runs.

    Attributes:
        needs: programs without which it is left out.
        without: what is left out then.
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    without: str = ""


@dataclass(frozen=True)
class Ran:
    """A part that has ended."""

    name: str
    status: int
    seconds: float
    counted: str

    @property
    def outcome(self) -> str:
        """What pytest counted, or the exit status."""
        return self.counted or f"exit status {self.status}"


def parts(exhaustive: bool) -> tuple[Part, ...]:
    """The main part, then the others: what ends at once, then the longest first."""
    pytest = (sys.executable, "-m", "pytest", "--durations=25", *["--exhaustive"] * exhaustive)
    npu = os.environ.get("NPU_PYTHON", "python3.11")
    made = ("make", "--no-print-directory")
    return (
        # threads that wait for each other leave their core to the parts beside them
        Part("engines", (*pytest, *HAVE_ENGINES, "-m", ENGINES), {"OMP_WAIT_POLICY": "PASSIVE"}),
        Part("lint", (*made, "lint")),
        Part("others", (*pytest, "-m", OTHERS), {"OMP_WAIT_POLICY": "PASSIVE"}),
        Part("interpreted", (*pytest, f"--ignore={OF_EXPERTS}", "-m", "interpreted"), {"TRITON_INTERPRET": "1"}),
        Part("interpreted, experts", (*pytest, OF_EXPERTS, "-m", "interpreted"), {"TRITON_INTERPRET": "1"}),
        Part("NPU", (*made, "test-npu"), {}, (npu,), "the kernels for an Ascend NPU are not compiled"),
        Part("site", (*made, "test-site"), {}, ("npm",), "the site is not built and its pages are not tested"),
    )


class Running:
    """A part that runs. What it prints is shown as it comes, or all at its end."""

    def __init__(self, part: Part, live: bool, niceness: int) -> None:
        self.part, self._live, self._begin = part, live, time.monotonic()
        self._printed: list[str] = []
        self._process = subprocess.Popen(
            ["nice", "-n", str(niceness), *part.command] if niceness else part.command,
            cwd=ROOT,
            env=os.environ | part.environment | {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while chunk := self._process.stdout.read1():
            self._printed.append(chunk.decode(errors="replace"))
            if self._live:
                print(self._printed[-1], end="", flush=True)

    def ended(self, seconds: float) -> Ran | None:
        """What came of it, if it ends within so many seconds."""
        self._reader.join(seconds)
        if self._reader.is_alive():
            return None
        status, text = self._process.wait(), "".join(self._printed)
        if not self._live:
            print(f"\n{self.part.name}:\n{text}", flush=True)
        counted = COUNTED.findall(text)
        return Ran(self.part.name, status, time.monotonic() - self._begin, counted[-1] if counted else "")


def run(main: Part, others: Sequence[Part], beside: bool) -> list[Ran]:
    """Run the main part and the others in their order.

    Engines have threads that wait for each other, so what runs beside them is one part at a time, of the lowest
    priority; behind them two run at a time.

    Args:
        beside: whether they share the machine; if not, each has it alone.
    """
    waiting, done = list(others), []
    running = [Running(main, True, 0)]
    while running or waiting:
        with_main = any(one.part is main for one in running)
        while waiting and len(running) < (2 if beside else 1):
            print(f"\n{waiting[0].name} begins", flush=True)
            running.append(Running(waiting.pop(0), False, 19 if with_main else 0))
        for one in list(running):
            if (found := one.ended(0.5)) is not None:
                running.remove(one)
                done.append(found)
    return done


def machine() -> str:
    """The GPUs, the CPU with its vector instructions, and its cores."""
    import torch  # only where a run is recorded

    from scripts.see.data import processor

    gpus = (torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return ", ".join((*gpus, processor(), f"{os.cpu_count()} cores"))


def recorded(page: str, row: Sequence[str]) -> str:
    """The page with the row in its table, in the place of that of the same command and machine."""
    table = marks.between(page, BEGIN, END)
    lines = [line for line in table.splitlines()[2:] if line and _cells(line)[::2][:2] != [row[0], row[2]]]
    rows = "".join(f"{line}\n" for line in sorted([*lines, f"| {' | '.join(row)} |"]))
    return marks.put(page, BEGIN, END, f"{HEADER}{rows}")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def main(arguments: list[str] | None = None) -> int:
    """Run them; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exhaustive", action="store_true", help="run also what make test has no time for")
    parser.add_argument("--alone", action="store_true", help="one part at a time, as on a GPU")
    parser.add_argument("--write", action="store_true", help="record the run in docs/testing.md")
    options = parser.parse_args(arguments)
    first, *others = parts(options.exhaustive)
    for part in list(others):
        if lacking := [need for need in part.needs if shutil.which(need) is None]:
            others.remove(part)
            print(f"no {' and no '.join(lacking)}, so {part.without}", flush=True)
    begin = time.monotonic()
    done = run(first, others, not options.alone)
    minutes = (time.monotonic() - begin) / 60
    for ran in done:
        print(f"{ran.name}: {ran.outcome}, {ran.seconds:.0f} s")
    status = max((1 for ran in done if ran.status), default=0)
    print(f"{'failed' if status else 'passed'} after {minutes:.1f} minutes", flush=True)
    if options.write:
        cells = (
            "`make test-all`" if options.exhaustive else "`make test`",
            f"{datetime.now(UTC):%Y-%m-%d}",
            machine(),
            f"{minutes:.0f}",
            ", ".join(f"{ran.name} {ran.seconds:.0f}" for ran in done),
            "; ".join(f"{ran.name}: {ran.outcome}" for ran in done),
        )
        PAGE.write_text(recorded(PAGE.read_text(), cells))
    return status


if __name__ == "__main__":
    sys.exit(main())
