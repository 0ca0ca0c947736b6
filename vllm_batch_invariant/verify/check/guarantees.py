"""The guarantees of the contract (docs/contract.md), the cases that a check runs for each, and their results."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..answers import Answer, AnswerComparison, compare_answers, first_difference
from ..outcome import Outcome, Status
from ..printing import count
from .presets import Preset

CheckCase = tuple[str, str]
"""(name of the guarantee, what is tried): the key of everything that a check finds."""


@dataclass(frozen=True)
class Guarantee:
    """A promise of the contract: the same bits ..."""

    name: str
    promise: str
    not_applicable: str = ""
    """Why a check without a case of it cannot test it; empty if every check can."""


GUARANTEES = (
    Guarantee("run", "when the same batch runs again"),
    Guarantee(
        "batch",
        "whatever other requests run concurrently, in any number and order, with any parameters, at any index of the "
        "batch",
    ),
    Guarantee(
        "schedule",
        "whether a token's state was computed by prefill, by a chunk of any size or by decode, after preemption, from "
        "a warm or a cold prefix cache, before or after a restart, a sleep or an update of weights",
    ),
    Guarantee("parallel", "with another number of tensor-parallel workers", "a check has one engine, of one size"),
    Guarantee(
        "hardware",
        "on another kind of machine, or with another number of tensor-parallel workers or pipeline stages",
        "a check has one machine, and only exact arithmetic has known answers",
    ),
)

OPERATIONS = ("linear", "experts", "rms_norm", "softmax", "log_softmax", "sum", "mean", "attention")
KNOWN = "known answers"
"""What exact arithmetic has beside certificates of operations."""
OF_OPERATIONS: dict[str, str] = {
    "batch": "operations alone and in batches",
    "schedule": "attention in prefill, chunks and decode",
}
"""The case that certificates of operations test, by guarantee."""
KNOWN_ANSWERS: CheckCase = ("hardware", "known answers of exact arithmetic")
AGAIN: CheckCase = ("run", "the same request again")
SAME_BATCH: CheckCase = ("run", "the same batch again")
CONCURRENT: CheckCase = ("batch", "with concurrent requests")
PLACE: CheckCase = ("batch", "at any place in the batch")
CONCURRENT_LENGTHS: CheckCase = ("batch", "with a concurrent prompt of any length")
SEEDED: CheckCase = ("batch", "seeded sampling with concurrent requests")
WANTED: CheckCase = ("batch", "every task and parameter of pooling with concurrent requests")
PROCESSED: CheckCase = ("batch", "what a processor makes of an item beside others")
ENCODED: CheckCase = ("batch", "images that are encoded in one call with others")
ADAPTERS: CheckCase = ("batch", "the same prompt with every adapter and with none")
FORMS: CheckCase = ("batch", "chats, tools, responses and streams with concurrent requests")
PROMPT_LOGPROBS: CheckCase = ("batch", "prompt logprobs with concurrent requests")
WARM: CheckCase = ("schedule", "from a warm prefix cache")
KEPT: CheckCase = ("schedule", "images that were encoded for another request")
APART: CheckCase = ("schedule", "a prompt that was cached with another adapter")
CHUNKS: CheckCase = ("schedule", "prefill in small chunks")
PREEMPTED: CheckCase = ("schedule", "preemption")
RESTARTED: CheckCase = ("schedule", "after a restart with other limits")
OTHER_CHUNKS: CheckCase = ("schedule", "other chunks, other pages, async scheduling")


def cases_of_engines(preset: Preset) -> list[CheckCase]:
    """The cases that a check of engines has to test."""
    cases = [*OF_OPERATIONS.items(), AGAIN, SAME_BATCH, CONCURRENT, PLACE, CONCURRENT_LENGTHS, SEEDED, PROMPT_LOGPROBS]
    cases += [WARM, CHUNKS, PREEMPTED, RESTARTED]
    return cases + [OTHER_CHUNKS] * (preset.engines > 1)


def cases_of_images(preset: Preset) -> list[CheckCase]:
    """The same of engines of a model that sees images."""
    more = {CONCURRENT: [CONCURRENT, PROCESSED, ENCODED], WARM: [WARM, KEPT]}
    return [other for case in cases_of_engines(preset) for other in more.get(case, [case])]


def cases_of_adapters(preset: Preset) -> list[CheckCase]:
    """The same of engines whose requests have LoRA adapters."""
    more = {CONCURRENT: [CONCURRENT, ADAPTERS], WARM: [WARM, APART]}
    return [other for case in cases_of_engines(preset) for other in more.get(case, [case])]


def cases_of_pooling(preset: Preset) -> list[CheckCase]:
    """The same of engines of a model that pools."""
    left = {SEEDED: [], PROMPT_LOGPROBS: [WANTED]}
    return [other for case in cases_of_engines(preset) for other in left.get(case, [case])]


def cases_of_a_server() -> list[CheckCase]:
    """The cases that need only HTTP access."""
    return [AGAIN, CONCURRENT, CONCURRENT_LENGTHS, SEEDED, FORMS, WARM]


@dataclass(frozen=True)
class Sample:
    """An answer, and the answer that it has to equal."""

    label: str
    """How it was requested, such as "with 17 others"."""
    expected: Answer
    answer: Answer


@dataclass(frozen=True)
class CaseResult:
    """The result of one check case.

    Attributes:
        guarantee: its name.
        name: what was tried, such as "with concurrent requests".
        outcome: whether it holds.
        detail: what was compared, or why nothing was.
        comparison: of the answers to one request; sample 0 is the answer that the others have to equal.
        first: label of the sample that diverges first; empty if none does.
        required: whether the check had to test it. A required case that was not tested makes the check no test.
    """

    guarantee: str
    name: str
    outcome: Outcome
    detail: str
    comparison: AnswerComparison | None = None
    first: str = ""
    required: bool = True

    def with_proof(self, proof: str) -> "CaseResult":
        """The same result with the proof of coverage: what shows that the case was provoked."""
        return replace(self, detail=f"{self.detail}; {proof}")

    @property
    def difference(self) -> str:
        """The first divergence in words; empty if there is none."""
        found = self.comparison
        if found is None or found.identical:
            return ""
        token, logprob = found.earliest_token, found.earliest_logprob
        if logprob is not None and found.unit != "token":
            return f"{found.unit} {logprob.position}, {self.first}: {logprob}"
        if logprob is None:
            return f"no token and no logprob, only the text, {self.first}"
        if token is None:
            return f"no token; logprobs from token {logprob.position} on, {self.first}"
        return f"token {token.position}, {self.first}: {token}; logprobs from token {logprob.position} on"


@dataclass(frozen=True)
class GuaranteeResult:
    """A guarantee with the results of its cases."""

    guarantee: Guarantee
    cases: tuple[CaseResult, ...]

    @property
    def outcome(self) -> Outcome:
        """Breaks if one case breaks; not tested if no case was tested."""
        outcomes = {case.outcome for case in self.cases}
        return next((outcome for outcome in (Outcome.BREAKS, Outcome.HOLDS) if outcome in outcomes), Outcome.NOT_TESTED)

    @property
    def untested(self) -> tuple[str, ...]:
        """Names of the cases that were not tested."""
        return tuple(case.name for case in self.cases if case.outcome is Outcome.NOT_TESTED)

    @property
    def not_applicable(self) -> str:
        """Why no check can test it; empty if this one has cases of it."""
        return "" if self.cases else self.guarantee.not_applicable

    @property
    def detail(self) -> str:
        """The cases in one line."""
        if self.not_applicable:
            return self.not_applicable
        tested = [case for case in self.cases if case.outcome is not Outcome.NOT_TESTED]
        broken = [case.name for case in tested if case.outcome is Outcome.BREAKS]
        parts = [", ".join(broken)] if broken else []
        parts += [f"{len(tested)} of {len(self.cases)} cases tested"] if self.cases else ["nothing tested"]
        parts += [f"not tested: {', '.join(self.untested)}"] if self.untested else []
        return "; ".join(parts)


def case_result(guarantee: str, name: str, samples: Sequence[Sample]) -> CaseResult:
    """The result of a case from its samples, at least one."""
    different = [sample for sample in samples if sample.answer != sample.expected]
    positions = sum(len(sample.answer.bits) for sample in samples)
    units = sorted({sample.answer.unit for sample in samples})
    every = "token and logprob" if units == ["token"] else " and ".join(units)
    detail = f"{count(len(samples), 'answer')} of {positions} {' and '.join(f'{unit}s' for unit in units)} in all, "
    if not different:
        return CaseResult(guarantee, name, Outcome.HOLDS, f"{detail}every {every} has the same bits")
    detail += f"{len(different)} of them with other bits: {', '.join(sample.label for sample in different[:5])}"
    detail += f" and {len(different) - 5} more" if len(different) > 5 else ""
    earliest = min(different, key=_divergence_at)
    # a comparison is of the answers to one request
    together = [sample for sample in samples if sample.expected == earliest.expected]
    comparison = compare_answers([earliest.expected, *(sample.answer for sample in together)])
    divergence = comparison.earliest_token or comparison.earliest_logprob
    first = together[divergence.sample - 1].label if divergence else ""
    return CaseResult(guarantee, name, Outcome.BREAKS, detail, comparison, first)


def _divergence_at(sample: Sample) -> tuple[int, int]:
    """Positions of the first token and of the first logprob that differ; a number beyond both if none does."""
    beyond = len(sample.expected.tokens) + len(sample.answer.tokens)
    sides = sample.expected, sample.answer
    found = first_difference(*(side.tokens for side in sides)), first_difference(*(side.bits for side in sides))
    token, logprob = (beyond if position is None else position for position in found)
    return token, logprob


def guarantee_results(cases: Sequence[CaseResult]) -> tuple[GuaranteeResult, ...]:
    """Every guarantee of the contract with its cases."""
    return tuple(
        GuaranteeResult(guarantee, tuple(case for case in cases if case.guarantee == guarantee.name))
        for guarantee in GUARANTEES
    )


def status_of(cases: Sequence[CaseResult]) -> Status:
    """The exit status: 1 if a case breaks, 2 if a required case was not tested."""
    if any(case.outcome is Outcome.BREAKS for case in cases):
        return Status.DIVERGED
    tested = [case for case in cases if case.outcome is Outcome.HOLDS]
    if not tested or any(case.required and case.outcome is Outcome.NOT_TESTED for case in cases):
        return Status.NO_TEST
    return Status.REPRODUCIBLE


@dataclass(frozen=True)
class Certificate:
    """The comparison of one operation on one shape."""

    operation: str
    shape: str
    guarantee: str
    """The string "batch", or "schedule" if prefill is compared with decode."""
    served_by: str
    rows: tuple[int, ...]
    """Sizes of the batches."""
    compared: int
    """Elements."""
    difference: str
    """The first difference in words; empty if all bits are the same."""
    untested: str = ""
    """Why nothing was compared; empty if it was."""
    not_applicable: bool = False
    """Whether no check can compare it."""
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether it was tested and no bit differs."""
        return not self.untested and not self.difference


