"""The errors a user meets: each is one line that says what, why and what to do."""

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self


class NotCovered(RuntimeError):
    """Something that was asked for is outside the contract, so the engine refuses to start.

    It is no ``ValueError`` on purpose: pydantic would wrap that into a report of many lines.
    """

    def __init__(self, what: str, why: str, what_to_do: str, neither: Sequence[str] = ()) -> None:
        also = f" Nor does it cover {', '.join(neither)}." if neither else ""
        super().__init__(f"batch-invariant mode does not cover {what}: {why}; {what_to_do}.{also}")

    @classmethod
    def again(cls, line: str) -> Self:
        """The refusal whose line another process has told."""
        return cls.__new__(cls, line)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).again, (str(self),)


class BadSetting(RuntimeError):
    """An environment variable of this project has a wrong name or value."""


def print_as_one_line() -> None:
    """Have this process print such an error, if it ends by one, without the traceback that leads to it. Idempotent."""
    before = sys.excepthook
    if getattr(before, "__module__", None) == __name__:
        return

    def one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, NotCovered | BadSetting):
            print(f"{kind.__name__}: {error}", file=sys.stderr)
        else:
            before(kind, error, trace)

    sys.excepthook = one_line
