"""What is known of the bits of one operation on one shape."""

from collections.abc import Sequence
from dataclasses import dataclass

from .guarantees import CaseResult, Outcome

OPERATIONS = ("linear", "rms_norm", "softmax", "log_softmax", "sum", "mean", "attention")
CASES = {"batch": "operations alone and in batches", "schedule": "attention in prefill, chunks and decode"}
"""The fact of each rung that certificates make."""


@dataclass(frozen=True)
class Certificate:
    """One operation on one shape."""

    operation: str
    shape: str
    guarantee: str
    """Of the contract: "batch", or "schedule" where prefill is compared with decode."""
    served_by: str
    rows: tuple[int, ...]
    """Sizes of the batches."""
    compared: int
    """Elements."""
    difference: str
    """The first one in words; empty where all bits are the same."""
    untested: str = ""
    """Why nothing was compared; empty where it was."""
    not_applicable: bool = False
    """Whether no check could compare it."""
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether it was tested and no bit differs."""
        return not self.untested and not self.difference


def certificate_results(certificates: Sequence[Certificate]) -> list[CaseResult]:
    """What the certificates say of the rungs: one fact a rung, and one for each that could not be made."""
    found = []
    for guarantee, name in CASES.items():
        own = [certificate for certificate in certificates if certificate.guarantee == guarantee]
        tested = [certificate for certificate in own if not certificate.untested]
        beyond = [certificate for certificate in own if certificate.not_applicable]
        different = [certificate for certificate in tested if certificate.difference]
        left_out = "".join(f"; not {certificate.operation}: {certificate.untested}" for certificate in beyond)
        if different:
            first = different[0]
            detail = f"{len(different)} of {len(tested)} differ; {first.operation} ({first.shape}) {first.difference}"
            found.append(CaseResult(guarantee, name, Outcome.BREAKS, detail + left_out))
        elif tested:
            compared = sum(certificate.compared for certificate in tested)
            detail = f"{len(tested)} {'shapes' if len(tested) > 1 else 'shape'}, {compared} elements have the same bits"
            found.append(CaseResult(guarantee, name, Outcome.HOLDS, detail + left_out))
        elif beyond:
            found.append(CaseResult(guarantee, name, Outcome.NOT_TESTED, beyond[0].untested, required=False))
        found += [
            CaseResult(guarantee, f"{certificate.operation}, {certificate.shape}, alone", Outcome.NOT_TESTED, certificate.untested)
            for certificate in own
            if certificate.untested and not certificate.not_applicable
        ]
    return found
