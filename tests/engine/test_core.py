"""The core of the engine tests, small enough to run on every version of vLLM, which ``make test-versions`` does. In
other runs ``test_invariance.py`` establishes the same, and more, with the version that is installed.
"""

from pathlib import Path

import pytest
import torch

from tests.engine import listed
from tests.engine.engines import OF_DEVICE, Result, certified, run, tokens
from tests.engine.plans import CONCURRENT, again
from vllm_batch_invariant.integration.reviews import patch_points, versions
from vllm_batch_invariant.verify.check.engine import EngineRun
from vllm_batch_invariant.verify.outcome import Outcome

pytestmark = [pytest.mark.engine, pytest.mark.core]

ON_GPU = torch.cuda.is_available()
COUNTS = (1, 17, 64)
"""Concurrent requests of the target request."""
PROMPTS = (10, 700)
"""Lengths of a concurrent prompt, of which the longest is cut into chunks."""
SAMPLED = ("plain", "top_p")
STEPS = (
    *("alone 45", *(f"with {count}" for count in COUNTS)),
    *("alone 300", *(f"with a prompt of {length}" for length in PROMPTS)),
    *("cold", "warm", "half warm", "half warm, cold"),
    *("prompt logprobs, cold", "prompt logprobs, warm"),
    *(f"{kind} {how}" for kind in SAMPLED for how in ("alone", "with others")),
)


def engine_of(checkpoint: Path, **settings: object) -> dict[str, object]:
    small = {"max_model_len": 1024, "max_num_seqs": 160, "max_num_batched_tokens": 512, "skip_tokenizer_init": True}
    return {"model": str(checkpoint), **small, **OF_DEVICE, **settings}


@pytest.fixture(scope="module")
def kept(checkpoint: Path) -> Result:
    """An engine with the mode on."""

    def check(running) -> EngineRun:
        checked = certified(running)
        checked.again()
        checked.with_concurrent_requests()
        return checked

    lists = ([tokens(45, 21)], [tokens(length, 22) for length in range(1, 9)])
    return run(engine_of(checkpoint, max_logprobs=-1), again(*STEPS), "1", listed_for=lists, afterwards=check)


def test_a_request_has_the_same_bits_alone_and_with_concurrent_requests(kept: Result) -> None:
    alone = kept.completions("alone 45")
    assert [count for count in COUNTS if kept.completions(f"with {count}") != alone] == []


def test_a_request_has_the_same_bits_beside_a_prompt_that_is_cut_into_chunks(kept: Result) -> None:
    alone = kept.completions("alone 300")
    assert [length for length in PROMPTS if kept.completions(f"with a prompt of {length}") != alone] == []


def test_a_warm_prefix_cache_gives_the_bits_of_a_cold_one(kept: Result) -> None:
    assert kept.steps["cold"][0]["cached"] == 0
    assert kept.steps["warm"][0]["cached"] >= 512
    assert kept.completions("warm") == kept.completions("cold")
    assert 0 < kept.steps["half warm"][0]["cached"] < 512
    assert kept.completions("half warm") == kept.completions("half warm, cold")


def test_prompt_logprobs_have_the_same_bits_cold_and_warm_and_with_others(kept: Result) -> None:
    cold, warm = (kept.steps[f"prompt logprobs, {state}"][0] for state in ("cold", "warm"))
    assert len(cold["prompt_logprobs"]) == 700
    assert warm["prompt_logprobs"] == cold["prompt_logprobs"]


@pytest.mark.parametrize("others", listed.CONCURRENT)
def test_listed_candidates_do_not_follow_what_others_ask_for(kept: Result, others: str) -> None:
    assert kept.listed is not None
    assert kept.listed[others] == kept.listed["alone"]


@pytest.mark.parametrize("kind", SAMPLED)
def test_seeded_sampling_gives_the_same_tokens_whatever_others_ask_for(kept: Result, kind: str) -> None:
    assert kept.completions(f"{kind} with others", 9) == kept.completions(f"{kind} alone")


def test_a_check_of_the_mode_breaks_nowhere(kept: Result) -> None:
    found = kept.afterwards.results
    assert [case for case in found.cases if case.outcome is Outcome.BREAKS] == []
    assert any(case.outcome is Outcome.HOLDS for case in found.cases)
    assert found.certificates
    assert all("vllm_batch_invariant" in certificate.served_by for certificate in found.certificates)
    assert kept.log.count("Batch-invariant mode is on") == 1


def test_a_vllm_that_was_not_tested_has_one_warning(kept: Result) -> None:
    device = "cuda" if ON_GPU else "cpu"
    untested = versions.objection(patch_points.installed_version(), device) != ""
    assert kept.log.count("was not tested with batch-invariant mode") == untested


@pytest.mark.skipif(ON_GPU, reason="on a GPU this model is too small for plain vLLM to vary")
def test_plain_vllm_fails_the_same_comparison(checkpoint: Path) -> None:
    counts = CONCURRENT[:12]
    steps = again("alone 45", *(f"with {count}" for count in counts))
    stock = run(engine_of(checkpoint, enforce_eager=True), steps, "0")
    assert any(stock.completions(f"with {count}") != stock.completions("alone 45") for count in counts)
