"""How commands print: results on stdout, notes on stderr, foreign text (a receipt, a server, a file name) escaped."""

import shlex
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PROGRAM = "vllm-batch-invariant"
_UNSEEN = "\u115f\u1160\u2800\u3164\uffa0"
"""Letters and signs without ink, which Unicode and Python call printable."""


def printable(text: str) -> str:
    """The text on one line; characters that would not show as they are get escaped, as ``repr`` does it.

    Escaped are control characters, line breaks, characters that turn the direction of writing or have no width, marks
    that are drawn over another character, and a space after a space: enough spaces reach the next line of a terminal.
    Printable text, a backslash included, does not change, so escaping twice is escaping once.
    """
    if text.isascii() and text.isprintable() and "  " not in text:
        return text
    return "".join(
        character if _shows(character, before) else _escaped(character)
        for before, character in zip("\0" + text, text, strict=False)
    )


def _shows(character: str, before: str) -> bool:
    if character == " ":
        return before != " "
    drawn_over = unicodedata.category(character) in ("Mn", "Me")
    return character.isprintable() and not drawn_over and character not in _UNSEEN


def _escaped(character: str) -> str:
    return r"\x20" if character == " " else character.encode("unicode_escape").decode("ascii")


def consoles() -> tuple["Console", "Console"]:
    """The console of results and that of notes. Neither turns ``:name:`` into an emoji."""
    from rich.console import Console

    return Console(emoji=False), Console(emoji=False, stderr=True)


def complain(command: str, line: str, notes: "Console | None" = None) -> None:
    """Print in one line why a command ends; on the console of notes where something is drawn there."""
    text = " ".join(filter(None, (PROGRAM, command))) + f": {printable(line)}"
    if notes is None:
        print(text, file=sys.stderr)
    else:
        notes.print(text, style="red", highlight=False, markup=False, soft_wrap=True)


def command_line(*words: str) -> str:
    """A command of this project that can be pasted into the shell that ran this one, whatever is on its PATH."""
    found, called = which(PROGRAM), Path(sys.argv[0])
    ours = Path(sys.executable).with_name(PROGRAM)
    if found is not None and Path(found) in (ours, called.absolute()):
        program = [PROGRAM]
    elif called.name == PROGRAM and called.is_file():
        program = [sys.argv[0]]
    else:
        program = [str(ours)] if ours.is_file() else [sys.executable, "-m", "vllm_batch_invariant.cli"]
    return shlex.join([*program, *words])


def count(number: int, noun: str) -> str:
    """A number and what it counts, as "1 sample" and "2 samples"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def note(line: str) -> None:
    """Print a line about a run that is no result of it."""
    print(printable(line), file=sys.stderr, flush=True)


@contextmanager
def waiting(notes: "Console", line: str, told: bool = True) -> Iterator[Callable[[str], None]]:
    """Show for what the command waits, and for how long, on a terminal; elsewhere print the line, if it is to be told.
    What is yielded replaces the line.
    """
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    if not notes.is_terminal:
        if told:
            note(line)
        yield lambda _: None
        return
    with Progress(
        SpinnerColumn("line"), TextColumn("{task.description}"), TimeElapsedColumn(), console=notes, transient=True
    ) as progress:
        task = progress.add_task(escape(printable(line)), total=None)
        yield lambda now: progress.update(task, description=escape(printable(now)))


def one_line(error: BaseException) -> str:
    """The text of an error on one line, shortened, and its notes, which name a log file."""
    text = shortened(printable(" ".join(str(error).split())) or type(error).__name__)
    return printable("; ".join((text, *getattr(error, "__notes__", ()))))


def shortened(text: str) -> str:
    """The first 300 characters of a text."""
    return text if len(text) <= 300 else text[:297] + "..."
