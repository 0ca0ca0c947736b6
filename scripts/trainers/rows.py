"""Tables of verdicts: files of comma-separated values, and what a verdict refuses."""

import csv
import re
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

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
