"""The rungs of the contract, and what a check found on each: docs/contract.md says what they promise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ..divergence import Answer, Comparison, compare, first_difference
from ..outcome import Status


class Outcome(Enum):
    """What is known of a fact or a rung."""

    HOLDS = "holds"
    BREAKS = "breaks"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Rung:
    """A promise: the same bits ..."""

    name: str
    promise: str
    out_of_reach: str = ""
    """Why no check can test it; empty where one can."""


RUNGS = (
    Rung("run", "when the same batch runs again"),
    Rung("batch", "whatever other requests run beside it, in any number and order, at any place in the batch"),
    Rung(
        "schedule",
        "whether a token's state was computed by prefill, by a chunk of any size or by decode, after preemption, from "
        "a warm or a cold prefix cache, before or after a restart, a sleep or an exchange of weights",
    ),
    Rung("parallel", "with another number of tensor-parallel workers", "a check has one engine, of one size"),
    Rung("hardware", "on another machine, or with another number of CPU threads", "a check has one machine"),
)


@dataclass(frozen=True)
class Sample:
    """One answer, and the answer that it has to equal."""

    label: str
    """How it was asked for, such as "with 17 others"."""
    expected: Answer
    answer: Answer


@dataclass(frozen=True)
class Fact:
    """One thing that a rung promises, and whether it was so.

    Attributes:
        rung: its name.
        name: what was tried, such as "in any company".
        outcome: what came of it.
        detail: what was compared; or why nothing was.
        comparison: of all answers, where they have one request; sample 0 is what they had to equal.
        first: label of the sample that parts first; empty if none does.
        meant: whether this check set out to test it. What it meant to test and could not makes it no test.
    """

    rung: str
    name: str
    outcome: Outcome
    detail: str
    comparison: Comparison | None = None
    first: str = ""
    meant: bool = True

    def with_evidence(self, evidence: str) -> "Fact":
        """The same with what shows that it was provoked."""
        return replace(self, detail=f"{self.detail}; {evidence}")

    @property
    def difference(self) -> str:
        """Where answers part first, in words; empty where none does."""
        found = self.comparison
        if found is None or found.identical:
            return ""
        token, logprob = found.earliest_token, found.earliest_logprob
        if logprob is None:
            return f"no token and no logprob, only the text, {self.first}"
        if token is None:
            return f"no token; logprobs from token {logprob.position} on, {self.first}"
        return f"token {token.position}, {self.first}: {token}; logprobs from token {logprob.position} on"


@dataclass(frozen=True)
class Verdict:
    """A rung and what all its facts say together."""

    rung: Rung
    facts: tuple[Fact, ...]

    @property
    def outcome(self) -> Outcome:
        """Breaks where one fact does; is not tested where none was."""
        outcomes = {fact.outcome for fact in self.facts}
        return next((outcome for outcome in (Outcome.BREAKS, Outcome.HOLDS) if outcome in outcomes), Outcome.NOT_TESTED)

    @property
    def untested(self) -> tuple[str, ...]:
        """Names of the facts of which nothing is known."""
        return tuple(fact.name for fact in self.facts if fact.outcome is Outcome.NOT_TESTED)

    @property
    def detail(self) -> str:
        """The facts in one line."""
        if self.rung.out_of_reach:
            return self.rung.out_of_reach
        tested = [fact for fact in self.facts if fact.outcome is not Outcome.NOT_TESTED]
        broken = [fact.name for fact in tested if fact.outcome is Outcome.BREAKS]
        parts = [", ".join(broken)] if broken else []
        parts += [f"{len(tested)} of {len(self.facts)} facts tested"] if self.facts else ["nothing tested"]
        parts += [f"not tested: {', '.join(self.untested)}"] if self.untested else []
        return "; ".join(parts)


def fact_of(rung: str, name: str, samples: Sequence[Sample]) -> Fact:
    """What the samples, at least one, say together."""
    different = [sample for sample in samples if sample.answer != sample.expected]
    positions = sum(len(sample.answer.tokens) for sample in samples)
    detail = f"{_count(len(samples), 'answer')} of {positions} tokens in all, "
    if not different:
        return Fact(rung, name, Outcome.HOLDS, detail + "every token and logprob has the same bits")
    detail += f"{len(different)} of them with other bits: {', '.join(sample.label for sample in different[:5])}"
    detail += f" and {len(different) - 5} more" if len(different) > 5 else ""
    earliest = min(different, key=_parts_at)
    # one comparison is of one request
    together = [sample for sample in samples if sample.expected == earliest.expected]
    comparison = compare([earliest.expected, *(sample.answer for sample in together)])
    parting = comparison.earliest_token or comparison.earliest_logprob
    return Fact(rung, name, Outcome.BREAKS, detail, comparison, together[parting.sample - 1].label if parting else "")


def _parts_at(sample: Sample) -> tuple[int, int]:
    """The first token to differ and the first logprob; a number beyond both where there is none."""
    beyond = len(sample.expected.tokens) + len(sample.answer.tokens)
    sides = sample.expected, sample.answer
    found = first_difference(*(side.tokens for side in sides)), first_difference(*(side.bits for side in sides))
    token, logprob = (beyond if position is None else position for position in found)
    return token, logprob


def verdicts(facts: Sequence[Fact]) -> tuple[Verdict, ...]:
    """Every rung of the contract with its facts."""
    return tuple(Verdict(rung, tuple(fact for fact in facts if fact.rung == rung.name)) for rung in RUNGS)


def status_of(facts: Sequence[Fact]) -> Status:
    """The exit status: 1 where something breaks, 2 where something that was meant to be tested was not."""
    if any(fact.outcome is Outcome.BREAKS for fact in facts):
        return Status.DIVERGED
    tested = [fact for fact in facts if fact.outcome is Outcome.HOLDS]
    if not tested or any(fact.meant and fact.outcome is Outcome.NOT_TESTED for fact in facts):
        return Status.NO_TEST
    return Status.REPRODUCIBLE


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
