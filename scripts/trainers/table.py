"""The table of configurations, ``docs/trainers.csv``, and what ``docs/trainers.md`` shows of it."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import rows
from .gate import ROOT, STARTS
from .rows import kind_of

TABLE = ROOT / "docs" / "trainers.csv"
PAGE = ROOT / "docs" / "trainers.md"
BEGIN, END = "<!-- written by scripts/trainer_configurations.py -->", "<!-- end -->"
OTHER_ENGINE, UNREAD = "another engine", "not read: "
REPOSITORIES = {
    "verl": "verl-project/verl",
    "TRL": "huggingface/trl",
    "SkyRL": "NovaSky-AI/SkyRL",
    "OpenRLHF": "OpenRLHF/OpenRLHF",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
}


@dataclass(frozen=True)
class Row:
    """One example.

    Attributes:
        trainer: a key of :data:`REPOSITORIES`.
        commit: of its repository, ten digits.
        date: of the commit.
        script: its path there, with what tells several configurations of one file apart.
        model: as the script names it.
        architecture: vLLM's name of its class; empty if it is not known here.
        engine: "vllm", or the other engine that it asks for.
        gpus: of one replica; empty if it was not read.
        arguments: of vLLM's engine, as JSON; empty if they were not read.
        variables: vLLM's environment variables that script and trainer set, as JSON; empty if there are none.
        alone: what the start-up check says of the model with no setting of the example, on one GPU.
        verdict: what it says of the example.
    """

    trainer: str
    commit: str
    date: str
    script: str
    model: str
    architecture: str
    engine: str
    gpus: str
    arguments: str
    variables: str = ""
    alone: str = ""
    verdict: str = ""

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """The arguments as a dictionary."""
        found: dict[str, Any] = json.loads(self.arguments)
        return found

    @property
    def engine_variables(self) -> dict[str, str]:
        """The variables as a dictionary."""
        found: dict[str, str] = json.loads(self.variables or "{}")
        return found

    @property
    def is_asked(self) -> bool:
        """Whether the start-up check has something to say of it."""
        return bool(self.arguments)

    @property
    def reasons(self) -> list[str]:
        """Everything that it is refused for."""
        return rows.reasons_of(self.verdict)


def read() -> list[Row]:
    """The rows of the file."""
    return rows.read(TABLE, Row)


def write(found: Iterable[Row]) -> None:
    """Write the file."""
    rows.write(TABLE, Row, found)


def page_table(found: Sequence[Row]) -> str:
    """What the page shows."""
    return "\n\n".join((_by_trainer(found), _by_reason(found), _by_script(found)))


def _by_trainer(found: Sequence[Row]) -> str:
    lines = [
        "| trainer | commit | examples with rollouts | of them with vLLM, and read | model covered "
        "| of these, at most two GPUs a replica | of these, start | start in all |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, repository in REPOSITORIES.items():
        own = [row for row in found if row.trainer == name]
        asked = [row for row in own if row.is_asked]
        covered = [row for row in asked if row.alone == STARTS]
        small = [row for row in covered if int(row.gpus) <= 2]
        start = [row for row in small if row.verdict == STARTS]
        every = [row for row in asked if row.verdict == STARTS]
        commit = f"{repository} {own[0].commit}, {own[0].date}" if own else ""
        counts = map(str, map(len, (own, asked, covered, small, start, every)))
        lines.append(f"| {name} | {commit} | {' | '.join(counts)} |")
    return "\n".join(lines)


def _by_reason(found: Sequence[Row]) -> str:
    """Of models that are covered: what stops an example. An example may have several reasons."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in REPOSITORIES}
    total: Counter[str] = Counter()
    for row in found:
        if row.alone == STARTS and row.verdict != STARTS:
            kinds = {kind_of(reason) for reason in row.reasons} or {row.verdict}
            counts[row.trainer].update(kinds)
            total.update(kinds)
    lines = [f"| why a covered model is refused | {' | '.join(REPOSITORIES)} |", f"|---|{'---|' * len(REPOSITORIES)}"]
    for reason, _ in sorted(total.items(), key=lambda item: (-item[1], item[0])):
        numbers = " | ".join(str(counts[name][reason] or "") for name in REPOSITORIES)
        lines.append(f"| {reason} | {numbers} |")
    return "\n".join(lines)


def _by_script(found: Sequence[Row]) -> str:
    lines = ["| trainer | example | model | GPUs | |", "|---|---|---|---|---|"]
    for row in found:
        script = row.script.removeprefix("examples/")
        lines.append(f"| {row.trainer} | {script} | {row.model} | {row.gpus} | {_shown(row)} |")
    return "\n".join(lines)


def _shown(row: Row) -> str:
    if row.verdict == STARTS:
        return "**starts**"
    if row.reasons:
        return f"refused: {', '.join(dict.fromkeys(map(kind_of, row.reasons)))}"
    return row.verdict


def counted(found: Sequence[Row]) -> Iterator[str]:
    """Lines for a terminal: the verdicts of each trainer, most frequent first."""
    for name in REPOSITORIES:
        verdicts = Counter(", ".join(map(kind_of, row.reasons)) or row.verdict for row in found if row.trainer == name)
        yield f"{name}:"
        yield from (f"  {number:3} {verdict}" for verdict, number in verdicts.most_common())
