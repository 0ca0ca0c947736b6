"""The results of a check so far, filled while it runs, so that an interrupted check has a report."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..answers import Answer
from ..harness.metrics import Latency, Trace
from ..outcome import Outcome, Status
from .guarantees import (
    GUARANTEES,
    OF_OPERATIONS,
    CaseResult,
    Certificate,
    CheckCase,
    GuaranteeResult,
    Sample,
    case_result,
    certificate_results,
    guarantee_results,
    status_of,
)

OnProgress = Callable[[str], None]
"""Is called with what happens now."""


@dataclass(frozen=True)
class Shown:
    """An answer to the target request, for the map of samples."""

    label: str
    answer: Answer


@dataclass
class CheckResults:
    """The results of one engine setting: one column of the report."""

    label: str
    """Such as VLLM_BATCH_INVARIANT=1."""
    planned: list[CheckCase]
    """The required cases."""
    info: dict[str, Any] = field(default_factory=dict)
    """The engine and the machine, see :func:`..harness.worker_main.describe_engine`."""
    samples: dict[CheckCase, list[Sample]] = field(default_factory=dict)
    gaps: dict[CheckCase, str] = field(default_factory=dict)
    """Why a required case was not tested."""
    not_applicable: dict[CheckCase, str] = field(default_factory=dict)
    """Cases that this kind of check cannot test, with the reason."""
    proof: dict[CheckCase, str] = field(default_factory=dict)
    """Proof of coverage: what shows that a case was provoked."""
    largest: dict[CheckCase, int] = field(default_factory=dict)
    """Requests in the largest batch, of the cases with concurrent requests."""
    certificates: list[Certificate] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    latency: Latency | None = None
    shown: list[Shown] = field(default_factory=list)
    failed: str = ""
    """Why the check ended early; empty if it did not."""

    def add(self, guarantee: str, case: str, label: str, expected: Answer, answer: Answer) -> None:
        """Keep an answer of a case, and the answer that it has to equal."""
        self.samples.setdefault((guarantee, case), []).append(Sample(label, expected, answer))

    def note_batch(self, case: CheckCase, largest: int, alone: str, varied: str = "") -> None:
        """Note the largest batch in which a case with concurrent requests ran.

        Args:
            alone: why there was no batch of two, if there was none.
            varied: sampling parameters of the concurrent requests, in words.
        """
        self.largest[case] = max(largest, self.largest.get(case, 0))
        if self.largest[case] < 2:
            self.gaps[case] = alone
        else:
            self.gaps.pop(case, None)
            others = f", concurrent requests with {varied}" if varied else ""
            self.proof[case] = f"batches of up to {self.largest[case]} requests{others}"

    def show(self, label: str, answer: Answer) -> None:
        """Put an answer on the map; the others have to equal the first one."""
        self.shown.append(Shown(label, answer))

    @property
    def reached(self) -> int:
        """How many of the planned cases were begun, or will not be."""
        done = {*self.samples, *self.gaps, *self.not_applicable}
        made = {certificate.guarantee for certificate in self.certificates}
        done |= {case for case in OF_OPERATIONS.items() if case[0] in made}
        return sum(case in done for case in self.planned)

    @property
    def cases(self) -> tuple[CaseResult, ...]:
        """The results of all planned cases and of those that are not applicable."""
        found = {(case.guarantee, case.name): case for case in certificate_results(self.certificates)}
        for key, samples in self.samples.items():
            case, proof = case_result(*key, samples), self.proof.get(key)
            found[key] = case if proof is None else case.with_proof(proof)
        # a gap outweighs equal answers, which prove nothing then, and never hides a difference
        broken = {key for key, case in found.items() if case.outcome is Outcome.BREAKS}
        found |= {key: CaseResult(*key, Outcome.NOT_TESTED, why) for key, why in self.gaps.items() if key not in broken}
        for key, why in self.not_applicable.items():
            found[key] = CaseResult(*key, Outcome.NOT_TESTED, why, required=False)
        for key in self.planned:
            found.setdefault(key, CaseResult(*key, Outcome.NOT_TESTED, self.failed or "not reached"))
        guarantees = [guarantee.name for guarantee in GUARANTEES]
        planned = {key: place for place, key in enumerate(self.planned)}
        order = sorted(found, key=lambda key: (guarantees.index(key[0]), planned.get(key, len(planned))))
        return tuple(found[key] for key in order)

    @property
    def guarantees(self) -> tuple[GuaranteeResult, ...]:
        """The results of every guarantee of the contract."""
        return guarantee_results(self.cases)

    @property
    def status(self) -> Status:
        """The exit status of a check that ends with these results."""
        return status_of(self.cases)
