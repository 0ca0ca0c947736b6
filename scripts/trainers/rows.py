"""Tables of verdicts: files of comma-separated values, their pages, their commands, and what a verdict refuses."""

import argparse
import csv
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from .. import marks
from .gate import REFUSED

T = TypeVar("T")


def read(path: Path, kind: type[T]) -> list[T]:
    """The rows of a file, as instances of a dataclass of texts."""
    with path.open(newline="") as file:
        return [kind(**row) for row in csv.DictReader(file)]


def write(path: Path, kind: type[T], rows: Iterable[Any]) -> None:
    """Write such a file."""
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, [column.name for column in fields(kind)], lineterminator="\n")  # type: ignore[arg-type]
        out.writeheader()
        out.writerows(asdict(row) for row in rows)


def commands_of(about: str | None, name: str) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of a table's commands, and that of ``read``, which takes what is read.

    Args:
        about: the parser's description.
        name: of the table's file.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    reading = commands.add_parser("read")
    commands.add_parser("gate").add_argument("--write", action="store_true", help=f"write docs/{name} and the page")
    commands.add_parser("page")
    return parser, reading


def show(
    options: argparse.Namespace,
    table: ModuleType,
    judge: Callable[[Sequence[Any]], list[Any]],
    changes: Callable[[Any, Any], Iterable[str]],
) -> int:
    """Run ``page`` or ``gate``; status 1 if the check says something else than the file.

    Args:
        table: the module of a table.
        judge: gives its rows with what the check says now.
        changes: lines about a row and what has become of it.
    """

    def write_page(rows: Sequence[Any]) -> None:
        text = marks.put(table.PAGE.read_text(), table.BEGIN, table.END, f"\n\n{table.page_table(rows)}\n\n")
        table.PAGE.write_text(text)

    before = table.read()
    if options.command == "page":
        write_page(before)
        return 0
    after = judge(before)
    for old, new in zip(before, after, strict=True):
        for line in changes(old, new):
            print(line, file=sys.stderr)
    if options.write:
        table.write(after)
        write_page(after)
    print("\n".join(table.counted(after)))
    return int(before != after and not options.write)


def reasons_of(verdict: str) -> list[str]:
    """Everything that it refuses."""
    return verdict.removeprefix(REFUSED).split("; ") if verdict.startswith(REFUSED) else []


def kind_of(reason: str) -> str:
    """A reason without its numbers and values, so that equal ones are counted together."""
    for pattern, kind in (
        (r"(tensor|pipeline|data) parallelism \d+$", r"more GPUs than covered (\1 parallelism)"),
        (r"data parallelism \d+ of a mixture of experts", "data parallelism of a mixture of experts"),
        (r"(image|video|audio).* inputs", "images, videos, audio"),
        (r"the model \w+", "other multimodal models"),
        (r"additional_config=.*", "additional_config: settings for code of the trainer's own in the worker"),
        (r"(.+)=.*", r"\1"),
    ):
        if found := re.fullmatch(pattern, reason):
            return found.expand(kind)
    return reason
