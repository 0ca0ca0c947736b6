"""The rollout configurations of trainers' examples: reads them, sends them through the start-up check, writes a page.

usage: python -m scripts.trainer_configurations read TRAINER=FOLDER...    from git directories; writes docs/trainers.csv
       python -m scripts.trainer_configurations gate [--write]            what the check says, beside what the file says
       python -m scripts.trainer_configurations page                      writes the tables of docs/trainers.md

``gate`` exits with status 1 where the file says something else, and writes file and page with ``--write``. It needs
vLLM for CPUs; its vLLM is taken for one of a GPU (``trainers/gate.py``).
"""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .trainers import gate, openrlhf, prime_rl, rows, skyrl, table, trl, verl
from .trainers.examples import Mirror
from .trainers.gate import Question
from .trainers.models import model_of
from .trainers.table import OTHER_ENGINE, UNREAD, Row

READERS = {reader.NAME: reader for reader in (verl, trl, skyrl, openrlhf, prime_rl)}


def read_mirrors(given: dict[str, Path]) -> list[Row]:
    """The rows of some trainers, without verdicts but for what the check has nothing to say of."""
    read = []
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
            read.append(row)
    return read


def questions(every: Sequence[Row]) -> list[Question]:
    """What to ask of rows: of each as its script has it, then of each the model alone."""
    asked = [row for row in every if row.is_asked]
    found = [Question(model_of(row.model), row.engine_arguments, row.engine_variables) for row in asked]
    return [*found, *(Question(question.model, {"dtype": "bfloat16"}) for question in found)]


def judged(every: Sequence[Row], said: Sequence[str]) -> list[Row]:
    """The rows with what was said to :func:`questions`."""
    half = len(said) // 2
    verdicts = iter(zip(said[half:], said[:half], strict=True))
    found = []
    for row in every:
        alone, verdict = next(verdicts) if row.is_asked else (row.alone, row.verdict)
        found.append(dataclasses.replace(row, alone=alone, verdict=verdict))
    return found


def _changes(old: Row, new: Row) -> Iterator[str]:
    if old != new:
        yield f"{new.trainer} {new.script}: {old.verdict or '-'} -> {new.verdict}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; status 1 if the check says something else than the file."""
    parser, reading = rows.commands_of(__doc__, "trainers.csv")
    reading.add_argument("mirrors", nargs="+", metavar="TRAINER=FOLDER", help=f"of {', '.join(READERS)}")
    options = parser.parse_args(arguments)
    if options.command == "read":
        given = {name: Path(folder) for name, _, folder in (text.partition("=") for text in options.mirrors)}
        table.write(read_mirrors(given))
        return 0
    return rows.show(options, table, lambda found: judged(found, gate.ask(questions(found))), _changes)


if __name__ == "__main__":
    sys.exit(main())
