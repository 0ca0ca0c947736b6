"""The files of the fuzzer: a row for each engine, and for each difference a file from which it can be run again."""

import csv
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..harness.requests import in_words
from ..outcome import NoTestError
from .schedule import Schedule, Settings

FORMAT = "vllm-batch-invariant fuzz 1"
CONCURRENT, SETTINGS, BROKE = "company", "settings", "broke"
"""Kinds of findings, as the format spells them."""
_ALONE_SAYS = frozenset(("logprobs", "ignore_eos", "max_tokens", "output_kind"))
"""Parameters that a bisection has too, or on which no computation depends."""


@dataclass
class Row:
    """One engine: a row of the report and of the CSV file, whose columns are these fields."""

    model: str
    mode: str
    """The value of VLLM_BATCH_INVARIANT."""
    settings: str
    seed: int
    schedules: int = 0
    concurrent: int = 0
    """Schedules in which a target was computed in one step with another request."""
    steps: int = 0
    chunked_steps: int = 0
    graph_replays: int = 0
    preemptions: int = 0
    """By the scheduler, for lack of pages; what a reset or a sleep preempts is not counted."""
    prefix_hits: int = 0
    """Targets with tokens found in the prefix cache."""
    encoded: int = 0
    """Images and videos."""
    aborts: int = 0
    resets: int = 0
    sleeps: int = 0
    updates: int = 0
    """Of weights."""
    compared: int = 0
    """Answers in schedules that were compared with those alone."""
    differences: int = 0
    """Schedules in which an answer differs, and targets whose answer alone differs from another engine's."""
    broke: int = 0
    """1 if the engine failed."""
    seconds: float = 0.0
    not_run: str = ""
    """Why the engine did not start."""
    left_out: str = ""
    """Kinds of requests that were not tried, and why."""
    device: str = ""
    versions: str = ""
    date: str = ""


def seen_in(item: Any) -> str:
    """The images and videos of a request in words."""
    return "".join(
        f", {one['kind']} {one['seed']} of {'x'.join(map(str, one['size']))} at {one['at']}" for one in item.images
    )


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append rows to a CSV file; a new file begins with the names of the columns.

    Raises:
        NoTestError: it cannot be written.
    """
    try:
        names = [column.name for column in fields(Row)]
        new = not path.exists() or not path.stat().st_size
        if not new and path.open().readline().rstrip("\n").split(",") != names:
            raise NoTestError(f"{path} has other columns than {','.join(names)}: name another file")
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    except OSError as error:
        raise NoTestError(f"{path} cannot be written: {error.strerror or error}") from error


@dataclass(frozen=True)
class Finding:
    """An answer that differs, or a schedule that broke an engine: the file of ``--replay``.

    Attributes:
        kind: ``CONCURRENT`` (it differs from the request alone in the same engine), ``SETTINGS`` (it differs from the
            request alone in another engine) or ``BROKE`` (the engine failed).
        text: the difference in words.
        seen: the number of the schedule and the time since the run began, in words.
        model: its folder or name.
        serve_args: arguments that were added to those of the settings.
        mode: the value of VLLM_BATCH_INVARIANT.
        settings: of the engine.
        schedule: what it ran.
        target: name of the item whose answer differs.
        other_settings: of the engine that gave the expected answer, if it is another.
        expected: answer to the request alone.
        got: answer that differs.
        versions: of the software that computed it.
    """

    kind: str
    text: str
    seen: str
    model: str
    serve_args: tuple[str, ...]
    mode: str
    settings: Settings
    schedule: Schedule
    target: str = ""
    other_settings: Settings | None = None
    expected: Mapping[str, Any] | None = None
    got: Mapping[str, Any] | None = None
    versions: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the file that :meth:`read` reads.

        Raises:
            NoTestError: it cannot be written.
        """
        plain = {"format": FORMAT} | asdict(self) | {"schedule": self.schedule.plain()}
        try:
            path.write_text(json.dumps(plain, indent=1) + "\n")
        except OSError as error:
            raise NoTestError(f"{path} cannot be written: {error.strerror or error}") from error

    @classmethod
    def read(cls, path: Path) -> "Finding":
        """The finding in a file.

        Raises:
            NoTestError: the file is none.
        """
        try:
            plain = json.loads(path.read_text())
            if plain.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT!r}")
            other = plain["other_settings"]
            made = {
                "settings": Settings(**plain["settings"]),
                "schedule": Schedule.from_plain(plain["schedule"]),
                "serve_args": tuple(plain["serve_args"]),
                "other_settings": None if other is None else Settings(**other),
            }
            return cls(**plain | made)
        except OSError as error:
            raise NoTestError(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NoTestError(f"{path} is no finding of a fuzzer: {type(error).__name__}: {error}") from error

    def describe(self) -> list[str]:
        """The requests and events, a line each."""
        lines = []
        for item in self.schedule.items:
            leaves = "" if item.leaves is None else f", aborted at step {item.leaves}"
            mark = "the target " if item.name == self.target else ""
            asks = in_words(item.params)
            how = f"{' as embeddings' * item.embeds}{f', adapter {item.adapter}' * bool(item.adapter)}, "
            how += f"{f'priority {item.priority}, ' * bool(item.priority)}{asks}"
            lines.append(f"{mark}{item.name} at step {item.at}{leaves}: {len(item.prompt)} tokens{seen_in(item)}{how}")
        return [*lines, *map(str, self.schedule.events)]

    @property
    def pools(self) -> bool:
        """Whether a model gave it that pools, which a bisection does not take."""
        return bool(self.settings.pooler)

    @property
    def for_bisect(self) -> bool:
        """Whether a bisection, which runs greedy requests that start together, runs the same requests."""
        greedy = all(
            item.at == 0
            and item.leaves is None
            and not item.embeds
            and not item.priority
            and not item.params.get("temperature")
            and not item.params.keys() - _ALONE_SAYS - {"temperature"}
            for item in self.schedule.items
        )
        return self.kind == CONCURRENT and len(self.schedule.items) > 1 and greedy and not self.schedule.events

    def bisect_arguments(self, path: Path) -> list[str]:
        """The command line of ``bisect`` for the requests of the file."""
        taken = ("--enforce-eager", "--enable-prefix-caching", "--no-enable-prefix-caching")
        settings = [argument for argument in self.settings.arguments(self.model) if argument not in taken]
        return ["bisect", self.model, "--case", str(path), f"--serve-args={shlex.join([*settings, *self.serve_args])}"]
