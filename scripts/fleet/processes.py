"""Processes that go away together."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def processes(leader: int) -> Iterator[int]:
    """A process and those that it has started."""
    yield leader
    for children in Path(f"/proc/{leader}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from processes(int(child))


def kill(leader: int) -> None:
    """End a process and those that it has started at once, as a machine that goes away does."""
    for process in [*processes(leader)]:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
