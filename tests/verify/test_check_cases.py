"""What single answers say about the guarantees of the contract, and with which exit status a check ends."""

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_batch_invariant import aten
from vllm_batch_invariant.ops.linear.autotune import TunedSchedule
from vllm_batch_invariant.verify.answers import Answer, GeneratedToken
from vllm_batch_invariant.verify.check.guarantees import GUARANTEES, Certificate, Sample, case_result
from vllm_batch_invariant.verify.check.operations import _server, compare_rows, describe_entries
from vllm_batch_invariant.verify.check.report import INTERRUPTED, Report, as_json, summary
from vllm_batch_invariant.verify.check.results import CheckResults
from vllm_batch_invariant.verify.harness.metrics import Latency
from vllm_batch_invariant.verify.harness.requests import without_values
from vllm_batch_invariant.verify.outcome import Outcome, Status

CASE, OTHER = ("batch", "with concurrent requests"), ("schedule", "preemption")


def answer(*tokens: int, ulp_at: int | None = None, text: str = "") -> Answer:
    """Tokens with a logprob each, of which one may be a bit larger."""
    logprobs = [-0.5 if place != ulp_at else math.nextafter(-0.5, 0) for place in range(len(tokens))]
    return Answer.of(text, [GeneratedToken(str(token), value) for token, value in zip(tokens, logprobs, strict=True)])


def results(*planned: tuple[str, str]) -> CheckResults:
    return CheckResults("VLLM_BATCH_INVARIANT=1", list(planned))


def certificate(**changes: object) -> Certificate:
    return replace(Certificate("linear", "K=4, N=4", "batch", "somebody", (2,), 16, ""), **changes)


def test_equal_answers_hold_and_one_bit_of_a_logprob_breaks() -> None:
    expected = answer(1, 2, 3)
    assert case_result(*CASE, [Sample("a", expected, answer(1, 2, 3))]).outcome is Outcome.HOLDS
    case = case_result(*CASE, [Sample("a", expected, expected), Sample("b", expected, answer(1, 2, 3, ulp_at=1))])
    assert case.outcome is Outcome.BREAKS
    assert case.difference == "no token; logprobs from token 1 on, b"


def test_the_earliest_token_to_differ_is_named_with_its_sample_and_both_tokens() -> None:
    expected, elsewhere = answer(1, 2, 3, text="abc"), answer(7, 8)
    case = case_result(
        *CASE,
        [
            Sample("late", expected, answer(1, 2, 9, text="abd")),
            Sample("other request", elsewhere, answer(7, 8, ulp_at=0)),
            Sample("early", expected, answer(1, 5, 3, text="axc")),
        ],
    )
    assert case.difference == "token 1, early: 5 instead of 2 ('xc' instead of 'bc'); logprobs from token 1 on"
    assert case.detail.startswith("3 answers of 8 tokens in all, 3 of them with other bits")


def test_a_text_that_differs_alone_is_a_difference() -> None:
    case = case_result(*CASE, [Sample("a", answer(1, text="x"), answer(1, text="y"))])
    assert case.outcome is Outcome.BREAKS
    assert "only the text" in case.difference


def test_a_check_holds_when_everything_planned_was_tested_and_holds() -> None:
    found = results(CASE, OTHER)
    for key in (CASE, OTHER):
        found.add(*key, "a", answer(1), answer(1))
    assert found.status is Status.REPRODUCIBLE
    assert summary(found) == "VLLM_BATCH_INVARIANT=1: holds batch, schedule; could not test run"


def test_one_broken_case_breaks_the_check_whatever_else_is_not_tested() -> None:
    found = results(CASE, OTHER)
    found.add(*CASE, "a", answer(1, 2), answer(1, 3))
    assert found.status is Status.DIVERGED
    assert "breaks batch (from token 1 on)" in summary(found)


def test_a_case_that_was_planned_and_not_provoked_is_no_test() -> None:
    found = results(CASE, OTHER)
    found.add(*CASE, "a", answer(1), answer(1))
    assert found.status is Status.NO_TEST
    assert {case.detail for case in found.cases if case.outcome is Outcome.NOT_TESTED} == {"not reached"}
    found.gaps[OTHER] = "the engine did not preempt"
    assert found.status is Status.NO_TEST


def test_a_gap_outweighs_answers_that_prove_nothing() -> None:
    found = results(CASE)
    found.add(*CASE, "a", answer(1), answer(1))
    found.gaps[CASE] = "no two requests ran at a time"
    assert [case.detail for case in found.cases] == ["no two requests ran at a time"]
    assert found.status is Status.NO_TEST
    found.add(*CASE, "b", answer(1), answer(2))
    assert found.status is Status.DIVERGED


def test_a_case_with_concurrent_requests_holds_only_once_there_were_some() -> None:
    found = results(CASE)
    found.add(*CASE, "a", answer(1), answer(1))
    outcomes = []
    for largest in (1, 3, 1):
        found.note_batch(CASE, largest, alone="it ran alone")
        outcomes.append((found.status, found.cases[0].detail.rpartition("; ")[2]))
    held = Status.REPRODUCIBLE, "batches of up to 3 requests"
    assert outcomes == [(Status.NO_TEST, "it ran alone"), held, held]