def certificate_results(certificates: Sequence[Certificate]) -> list[CaseResult]:
    """The results of certificates: one a guarantee, and one for each certificate that could not be made."""
    found = []
    for guarantee, name in (*OF_OPERATIONS.items(), KNOWN_ANSWERS):
        own = [certificate for certificate in certificates if certificate.guarantee == guarantee]
        tested = [certificate for certificate in own if not certificate.untested]
        excluded = [certificate for certificate in own if certificate.not_applicable]
        different = [certificate for certificate in tested if certificate.difference]
        left_out = "".join(f"; not {certificate.operation}: {certificate.untested}" for certificate in excluded)
        if different:
            first = different[0]
            detail = f"{len(different)} of {len(tested)} differ; {first.operation} ({first.shape}) {first.difference}"
            found.append(CaseResult(guarantee, name, Outcome.BREAKS, detail + left_out))
        elif tested:
            compared = sum(certificate.compared for certificate in tested)
            detail = f"{count(len(tested), 'shape')}, {compared} elements have the same bits"
            found.append(CaseResult(guarantee, name, Outcome.HOLDS, detail + left_out))
        elif excluded:
            found.append(CaseResult(guarantee, name, Outcome.NOT_TESTED, excluded[0].untested, required=False))
        found += [
            CaseResult(guarantee, f"{one.operation}, {one.shape}, alone", Outcome.NOT_TESTED, one.untested)
            for one in own
            if one.untested and not one.not_applicable
        ]
    return found
