"""A load through ``vllm.LLM``: run in the engine's process, told as plain data to the one of the command."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ..answers import Answer, RequestSpec, Tally
from ..harness.load import Run, plan_of
from ..harness.metrics import BatchLog, Reading

RUN = f"{__name__}:run"
"""The function that an engine's process calls."""
_TELL_EVERY = 0.25
"""Seconds between two reports of progress."""


def run(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Run the load; what it returns is for :func:`run_of`."""
    from ..harness import worker_main
    from ..harness.engine import run_offline

    spec, log, told, tally = RequestSpec(**request["spec"]), BatchLog(), 0.0, Tally()
    context = llm.llm_engine.model_config.max_model_len
    plan = plan_of(spec, request["samples"], request["concurrency"], context)

    def on_reading(reading: Reading) -> None:
        nonlocal told
        if reading.when > told + _TELL_EVERY:
            told = reading.when
            worker_main.tell({"counts": vars(tally.counts), "reading": _plain(reading)})

    log.on_reading = on_reading
    done = run_offline(llm, spec, plan, log, tally.add)
    found: dict[Answer, int] = {}
    which = [found.setdefault(answer, len(found)) for answer in done.answers]
    answers = [asdict(answer) | {"bits": [bits.hex() for bits in answer.bits]} for answer in found]
    figures = {name: value for name, value in vars(done).items() if name != "answers"}
    return {"answers": answers, "which": which, "run": figures, "readings": [_plain(one) for one in log.readings]}


def run_of(data: dict[str, Any]) -> tuple[Run, BatchLog]:
    """The run, and the readings of the engine's metrics."""
    found = [
        Answer(
            one["text"], tuple(one["tokens"]), tuple(map(bytes.fromhex, one["bits"])), one["dtype"], tuple(one["shape"])
        )
        for one in data["answers"]
    ]
    log = BatchLog([reading_of(reading) for reading in data["readings"]])
    return Run(tuple(found[place] for place in data["which"]), **data["run"]), log


def _plain(reading: Reading) -> list[Any]:
    return [reading.running, list(reading.steps.items()), reading.tokens, reading.when]


def reading_of(data: Iterable[Any]) -> Reading:
    """A reading from plain data."""
    running, steps, tokens, when = data
    return Reading(running, {float(bound): count for bound, count in steps}, tokens, when)
