"""What the site shows of recordings is what its scripts write, and what they record is true on this machine."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from scripts.see import dot, samples, schedules
from scripts.see.data import DATA
from vllm_batch_invariant.ops.linear import linear
from vllm_batch_invariant.verify.answers import Answer, GeneratedToken, RequestSpec
from vllm_batch_invariant.verify.harness.load import Run
from vllm_batch_invariant.verify.harness.metrics import BatchLog, Reading
from vllm_batch_invariant.verify.reproduce.report import ReproduceResult, as_json


def test_the_kept_tiles_are_those_that_the_cost_model_chooses() -> None:
    assert json.loads((DATA / "schedules.json").read_text()) == json.loads(json.dumps(schedules.schedules())), (
        "run: python -m scripts.see.schedules"
    )


def test_the_kept_dot_product_has_one_result_in_the_mode_and_says_where_it_was_recorded() -> None:
    kept = json.loads((DATA / "dot.json").read_text())
    assert kept["where"].keys() == {"machine", "torch", "vllm-batch-invariant", "date"}
    assert len(kept["ours"]) == 1
    assert len(kept["stock"]) > 1
    for order in (*kept["stock"], *kept["ours"]):
        assert order["running"][-1] == order["result"]
        assert len(order["meets"]) == kept["k"] - 1
        assert set(order["meets"]) <= set(range(2, kept["k"] + 1))


def test_a_running_sum_ends_with_the_result_and_zeros_change_nothing() -> None:
    x, weight = dot.operands()
    with torch.no_grad():
        assert dot.running(F.linear, 1, 0)[-1] == float(F.linear(x[:1], weight)[0, 0])
        assert dot.running(linear, 5, 0) == dot.running(linear, 40, 0)


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_an_order_of_additions_is_read_from_sums(lanes: int) -> None:
    """Of partial sums that walk the terms side by side, and are added at the end."""

    def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        terms = (x[0] * weight[0]).numpy().reshape(-1, lanes)
        sums = np.add.accumulate(terms)[-1]
        return torch.tensor(np.add.accumulate(sums)[-1]).expand(1, 1)

    each = dot.K // lanes
    expected = [k // lanes + 1 if k % lanes == 0 else (k % lanes + 1) * each for k in range(1, dot.K)]
    assert dot.meets(compute, 1, 0) == expected


def answer(*logprobs: float) -> Answer:
    return Answer.of("text", [GeneratedToken(str(place), value) for place, value in enumerate(logprobs)])


def test_another_candidate_of_the_same_logprob_is_no_other_number() -> None:
    reference = {"tokens": ["1", "2"], "logprobs": [-1.0, -2.0], "candidates": []}
    listed = {"position": 0, "expected": [["1", -1.0], ["7", -3.0]], "got": [["1", -1.0], ["8", -3.0]]}
    assert samples.first_number(reference, reference | {"candidates": [listed]}) is None
    assert samples.first_number(reference, reference | {"candidates": [listed], "logprobs": [-1.0, -2.5]}) == 1
    other = listed | {"got": [["1", -1.0], ["8", -3.5]]}
    assert samples.first_number(reference, reference | {"candidates": [other], "logprobs": [-1.0, -2.5]}) == 0


def test_a_recorded_run_becomes_the_data_of_its_map() -> None:
    log = BatchLog([Reading(1, {}), Reading(5, {}), Reading(2, {})])
    answers = (answer(-0.5, -1.0), answer(-0.5, -1.0), answer(-0.5, -1.5), answer(-0.5, -1.0))
    info = {"mode": "none", "versions": {"vllm": "0.32.0"}}
    result = ReproduceResult.of("plain", Run(answers, 2.0, 3, 1, 0), log, info)
    run = as_json("model", (), RequestSpec(), [result]) | {"written_by": "0.1.0", "began": "2026-01-02T03:04:05"}
    found = samples.of_runs([json.loads(json.dumps(run))], "a machine", "2.0")
    [shown] = found["results"]
    assert shown["runs"] == [[0, 2], [1, 1], [0, 1]]
    assert shown["batch"] == [1, 5]
    assert [one["first_logprob"] for one in shown["different"]] == [None, 1]
    assert [one["first_number"] for one in shown["different"]] == [None, 1]
    assert found["where"]["date"] == "2026-01-02"
    with pytest.raises(ValueError, match="differ in request"):
        samples.of_runs([run, run | {"request": {}}], "a machine", "2.0")