def test_what_is_not_applicable_is_said_and_decides_nothing() -> None:
    found = results(CASE, OTHER)
    found.add(*CASE, "a", answer(1), answer(1))
    found.not_applicable[OTHER] = "a client does not choose the KV cache"
    assert found.status is Status.REPRODUCIBLE
    assert summary(found).endswith("holds batch; could not test run, schedule")
    found.not_applicable["batch", "operations"] = "a client does not reach the device"
    assert "holds batch (1 of 2 cases tested)" in summary(found)
    by_guarantee = {of_guarantee.guarantee.name: of_guarantee for of_guarantee in found.guarantees}
    assert by_guarantee["schedule"].outcome is Outcome.NOT_TESTED
    assert by_guarantee["hardware"].outcome is Outcome.NOT_TESTED


def test_nothing_tested_is_no_test() -> None:
    assert results().status is Status.NO_TEST


def test_certificates_break_a_guarantee_and_one_that_could_not_be_made_is_no_test() -> None:
    found = results()
    found.certificates = [certificate(), certificate(guarantee="schedule", operation="attention")]
    assert found.status is Status.REPRODUCIBLE
    found.certificates.append(certificate(operation="softmax", untested="out of memory"))
    assert found.status is Status.NO_TEST
    found.certificates[-1] = certificate(operation="softmax", untested="a kernel of vLLM's", not_applicable=True)
    assert found.status is Status.REPRODUCIBLE
    found.certificates.append(certificate(difference="in a batch of 2 rows: ..."))
    assert found.status is Status.DIVERGED


def test_an_interrupted_check_has_a_status_of_its_own_and_says_so_in_its_json() -> None:
    found = results(CASE, OTHER)
    found.add(*CASE, "a", answer(1), answer(1))
    found.failed = "interrupted"
    report = Report("model", "quick", (), "now", 1.0, (found,), "It was interrupted.")
    data = as_json(report)
    assert report.status == data["status"] == INTERRUPTED
    assert data["partial"] == "It was interrupted."
    cases = {case["name"]: case for guarantee in data["runs"][0]["guarantees"] for case in guarantee["cases"]}
    assert cases["preemption"]["detail"] == "interrupted"
    assert cases["with concurrent requests"]["outcome"] == "holds"


def test_the_guarantees_are_those_of_the_contract() -> None:
    contract = (Path(__file__).parents[2] / "docs" / "contract.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (.+?) \| ", contract, re.MULTILINE)
    assert [(guarantee.name, guarantee.promise) for guarantee in GUARANTEES] == rows[1 : 1 + len(GUARANTEES)]


def test_rows_have_the_same_bits_in_any_batch_where_they_are_computed_one_by_one() -> None:
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))

    def one_by_one(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([row @ weight for row in x.split(1)])

    compared, difference = compare_rows(one_by_one, 64, weight, (2, 7, 40))
    assert compared == (2 + 7 + 16) * 32
    assert difference == ""


@pytest.mark.parametrize("size", [7, 40])
def test_an_operation_whose_sum_follows_the_batch_is_found_out(size: int) -> None:
    def follows_the_batch(x: torch.Tensor) -> torch.Tensor:
        split = 16 if len(x) > 6 else 64
        return sum(part.sum(-1) for part in x.split(split, dim=-1))

    compared, difference = compare_rows(follows_the_batch, 64, torch.empty(1), (2, size))
    assert compared > 0
    assert difference.startswith(f"in a batch of {size} rows: ")


def test_a_row_that_depends_on_its_place_is_found_out() -> None:
    def by_place(x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        out[-1] += 2**-20 if len(x) > 1 else 0
        return out

    assert compare_rows(by_place, 8, torch.empty(1), (9,))[1].startswith("in a batch of 9 rows: ")


def test_the_certificate_of_a_gpus_products_is_one_line() -> None:
    entries = {8: TunedSchedule(None, (1, 8), (), {}), 16: TunedSchedule(None, (9, 16), ("x",), {})}
    said = describe_entries(entries)
    assert said.startswith("compared at 4 values of M up to 16 against Triton; cuBLASLt serves 0 of 2")
    assert said.endswith("1 of its algorithms refused")
    assert describe_entries({}).startswith("no certificate")


def test_latencies_are_of_the_times_at_which_tokens_came() -> None:
    latency = Latency.of([[0.5, 0.6, 0.8], [1.0, 1.1]])
    assert latency.first_token == (0.5, 1.0)
    assert latency.between_tokens == pytest.approx((0.1, 0.2, 0.1))
    assert latency.figures["tokens a second"] == pytest.approx(5 / 1.1)


def test_refusals_of_one_kind_are_counted_together() -> None:
    refusals = [
        f"allowed_token_ids contains out-of-vocab token id! (parameter=allowed_token_ids, value=[{first}, 29])"
        for first in (1, 2)
    ]
    [reason] = {without_values(one) for one in refusals}
    assert reason == "allowed_token_ids contains out-of-vocab token id! (allowed_token_ids)"
    assert without_values("list index out of range") == "list index out of range"


@pytest.mark.parametrize(
    ("on", "cuda", "names_the_mode"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_a_product_on_a_gpu_is_named_after_the_mode_that_replaces_it(
    on: bool, cuda: bool, names_the_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aten, "is_batch_invariant_mode_enabled", lambda: on)
    weight = SimpleNamespace(is_cuda=cuda, dim=lambda: 2)
    served_by = _server(SimpleNamespace(weight=weight, quant_method=object()))
    assert served_by.endswith("builtins.object")
    assert ("vllm_batch_invariant" in served_by) == names_the_mode
