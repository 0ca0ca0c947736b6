"""How far a run is: a bar with live counts on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from ..answers import Counts
from ..harness.metrics import BatchLog
from ..printing import note
from .report import in_words

_TELL_EVERY = 15.0
"""Seconds between two lines where there is no terminal."""


class Progress:
    """Tells the counts of the runs of one command.

    Args:
        notes: the console to tell them on.
        samples: of each run.
        pools: whether a pooling model answers.
    """

    def __init__(self, notes: Console, samples: int, pools: bool = False) -> None:
        self.notes = notes
        self._samples, self._pools = samples, pools
        self._label, self._counts, self._done = "", Counts(), True

    @property
    def so_far(self) -> str:
        """What the answers of a run that is under way tell; empty where none runs or fewer than two came."""
        if self._done or self._counts.samples < 2:
            return ""
        end = "they differ" if self._counts.differ else "no difference yet"
        kinds = in_words(self._counts, self._pools)
        return f"{self._label}, {self._counts.samples} of {self._samples} so far: {kinds}: {end}"

    @contextmanager
    def shown(self, label: str, log: BatchLog) -> Iterator[Callable[[Counts], None]]:
        """While the block runs, call what is yielded with the counts so far.

        Args:
            label: of the run.
            log: has the sizes of the batches.
        """
        self._label, self._counts, self._done = label, Counts(), False
        with self._bar(log) if self.notes.is_terminal else self._lines(log) as draw:

            def tell(counts: Counts) -> None:
                self._counts = counts
                draw()

            yield tell
        self._done = True  # left alone by an error: what was seen is still to be told

    def _now(self) -> str:
        return f"{self._counts.samples} of {self._samples}: {in_words(self._counts, self._pools)}"

    @contextmanager
    def _lines(self, log: BatchLog) -> Iterator[Callable[[], None]]:
        told = time.monotonic()

        def draw() -> None:
            nonlocal told
            if time.monotonic() >= told + _TELL_EVERY:
                told = time.monotonic()
                note(f"{self._label}, {self._now()}, batch of {log.running_now}")

        yield draw

    @contextmanager
    def _bar(self, log: BatchLog) -> Iterator[Callable[[], None]]:
        # narrow enough for 80 columns
        columns = (BarColumn(8), TextColumn("{task.description}"), TimeElapsedColumn())
        with Bar(*columns, console=self.notes, transient=True, refresh_per_second=4) as bar:
            task = bar.add_task("", total=self._samples)

            def draw() -> None:
                colour = "red" if self._counts.differ else "green"
                words = f"[{colour}]{self._now()}[/], batch of {log.running_now}"
                bar.update(task, completed=self._counts.samples, description=words)

            yield draw
