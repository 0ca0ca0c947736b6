"""How a check ends: its outcome, its exit status, and the error of a run that tested nothing."""

from enum import Enum, IntEnum

from .printing import printable


class Outcome(Enum):
    """What is known of a check case or a guarantee."""

    HOLDS = "holds"
    BREAKS = "breaks"
    NOT_TESTED = "not tested"


class Status(IntEnum):
    """The exit status of a command."""

    REPRODUCIBLE = 0
    DIVERGED = 1
    NO_TEST = 2

    @property
    def outcome(self) -> Outcome:
        """What is known with it; both have one order."""
        return [*Outcome][self]


class NoTestError(RuntimeError):
    """The run cannot tell whether bits are reproducible. Its text is one printable line that says why and what to do,
    also where it quotes a server, a file or a library.
    """

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))
