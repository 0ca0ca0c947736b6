"""What a check has found so far: filled as it goes, so that an interrupted one has a report."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..divergence import Answer
from ..harness.metrics import Trace
from ..outcome import Status
from .certificates import Certificate, certificate_results
from .guarantees import GUARANTEES, CaseResult, Outcome, Sample, GuaranteeResult, case_result, status_of, guarantee_results


@dataclass(frozen=True)
class Latency:
    """How long the requests of one load waited."""

    requests: int
    tokens: int
    seconds: float
    first_token: tuple[float, ...]
    """Seconds to the first token of each request."""
    between_tokens: tuple[float, ...]
    """Seconds between two tokens, of all requests."""

    @classmethod
    def of(cls, token_seconds: Sequence[Sequence[float]]) -> "Latency":
        """From the times at which each request's tokens came."""
        return cls(
            requests=len(token_seconds),
            tokens=sum(map(len, token_seconds)),
            seconds=max(times[-1] for times in token_seconds),
            first_token=tuple(times[0] for times in token_seconds),
            between_tokens=tuple(after - before for times in token_seconds for before, after in pairwise(times)),
        )

    @property
    def figures(self) -> dict[str, float]:
        """In milliseconds, and tokens a second."""
        return {
            "first token, median (ms)": 1e3 * statistics.median(self.first_token),
            "between tokens, median (ms)": 1e3 * statistics.median(self.between_tokens),
            "between tokens, 99 of 100 (ms)": 1e3 * _p99(self.between_tokens),
            "tokens a second": self.tokens / self.seconds,
        }


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


@dataclass(frozen=True)
class Shown:
    """One answer to the request that most samples ask for, for the map."""

    label: str
    answer: Answer


@dataclass
class CheckResults:
    """All about one engine setting: one column of the report."""

    label: str
    """Such as VLLM_BATCH_INVARIANT=1."""
    planned: list[tuple[str, str]]
    """(rung, fact) of everything that this check means to test."""
    info: dict[str, Any] = field(default_factory=dict)
    """The engine and the machine: see ``describe_engine``."""
    samples: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)
    gaps: dict[tuple[str, str], str] = field(default_factory=dict)
    """Why a fact could not be tested, although the check meant to."""
    not_applicable: dict[tuple[str, str], str] = field(default_factory=dict)
    """Facts that this kind of check cannot provoke, with the reason."""
    proof: dict[tuple[str, str], str] = field(default_factory=dict)
    """What shows that a fact was provoked."""
    largest: dict[tuple[str, str], int] = field(default_factory=dict)
    """Requests in the largest batch in which a fact that is about company was tried."""
    certificates: list[Certificate] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    latency: Latency | None = None
    shown: list[Shown] = field(default_factory=list)
    failed: str = ""
    """Why the check ended early; empty where it did not."""

    def add(self, guarantee: str, case: str, label: str, expected: Answer, answer: Answer) -> None:
        """Keep an answer that is compared with another one."""
        self.samples.setdefault((guarantee, case), []).append(Sample(label, expected, answer))

    def with_concurrent_requests(self, case: tuple[str, str], largest: int, alone: str, varied: str = "") -> None:
        """Note the largest batch of a try of a fact that is about company; ``alone`` says why there was none.

        Args:
            varied: what the other requests asked for, in words.
        """
        self.largest[case] = max(largest, self.largest.get(case, 0))
        if self.largest[case] < 2:
            self.gaps[case] = alone
        else:
            self.gaps.pop(case, None)
            beside = f" beside requests with {varied}" if varied else ""
            self.proof[case] = f"batches of up to {self.largest[case]} requests{beside}"

    def show(self, label: str, answer: Answer) -> None:
        """Put an answer on the map, the first one being what the others have to equal."""
        self.shown.append(Shown(label, answer))

    @property
    def cases(self) -> tuple[CaseResult, ...]:
        """Everything planned, as far as it is known, and what is out of reach."""
        found = {(case.guarantee, case.name): case for case in certificate_results(self.certificates)}
        for key, samples in self.samples.items():
            case, proof = case_result(*key, samples), self.proof.get(key)
            found[key] = case if proof is None else case.with_proof(proof)
        # a gap outweighs answers that agree, which prove nothing then, and never hides one that differs
        broken = {key for key, case in found.items() if case.outcome is Outcome.BREAKS}
        found |= {key: CaseResult(*key, Outcome.NOT_TESTED, why) for key, why in self.gaps.items() if key not in broken}
        found |= {key: CaseResult(*key, Outcome.NOT_TESTED, why, required=False) for key, why in self.not_applicable.items()}
        for key in self.planned:
            found.setdefault(key, CaseResult(*key, Outcome.NOT_TESTED, self.failed or "not reached"))
        guarantees = [guarantee.name for guarantee in GUARANTEES]
        planned = {key: place for place, key in enumerate(self.planned)}
        order = sorted(found, key=lambda key: (guarantees.index(key[0]), planned.get(key, len(planned))))
        return tuple(found[key] for key in order)

    @property
    def guarantee_results(self) -> tuple[GuaranteeResult, ...]:
        """Every rung of the contract."""
        return guarantee_results(self.cases)

    @property
    def status(self) -> Status:
        """The exit status of a check that ends with this."""
        return status_of(self.cases)
