"""An engine whose start prints nothing: what it says is in a file, which stays only where it does not start."""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..outcome import NoTestError
from .engine import start_engine
from .logs import root_cause


def start_quiet_engine(model: str, arguments: Sequence[str]) -> Any:
    """:func:`start_engine` without vLLM's log, of which errors alone are shown later. Its workers stay silent.

    Raises:
        NoTestError: as there, with the reason that a worker's process gave in the log, and where the log is.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    handle, name = tempfile.mkstemp(prefix="vllm-engine-", suffix=".log")
    log = Path(name)
    try:
        with os.fdopen(handle, "wb") as file, _printed_to(file.fileno()):
            llm = start_engine(model, arguments)
    except NoTestError as error:
        raise NoTestError(f"{root_cause(str(error), log)} (the engine's log is {log})") from error
    except BaseException:
        log.unlink()
        raise
    log.unlink()
    return llm


@contextmanager
def _printed_to(file: int) -> Iterator[None]:
    """What this process and those started meanwhile print goes to a file descriptor."""
    streams = sys.stdout, sys.stderr
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        for stream, descriptor in zip(streams, (1, 2), strict=True):
            stream.flush()
            os.dup2(file, descriptor)
        yield
    finally:
        for stream, descriptor, before in zip(streams, (1, 2), kept, strict=True):
            stream.flush()
            os.dup2(before, descriptor)
            os.close(before)
