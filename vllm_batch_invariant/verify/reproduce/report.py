"""The report of a reproducibility run, as a table on a console and as JSON."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..answers import (
    Answer,
    AnswerComparison,
    Counts,
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
from ..harness.mode import NONE, OURS, THEIRS
from ..outcome import Status
from ..printing import count, printable


@dataclass(frozen=True)
class ReproduceResult:
    """One column of the report."""

    label: str
    run: Run = field(repr=False)
    batches: BatchSizes
    trace: Trace = field(repr=False)
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
        return cls(label, run, batches, log.over_time("as served"), info)

    @property
    def answers(self) -> tuple[Answer, ...]:
        """All answers, sample 0 first."""
        return self.run.answers

    @cached_property
    def comparison(self) -> AnswerComparison:
        """Of all answers with the first."""
        return compare_answers(self.answers)

    @property
    def length(self) -> int:
        """Positions of the longest answer."""
        return max(len(answer.bits) for answer in self.answers)

    @property
    def pools(self) -> bool:
        """Whether a pooling model gave the answers."""
        return bool(self.answers[0].dtype)

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
        return f"{self.label}: {found.samples} samples of one request gave {self.kinds}"

    @property
    def kinds(self) -> str:
        """How many different answers there are, in words."""
        found = self.comparison
        if self.pools:
            return count(found.logprob_sequences, "vector")
        return f"{count(found.completions, 'completion')} and {count(found.logprob_sequences, 'logprob sequence')}"

    @property
    def headline(self) -> str:
        """The result in words: those of the page, and the last of the command."""
        found = self.comparison
        if found.identical:
            return f"Reproducible. All {found.samples} answers are equal, bit for bit."
        bits = "values" if self.pools else "logprobs"
        positions = {"tokens": found.token_positions, bits: found.logprob_positions}
        differ = [f"{sum(some.values())} have other {what}" for what, some in positions.items() if some]
        return f"Not reproducible. Of {found.samples - 1} repeats {' and '.join(differ) or 'some have other text'}."

    def as_json(self) -> dict[str, Any]:
        """The result as plain data; of each batch size how often it was seen, and each different answer once."""
        batches = {
            "running": dict(sorted(Counter(self.batches.running).items())),
            "steps_by_most_tokens": {str(bound): count for bound, count in self.batches.steps},
        }
        data = {"label": self.label, "comparison": asdict(self.comparison), "length": self.length}
        data |= {name: getattr(self.run, name) for name in _OF_A_RUN} | {"batches": batches, "info": self.info}
        return data | {"status": int(self.status), "samples": _samples(self.answers)}


_OF_A_RUN = (
    *("seconds", "completions_per_second", "tokens_per_second"),
    *("others", "aborted", "failed_others", "failure", "varied"),
)
"""What JSON has of a run, in its order."""


def _samples(answers: Sequence[Answer]) -> dict[str, Any]:
    """Every different answer, and which of them each sample gave: what a map of samples needs."""
    numbers: dict[Answer, int] = {}
    which = [numbers.setdefault(answer, len(numbers)) for answer in answers]
    return {"which": which, "different": [_different(answers[0], answer) for answer in numbers]}


def _different(reference: Answer, answer: Answer) -> dict[str, Any]:
    """One answer, and the candidates that it and sample 0 list where its logprobs and its tokens first differ."""
    logprob = first_difference(reference.bits, answer.bits)
    if answer.dtype:
        rows = [[_number(value) for value in answer.values(place)] for place in range(len(answer.bits))]
        values = rows if answer.unit == "row" else [value for row in rows for value in row]
        return {"dtype": answer.dtype, "shape": list(answer.shape), "values": values, "first_value": logprob}
    token = first_difference(reference.tokens, answer.tokens)
    return {
        "text": answer.text,
        "tokens": list(answer.tokens),
        "logprobs": [_number(GeneratedToken.of_bits(bits).logprob) for bits in answer.bits],
        "first_logprob": logprob,
        "first_token": token,
        "candidates": [
            {"position": position, "expected": _listed(reference, position), "got": _listed(answer, position)}
            for position in sorted({place for place in (logprob, token) if place is not None})
        ],
    }


def _listed(answer: Answer, position: int) -> list[list[Any]]:
    """Token and logprob of the generated token, then of every candidate; none behind the end of an answer."""
    return [[token, _number(logprob)] for token, logprob in _of(answer, position)]


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
        "request": spec.asked,
        "results": [result.as_json() for result in results],
    }


def print_report(console: Console, results: Sequence[ReproduceResult], verbose: bool = False) -> None:
    """Print a table with a column a result, where answers part, and the verdict of each.

    Args:
        verbose: whether the table has everything that is known of a run.
    """
    table = Table(title="The same request, under a load that varies the batch", title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(escape(result.label), justify="left", overflow="fold")
    columns = [(rows_of if verbose else summary_of)(result) for result in results]
    for name in columns[0]:
        table.add_row(name, *(escape(column[name]) for column in columns))
    console.print(table)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    in_colour = console.is_terminal and not console.no_color
    for result in results:
        for line in (*_remarks(result), *_parting(result, in_colour)):
            say(line)
    if len(results) > 1:
        say(judgement(results), style="bold")
    for result in results:
        say(f"{result.label}: {result.headline}", style="green" if result.comparison.identical else "red")


def summary_of(result: ReproduceResult) -> dict[str, str]:
    """The rows of the short table: name and text."""
    found, running = result.comparison, result.batches.running
    different = {
        "different texts": str(found.completions),
        "different logprobs, same text or not": str(found.logprob_sequences),
    }
    if result.pools:
        shape = " x ".join(map(str, result.answers[0].shape))
        different = {"values of an answer": shape, "different vectors": str(found.logprob_sequences)}
    return {
        "answers": str(found.samples),
        **different,
        "requests in the batch": f"{min(running)} to {max(running)}",
    }


def judgement(results: Sequence[ReproduceResult]) -> str:
    """How many answers of each result differ from its first, in a line."""
    return " ".join(map(_judged, results))


def _judged(result: ReproduceResult) -> str:
    whose = {NONE: "Plain vLLM", OURS: "With the mode", THEIRS: "vLLM's own mode"}.get(
        result.info["mode"], result.label
    )
    others = sum(answer != result.answers[0] for answer in result.answers)
    if not others:
        return f"{whose}: none of {len(result.answers)}."
    return f"{whose}: {others} of {len(result.answers)} answers differ from the first."


def _remarks(result: ReproduceResult) -> Iterator[str]:
    """What a reader of the short table may not miss."""
    if result.info["mode"] not in (NONE, OURS):
        yield f"{result.label}: mode: {result.info['mode']}"
    if result.run.failed_others:
        failed = count(result.run.failed_others, "concurrent request")
        yield f"{result.label}: {failed} failed: {result.run.failure}"


_BEFORE, _FROM = 72, 160
"""Characters that are shown before the first other word, and from it on."""


def _parting(result: ReproduceResult, in_colour: bool) -> Iterator[Text]:
    """Two answers where their tokens first part, the first other word of each marked, and the logprobs of both words;
    where no token parts, the first two logprobs that differ.
    """
    found = result.comparison
    if result.pools:
        if (parted := found.earliest_logprob) is not None:
            of_all = Counter(_differing(result.answers[0], answer) for answer in result.answers)
            yield Text(
                f"{result.label}: at {found.unit} {parted.position} answer 0 has {parted.expected}, answer "
                f"{parted.sample} {parted.got}; {max(of_all)} of {result.length} {found.unit}s differ at most"
            )
        return
    if (parted := found.earliest_token) is not None:
        answers = result.answers[0], result.answers[parted.sample]
        ways = parted_texts(*(answer.text for answer in answers)) or ("", (parted.expected, ""), (parted.got, ""))
        shared, *others = ways
        words = [printable(word.strip()) for word, _ in others]
        yield Text(f"{result.label}: the first answers that part, at token {parted.position}:")
        numbers = [f"answer {sample}:" for sample in (0, parted.sample)]
        width = max(map(len, numbers))
        for number, answer, (word, rest), colour in zip(numbers, answers, others, ("green", "red"), strict=True):
            yield _marked(f"  {number:<{width}} ", shared, word, rest, colour if in_colour else None)
            listed = dict(_of(answer, parted.position))
            chosen = (f'"{one}" {_shown(listed.get(token))}' for one, token in zip(words, parted.both, strict=True))
            yield Text(f"  {'':<{width}} logprobs there: {', '.join(chosen)}", style="dim")
    elif (parted := found.earliest_logprob) is not None:
        sides = (_of(result.answers[sample], parted.position) for sample in (0, parted.sample))
        one, other = next(pair for pair in zip_longest(*sides, fillvalue=("nothing", None)) if pair[0] != pair[1])
        yield Text(
            f"{result.label}: no token differs; the evidence is in the logprobs. At token {parted.position} answer 0 "
            f"lists {printable(one[0])} {_shown(one[1])}, answer {parted.sample} {printable(other[0])} "
            f"{_shown(other[1])}"
        )


def parted_texts(one: str, other: str) -> tuple[str, tuple[str, str], tuple[str, str]] | None:
    """What two texts share, up to the first other word, and that word and the rest of each; None if they are equal."""
    place = first_difference(one, other)
    if place is None:
        return None

    def parts(text: str, start: int) -> tuple[str, str]:
        found = re.match(r"\s*\S*", text[start:])
        assert found is not None  # it matches nothing, too
        word = found[0]
        return word or "<end>", text[start + len(word) :]

    start = len(re.sub(r"\S*\Z", "", one[:place]))
    if parts(one, start)[0] == parts(other, start)[0]:  # one of them ends behind this word, or in other blanks
        start = place
    return one[:start], parts(one, start), parts(other, start)


def _differing(one: Answer, other: Answer) -> int:
    """At how many positions what a pooling model gave differs."""
    return sum(left != right for left, right in zip_longest(one.bits, other.bits))


def _marked(begin: str, shared: str, word: str, rest: str, colour: str | None) -> Text:
    """A text around a marked word, on one line; in a colour, or else between asterisks."""
    room = max(_FROM - len(word), 0)
    before = ("…" if len(shared) > _BEFORE else "") + shared[-_BEFORE:]
    behind = rest[:room] + ("…" if len(rest) > room else "")
    mark = (printable(word), f"bold {colour}") if colour else f"**{printable(word)}**"
    return Text.assemble(begin, printable(before), mark, printable(behind))


def _of(answer: Answer, position: int) -> Sequence[tuple[str, float]]:
    """Tokens and logprobs that an answer lists at a position; none behind its end."""
    return GeneratedToken.of_bits(answer.bits[position]).listed if position < len(answer.bits) else ()


def _shown(logprob: float | None) -> str:
    """A logprob with all digits of an fp32."""
    return "(not listed)" if logprob is None else f"{logprob:.9g}"


def in_words(counts: Counts, pools: bool = False) -> str:
    """The counts of different answers."""
    if pools:
        return count(counts.logprob_sequences, "vector")
    return f"{count(counts.completions, 'completion')}, {count(counts.logprob_sequences, 'logprob sequence')}"


def rows_of(result: ReproduceResult) -> dict[str, str]:
    """The rows of the table: name and text."""
    found, run = result.comparison, result.run
    running = result.batches.running
    compared = {
        "unique completions": str(found.completions),
        "unique logprob sequences": str(found.logprob_sequences),
        "first token that differs": _divergence(found.earliest_token),
        "samples whose tokens differ, by position": _histogram(found.token_positions, result.length),
        "first logprob that differs": _position(found.earliest_logprob),
        "samples whose logprobs differ, by position": _histogram(found.logprob_positions, result.length),
    }
    if result.pools:
        compared = {
            "unique vectors": str(found.logprob_sequences),
            f"first {found.unit} that differs": _divergence(found.earliest_logprob),
            f"samples whose {found.unit}s differ, by the first": _histogram(found.logprob_positions, result.length),
        }
    throughput = f"{run.completions_per_second:.2f} completions/s, {run.tokens_per_second:.0f} tokens/s"
    return {
        "mode": result.info["mode"],
        "samples": str(found.samples),
        **compared,
        "requests in the batch": (
            f"{min(running)} to {max(running)}, median {statistics.median(running):.0f} "
            f"({count(len(set(running)), 'size')} seen in {count(len(running), 'reading')})"
        ),
        "engine steps by tokens": _steps(result.batches),
        "concurrent requests": f"{run.others}, {run.aborted} aborted, {run.failed_others} failed"
        + (f" ({run.failure})" if run.failure else ""),
        "their parameters": run.varied,
        "time": f"{run.seconds:.1f} s",
        "throughput": f"{run.completions_per_second:.2f} answers/s" if result.pools else throughput,
    }


def _position(divergence: Divergence | None) -> str:
    return "none" if divergence is None else f"position {divergence.position}, sample {divergence.sample}"


def _divergence(divergence: Divergence | None) -> str:
    if divergence is None:
        return "none"
    got, expected = divergence.texts
    if not (divergence.got_text or divergence.expected_text):
        return f"{_position(divergence)}\n{divergence.tokens}"
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
