"""The rollout configurations of trainers' examples: reads them, sends them through the start-up check, writes a page.

usage: python -m scripts.trainer_configurations read TRAINER=FOLDER...    from git directories; writes docs/trainers.csv
       python -m scripts.trainer_configurations gate [--write]            what the check says, beside what the file says
       python -m scripts.trainer_configurations page                      writes the tables of docs/trainers.md

``gate`` exits with status 1 where the file says something else, and writes file and page with ``--write``. It needs
vLLM for CPUs; its vLLM is taken for one of a GPU (``trainers/gate.py``).
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from . import marks
from .trainers import gate, openrlhf, prime_rl, skyrl, trl, verl
from .trainers.examples import Mirror
from .trainers.gate import Question
from .trainers.models import model_of
from .trainers.table import BEGIN, END, OTHER_ENGINE, PAGE, UNREAD, Row, counted, page_table, read, write

READERS = {reader.NAME: reader for reader in (verl, trl, skyrl, openrlhf, prime_rl)}


def read_mirrors(given: dict[str, Path]) -> list[Row]:
    """The rows of some trainers, without verdicts but for what the check has nothing to say of."""
    rows = []
    for name, folder in given.items():
        mirror = Mirror(folder)
        for found in READERS[name].configurations(mirror):
            model = model_of(found.model)
            verdict = f"{UNREAD}{found.unread}" if found.unread else ""
            if found.engine != "vllm" and not found.unread:
                verdict = f"{OTHER_ENGINE}: {found.engine}"
            arguments = json.dumps(found.arguments, sort_keys=True) if found.arguments and not verdict else ""
            row = Row(
                *(name, mirror.commit, mirror.date, found.script, found.model),
                architecture=model.architecture if model else "",
                engine=found.engine,
                gpus=str(found.gpus) if arguments else "",
                arguments=arguments,
                variables=json.dumps(found.variables, sort_keys=True) if arguments and found.variables else "",
                verdict=verdict,
            )
            rows.append(row)
    return rows


def questions(rows: Sequence[Row]) -> list[Question]:
    """What to ask of rows: of each as its script has it, then of each the model alone."""
    asked = [row for row in rows if row.is_asked]
    found = [Question(model_of(row.model), row.engine_arguments, row.engine_variables) for row in asked]
    return [*found, *(Question(question.model, {"dtype": "bfloat16"}) for question in found)]


def judged(rows: Sequence[Row], said: Sequence[str]) -> list[Row]:
    """The rows with what was said to :func:`questions`."""
    half = len(said) // 2
    verdicts = iter(zip(said[half:], said[:half], strict=True))
    found = []
    for row in rows:
        alone, verdict = next(verdicts) if row.is_asked else (row.alone, row.verdict)
        found.append(dataclasses.replace(row, alone=alone, verdict=verdict))
    return found


def write_page(rows: Sequence[Row]) -> None:
    """Put the tables into the page."""
    PAGE.write_text(marks.put(PAGE.read_text(), BEGIN, END, f"\n\n{page_table(rows)}\n\n"))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; status 1 if the check says something else than the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    of_mirrors = commands.add_parser("read")
    of_mirrors.add_argument("mirrors", nargs="+", metavar="TRAINER=FOLDER", help=f"of {', '.join(READERS)}")
    commands.add_parser("gate").add_argument(
        "--write", action="store_true", help="write docs/trainers.csv and the page"
    )
    commands.add_parser("page")
    options = parser.parse_args(arguments)
    if options.command == "read":
        given = {name: Path(folder) for name, _, folder in (text.partition("=") for text in options.mirrors)}
        write(read_mirrors(given))
        return 0
    before = read()
    if options.command == "page":
        write_page(before)
        return 0
    after = judged(before, gate.ask(questions(before)))
    for old, new in zip(before, after, strict=True):
        if old != new:
            print(f"{new.trainer} {new.script}: {old.verdict or '-'} -> {new.verdict}", file=sys.stderr)
    if options.write:
        write(after)
        write_page(after)
    print("\n".join(counted(after)))
    return int(before != after and not options.write)


if __name__ == "__main__":
    sys.exit(main())
