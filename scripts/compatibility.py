"""Writes the record of tested versions (``reviews/versions.csv``) and the table of it in docs/compatibility.md."""

import csv
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import astuple, fields, replace
from pathlib import Path

from packaging.version import Version

from scripts import marks
from vllm_batch_invariant.integration.reviews import versions
from vllm_batch_invariant.integration.reviews.versions import READ, RUN, Row

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- versions.csv, by scripts/compatibility.py -->", "<!-- end of versions.csv -->"
OLDEST = Version("0.26")
"""The oldest vLLM that anything is tested with."""

_WORDS = {RUN: "run", READ: "patch points checked"}


def releases(package: str) -> list[str]:
    """Every release of a package that pip finds, from :data:`OLDEST` on, the oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"^Available versions: (.*)$", listing, re.MULTILINE)[1].split(", ")
    return sorted((version for version in found if Version(version) >= OLDEST), key=Version)


def order(row: Row) -> tuple[Version, tuple[str, ...]]:
    """The place of a row in the record."""
    return Version(row.version), astuple(row)


def put(new: Row) -> None:
    """Write a row to the record, in place of what was found before of that version in such an environment."""

    def environment(row: Row) -> Row:
        return replace(row, machine="", python="", date="", outcome="")

    kept = [row for row in versions.rows() if environment(row) != environment(new)]
    ordered = sorted((*kept, new), key=order)
    with versions.TABLE.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerows([[field.name for field in fields(Row)], *map(astuple, ordered)])
    versions.rows.cache_clear()
    PAGE.write_text(marks.put(PAGE.read_text(), BEGIN, END, f"\n\n{section()}\n\n"))


def section(rows: Iterable[Row] | None = None) -> str:
    """The table of the page."""
    lines = ["| vLLM | package | what | on | Python | PyTorch | Triton | date | outcome |", "|" + "---|" * 9]
    lines += [
        f"| {row.version} | {row.package} | {_WORDS[row.what]} | {row.machine} | {row.python} | {row.pytorch} | "
        f"{row.triton} | {row.date} | {row.outcome} |".replace("|  |", "| |").replace("|  |", "| |")
        for row in (versions.rows() if rows is None else rows)
    ]
    return "\n".join(lines)
