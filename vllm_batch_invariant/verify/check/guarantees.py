"""The rungs of the contract, and what a check found on each: docs/contract.md says what they promise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ..divergence import Answer, AnswerComparison, compare_answers, first_difference
from ..outcome import Status


class Outcome(Enum):
    """What is known of a fact or a rung."""

    HOLDS = "holds"
    BREAKS = "breaks"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Guarantee:
    """A promise: the same bits ..."""

    name: str
    promise: str
    not_applicable: str = ""
    """Why no check can test it; empty where one can."""


GUARANTEES = (
    Guarantee("run", "when the same batch runs again"),
    Guarantee("batch", "whatever other requests run beside it, in any number and order, at any place in the batch"),
    Guarantee(
        "schedule",
        "whether a token's state was computed by prefill, by a chunk of any size or by decode, after preemption, from "
        "a warm or a cold prefix cache, before or after a restart, a sleep or an exchange of weights",
    ),
    Guarantee("parallel", "with another number of tensor-parallel workers", "a check has one engine, of one size"),
    Guarantee("hardware", "on another machine, or with another number of CPU threads", "a check has one machine"),
)


@dataclass(frozen=True)
class Sample:
    """One answer, and the answer that it has to equal."""

    label: str
    """How it was asked for, such as "with 17 others"."""
    expected: Answer
    answer: Answer


@dataclass(frozen=True)
class CaseResult:
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

    guarantee: str
    name: str
    outcome: Outcome
    detail: str
    comparison: AnswerComparison | None = None
    first: str = ""
    required: bool = True

    def with_proof(self, proof: str) -> "Fact":
        """The same with what shows that it was provoked."""
        return replace(self, detail=f"{self.detail}; {proof}")

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
class GuaranteeResult:
    """A rung and what all its facts say together."""

    guarantee: Guarantee
    cases: tuple[CaseResult, ...]

    @property
    def outcome(self) -> Outcome:
        """Breaks where one fact does; is not tested where none was."""
        outcomes = {case.outcome for case in self.cases}
        return next((outcome for outcome in (Outcome.BREAKS, Outcome.HOLDS) if outcome in outcomes), Outcome.NOT_TESTED)

    @property
    def untested(self) -> tuple[str, ...]:
        """Names of the facts of which nothing is known."""
        return tuple(case.name for case in self.cases if case.outcome is Outcome.NOT_TESTED)

    @property
    def detail(self) -> str:
        """The facts in one line."""
        if self.guarantee.not_applicable:
            return self.guarantee.not_applicable
        tested = [case for case in self.cases if case.outcome is not Outcome.NOT_TESTED]
        broken = [case.name for case in tested if case.outcome is Outcome.BREAKS]
        parts = [", ".join(broken)] if broken else []
        parts += [f"{len(tested)} of {len(self.cases)} facts tested"] if self.cases else ["nothing tested"]
        parts += [f"not tested: {', '.join(self.untested)}"] if self.untested else []
        return "; ".join(parts)


def case_result(guarantee: str, name: str, samples: Sequence[Sample]) -> CaseResult:
    """What the samples, at least one, say together."""
    different = [sample for sample in samples if sample.answer != sample.expected]
    positions = sum(len(sample.answer.tokens) for sample in samples)
    detail = f"{_count(len(samples), 'answer')} of {positions} tokens in all, "
    if not different:
        return CaseResult(guarantee, name, Outcome.HOLDS, detail + "every token and logprob has the same bits")
    detail += f"{len(different)} of them with other bits: {', '.join(sample.label for sample in different[:5])}"
    detail += f" and {len(different) - 5} more" if len(different) > 5 else ""
    earliest = min(different, key=_divergence_at)
    # one comparison is of one request
    together = [sample for sample in samples if sample.expected == earliest.expected]
    comparison = compare_answers([earliest.expected, *(sample.answer for sample in together)])
    divergence = comparison.earliest_token or comparison.earliest_logprob
    return CaseResult(guarantee, name, Outcome.BREAKS, detail, comparison, together[divergence.sample - 1].label if divergence else "")


def _divergence_at(sample: Sample) -> tuple[int, int]:
    """The first token to differ and the first logprob; a number beyond both where there is none."""
    beyond = len(sample.expected.tokens) + len(sample.answer.tokens)
    sides = sample.expected, sample.answer
    found = first_difference(*(side.tokens for side in sides)), first_difference(*(side.bits for side in sides))
    token, logprob = (beyond if position is None else position for position in found)
    return token, logprob


def guarantee_results(cases: Sequence[CaseResult]) -> tuple[GuaranteeResult, ...]:
    """Every rung of the contract with its facts."""
    return tuple(GuaranteeResult(guarantee, tuple(case for case in cases if case.guarantee == guarantee.name)) for guarantee in GUARANTEES)


def status_of(cases: Sequence[CaseResult]) -> Status:
    """The exit status: 1 where something breaks, 2 where something that was meant to be tested was not."""
    if any(case.outcome is Outcome.BREAKS for case in cases):
        return Status.DIVERGED
    tested = [case for case in cases if case.outcome is Outcome.HOLDS]
    if not tested or any(case.required and case.outcome is Outcome.NOT_TESTED for case in cases):
        return Status.NO_TEST
    return Status.REPRODUCIBLE


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
