"""The report of a reproducibility run, as a table on a console and as JSON."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..answers import (
    Answer,
    AnswerComparison,
    Divergence,
    GeneratedToken,
    RequestSpec,
    binned,
    compare_answers,
    first_difference,
    spelled,
)
from ..harness.load import Run
from ..harness.metrics import BatchLog, BatchSizes, Trace
from ..outcome import Status


@dataclass(frozen=True)
class ReproduceResult:
    """One column of the report."""

    label: str
    comparison: AnswerComparison
    length: int
    seconds: float
    completions_per_second: float
    tokens_per_second: float
    others: int
    aborted: int
    failed_others: int
    failure: str
    varied: str
    batches: BatchSizes
    trace: Trace = field(repr=False)
    answers: tuple[Answer, ...] = field(repr=False)
    info: dict[str, Any]
    """The engine or the server, and its ``mode``, see :mod:`..harness.mode`."""

    @classmethod
    def of(cls, label: str, run: Run, log: BatchLog, info: dict[str, Any]) -> "ReproduceResult":
        """The result of a run.

        Raises:
            NoTestError: the batch never varied, so equal answers prove nothing.
        """
        batches = log.batches()
        batches.require_variation()
        return cls(
            label=label,
            comparison=compare_answers(run.answers),
            length=max(len(answer.tokens) for answer in run.answers),
            seconds=run.seconds,
            completions_per_second=run.completions_per_second,
            tokens_per_second=run.tokens_per_second,
            others=run.others,
            aborted=run.aborted,
            failed_others=run.failed_others,
            failure=run.failure,
            varied=run.varied,
            batches=batches,
            trace=log.over_time("as served"),
            answers=run.answers,
            info=info,
        )

    @property
    def status(self) -> Status:
        """The exit status of a run that ends with this result."""
        return Status.REPRODUCIBLE if self.comparison.identical else Status.DIVERGED

    @property
    def verdict(self) -> str:
        """The result in one line."""
        found = self.comparison
        if found.identical:
            return f"{self.label}: {found.samples} of {found.samples} samples are bitwise identical"
        return (
            f"{self.label}: {found.samples} samples of one request gave {_count(found.completions, 'completion')} "
            f"and {_count(found.logprob_sequences, 'logprob sequence')}"
        )

    def as_json(self) -> dict[str, Any]:
        """The result as plain data; of each batch size how often it was seen, and each different answer once."""
        data = asdict(replace(self, answers=(), trace=None))
        del data["answers"], data["trace"]
        data["batches"] = {
            "running": dict(sorted(Counter(self.batches.running).items())),
            "steps_by_most_tokens": {str(bound): count for bound, count in self.batches.steps},
        }
        return data | {"status": int(self.status), "samples": _samples(self.answers)}


def _samples(answers: Sequence[Answer]) -> dict[str, Any]:
    """Every different answer, and which of them each sample gave: what a map of samples needs."""
    numbers: dict[Answer, int] = {}
    which = [numbers.setdefault(answer, len(numbers)) for answer in answers]
    return {"which": which, "different": [_different(answers[0], answer) for answer in numbers]}


def _different(reference: Answer, answer: Answer) -> dict[str, Any]:
    """One answer, and the candidates that it and sample 0 list where its logprobs and its tokens first differ."""
    logprob = first_difference(reference.bits, answer.bits)
    token = first_difference(reference.tokens, answer.tokens)
    return {
        "text": answer.text,
        "tokens": list(answer.tokens),
        "logprobs": [_number(GeneratedToken.of_bits(bits).logprob) for bits in answer.bits],
        "first_logprob": logprob,
        "first_token": token,
        "candidates": [
            {"position": position, "expected": _listed(reference, position), "got": _listed(answer, position)}
            for position in sorted({logprob, token} - {None})
        ],
    }


def _listed(answer: Answer, position: int) -> list[list[Any]]:
    """Token and logprob of the generated token, then of every candidate; none behind the end of an answer."""
    if position >= len(answer.bits):
        return []
    return [[token, _number(logprob)] for token, logprob in GeneratedToken.of_bits(answer.bits[position]).listed]


def _number(value: float) -> float | str:
    """A number that JSON can say with all its bits, or else the words for it."""
    return value if math.isfinite(value) else spelled(value)


def as_json(
    target: str, arguments: Sequence[str], spec: RequestSpec, results: Sequence[ReproduceResult]
) -> dict[str, Any]:
    """The target (a model or an address), the arguments of the engine, the request and every result, as plain data."""
    return {
        "target": target,
        "arguments": list(arguments),
        "request": asdict(spec),
        "results": [result.as_json() for result in results],
    }


def print_report(console: Console, results: Sequence[ReproduceResult]) -> None:
    """Print a table with a column a result, and the verdict of each."""
    table = Table(title="The same request, under a load that varies the batch", title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(escape(result.label), justify="left", overflow="fold")
    columns = [rows_of(result) for result in results]
    for name in columns[0]:
        table.add_row(name, *(escape(column[name]) for column in columns))
    console.print(table)
    for result in results:
        console.print(
            result.verdict,
            style="green" if result.comparison.identical else "red",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def rows_of(result: ReproduceResult) -> dict[str, str]:
    """The rows of the table: name and text."""
    found = result.comparison
    running = result.batches.running
    return {
        "mode": result.info["mode"],
        "samples": str(found.samples),
        "unique completions": str(found.completions),
        "unique logprob sequences": str(found.logprob_sequences),
        "first token that differs": _divergence(found.earliest_token),
        "samples whose tokens differ, by position": _histogram(found.token_positions, result.length),
        "first logprob that differs": _position(found.earliest_logprob),
        "samples whose logprobs differ, by position": _histogram(found.logprob_positions, result.length),
        "requests in the batch": (
            f"{min(running)} to {max(running)}, median {statistics.median(running):.0f} "
            f"({_count(len(set(running)), 'size')} seen in {_count(len(running), 'reading')})"
        ),
        "engine steps by tokens": _steps(result.batches),
        "concurrent requests": f"{result.others}, {result.aborted} aborted, {result.failed_others} failed"
        + (f" ({result.failure})" if result.failure else ""),
        "their parameters": result.varied,
        "time": f"{result.seconds:.1f} s",
        "throughput": f"{result.completions_per_second:.2f} completions/s, {result.tokens_per_second:.0f} tokens/s",
    }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _position(divergence: Divergence | None) -> str:
    return "none" if divergence is None else f"position {divergence.position}, sample {divergence.sample}"


def _divergence(divergence: Divergence | None) -> str:
    if divergence is None:
        return "none"
    got, expected = divergence.texts
    return f"{_position(divergence)}\n{divergence.tokens}\n{got}\ninstead of {expected}"


def _histogram(positions: dict[int, int], length: int) -> str:
    if not positions:
        return "none"
    ranges = binned(positions, length)
    most, digits = max(count for *_, count in ranges), len(str(ranges[-1][1]))
    return "\n".join(
        f"{first:>{digits}}-{last:<{digits}} {'█' * -(-16 * count // most):<16} {count}"
        for first, last, count in ranges
    )


def _steps(batches: BatchSizes) -> str:
    if not batches.steps:
        return "not measured"
    return ", ".join(f"{'more' if bound == float('inf') else f'≤{bound:.0f}'}: {n}" for bound, n in batches.steps)
