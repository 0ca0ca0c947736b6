"""vLLM's published recipes: reads them, sends them through the start-up check, writes a page.

usage: python -m scripts.recipes read FOLDER     from a git directory of vllm-project/recipes; writes docs/recipes.csv
       python -m scripts.recipes gate [--write]  what the check says, beside what the file says
       python -m scripts.recipes page            writes the tables of docs/recipes.md

``gate`` exits with status 1 where the file says something else, and writes file and page with ``--write``. It needs
vLLM for CPUs; its vLLM is taken for one of a GPU (``trainers/gate.py``).
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from ..trainers import gate, rows
from ..trainers.examples import Mirror
from . import reader, table
from .models import UNKNOWN, checkpoint_of
from .table import OTHER_ENGINE, OTHER_HARDWARE, Row


def read_mirror(mirror: Mirror) -> list[Row]:
    """The rows of all recipes, without verdicts but for what the check has nothing to say of."""
    read = []
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
        read.append(row)
    return read


def _changes(old: Row, new: Row) -> Iterator[str]:
    for name in ("verdict", "with_features", "with_drafts"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            yield f"{new.recipe} {new.variant} {name}: {before or '-'} -> {after}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; status 1 if the check says something else than the file."""
    parser, reading = rows.commands_of(__doc__, "recipes.csv")
    reading.add_argument("folder", type=Path, help="a git directory of vllm-project/recipes")
    options = parser.parse_args(arguments)
    if options.command == "read":
        table.write(read_mirror(Mirror(options.folder)))
        return 0
    return rows.show(options, table, lambda found: table.judged(found, gate.ask(table.questions(found))), _changes)


if __name__ == "__main__":
    sys.exit(main())
