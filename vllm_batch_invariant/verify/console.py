"""Where commands print: what was found on stdout, everything else on stderr."""

from rich.console import Console

from .printable import printable


def consoles() -> tuple[Console, Console]:
    """For what was found, and for notes. Names of emoji stay what they are: a colon on both sides is no emoji."""
    return Console(emoji=False), Console(emoji=False, stderr=True)


def complain(notes: Console, command: str, line: str) -> None:
    """Say in one line why a command ends as it does."""
    notes.print(f"{command}: {printable(line)}", style="red", highlight=False, markup=False, soft_wrap=True)
