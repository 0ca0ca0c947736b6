"""vLLM's published recipes: reads them, sends them through the start-up check, writes a page.

usage: python -m scripts.recipes read FOLDER     from a git directory of vllm-project/recipes; writes docs/recipes.csv
       python -m scripts.recipes gate [--write]  what the check says, beside what the file says
       python -m scripts.recipes page            writes the tables of docs/recipes.md

``gate`` exits with status 1 where the file says something else, and writes file and page with ``--write``. It needs
vLLM for CPUs; its vLLM is taken for one of a GPU (``trainers/gate.py``).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import marks
from ..trainers import gate
from ..trainers.examples import Mirror
from . import reader
from .models import UNKNOWN, checkpoint_of
from .table import (
    BEGIN,
    END,
    OTHER_ENGINE,
    OTHER_HARDWARE,
    PAGE,
    Row,
    counted,
    judged,
    page_table,
    questions,
    read,
    write,
)


def read_mirror(mirror: Mirror) -> list[Row]:
    """The rows of all recipes, without verdicts but for what the check has nothing to say of."""
    rows = []
    for found in reader.variants(mirror):
        checkpoint = checkpoint_of(found.checkpoint)
        other = OTHER_ENGINE + found.engine if found.engine != "vllm" else ""
        if found.hardware and not other:
            other = OTHER_HARDWARE + found.hardware
        texts = [
            json.dumps(of, sort_keys=True) if of and not other else ""
            for of in (found.arguments, found.variables, found.features, found.drafts)
        ]
        row = Row(
            *(found.recipe, mirror.commit, mirror.date, found.name, found.checkpoint),
            *(checkpoint.architecture if checkpoint else "", found.precision),
            *(checkpoint.form if checkpoint and checkpoint.form != UNKNOWN else "", str(found.gpus)),
            *texts,
            verdict=other,
        )
        rows.append(row)
    return rows


def write_page(rows: Sequence[Row]) -> None:
    """Put the tables into the page."""
    PAGE.write_text(marks.put(PAGE.read_text(), BEGIN, END, f"\n\n{page_table(rows)}\n\n"))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; status 1 if the check says something else than the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("read").add_argument("folder", type=Path, help="a git directory of vllm-project/recipes")
    commands.add_parser("gate").add_argument("--write", action="store_true", help="write docs/recipes.csv and the page")
    commands.add_parser("page")
    options = parser.parse_args(arguments)
    if options.command == "read":
        write(read_mirror(Mirror(options.folder)))
        return 0
    before = read()
    if options.command == "page":
        write_page(before)
        return 0
    after = judged(before, gate.ask(questions(before)))
    for old, new in zip(before, after, strict=True):
        for name in ("verdict", "with_features", "with_drafts"):
            said = getattr(old, name), getattr(new, name)
            if said[0] != said[1]:
                print(f"{new.recipe} {new.variant} {name}: {said[0] or '-'} -> {said[1]}", file=sys.stderr)
    if options.write:
        write(after)
        write_page(after)
    print("\n".join(counted(after)))
    return int(before != after and not options.write)


if __name__ == "__main__":
    sys.exit(main())
