"""Why something did not start, read from the log of the processes that it consists of."""

import re
from pathlib import Path

from .load import shortened

_ERROR = re.compile(r"(?:^|[\])] )(?:\S+: error|[\w.]*(?:Error|Exception|NotCovered|BadSetting)): (.+)$", re.MULTILINE)
"""The last line of a traceback or what a command line says of itself, after the beginning of a line of vLLM's log."""
_FOLLOWS = " initialization failed"
"""Is in what one of vLLM's processes says of another that has said why it ended."""


def reason_in(log: Path) -> str:
    """The last error in a log that does not follow from another, after a colon; empty where there is none."""
    found = [text for text in _ERROR.findall(log.read_text(errors="replace")) if _FOLLOWS not in text]
    return f": {shortened(found[-1])}" if found else ""


def root_cause(error: str, log: Path) -> str:
    """An engine's error, or where it only says that another process ended, what that process said."""
    return f"the engine did not start{reason_in(log)}" if _FOLLOWS in error else error
