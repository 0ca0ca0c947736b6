"""How a reproducibility run ends: the exit statuses, and the error that makes a run no test at all."""

from enum import IntEnum

from .printable import printable


class Status(IntEnum):
    """The exit status of a run."""

    REPRODUCIBLE = 0
    DIVERGED = 1
    NO_TEST = 2


class NoTestError(RuntimeError):
    """The run cannot tell whether the server is reproducible; its text is one line that says why and what to do,
    whatever the server, the file or the library said that it quotes.
    """

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))
