"""A real engine gives a request the same tokens and logprobs with any others, under any schedule, after a restart."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import listed
from tests.engine.bisected import OTHER_COUNTS
from tests.engine.engines import CHECK, OF_DEVICE, Result, certified, check_of, run, tokens
from tests.engine.plans import (
    CONCURRENT,
    CONCURRENT_LENGTHS,
    FEWER_CONCURRENT,
    OTHER_SAMPLING,
    RESTARTED,
    SAMPLES,
    UNSEEDED,
    again,
    plan,
    samples_of,
)
from vllm_batch_invariant.envs import ATTENTION, SEED
from vllm_batch_invariant.seeds import sample_seed
from vllm_batch_invariant.verify.bisect.recording import MODULE_OUTPUT
from vllm_batch_invariant.verify.check.engine import EngineRun
from vllm_batch_invariant.verify.check.guarantees import CONCURRENT as CONCURRENT_CASE
from vllm_batch_invariant.verify.check.guarantees import OPERATIONS
from vllm_batch_invariant.verify.fuzz.finding import Row
from vllm_batch_invariant.verify.fuzz.options import Place
from vllm_batch_invariant.verify.fuzz.schedule import draw_schedule, draw_settings, draw_targets
from vllm_batch_invariant.verify.fuzz.trial import Trial
from vllm_batch_invariant.verify.harness.requests import SAMPLING
from vllm_batch_invariant.verify.harness.worker import Engine
from vllm_batch_invariant.verify.outcome import Outcome, Status
from vllm_batch_invariant.verify.receipt import Receipt

pytestmark = pytest.mark.engine

UNSEEDED_SAMPLES = [{"name": "unseeded samples"}, {"name": "unseeded samples again", "reset_prefix_cache": True}]
ON_GPU = torch.cuda.is_available()
PAGE = 16 if ON_GPU else 128
"""Keys in a page of the KV cache, as vLLM chooses it."""


STOCK = {"enforce_eager": True, "dtype": "float32" if torch.cpu._is_avx512_bf16_supported() else "bfloat16"}
"""Plain vLLM's engine, in a dtype in which it was seen to vary: on a Xeon without instructions for bf16 in bf16, on a
Zen 4, which has them, in fp32 alone.
"""
where_batches_move_plain_vllm = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(),
    reason="on a Zen 3, which has no AVX-512, these requests had the same bits in plain vLLM, in bf16 and in fp32",
)
"""A negative control that needs plain vLLM to vary with the number of requests. The fuzzer finds it to vary there, too.
"""


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Callable[..., Result]:
    def start(
        steps: list[dict],
        flag: str | None = "1",
        environment: dict[str, str] | None = None,
        receipts_of: list[int] | None = None,
        bisection: Sequence[Any] = (),
        listed_for: Sequence[list[list[int]]] = (),
        afterwards: Callable[[Engine], Any] = lambda engine: None,
        **settings: object,
    ) -> Result:
        settings = {
            "model": str(checkpoint),
            "max_model_len": 4096,
            "max_num_seqs": 320,
            "skip_tokenizer_init": True,
            **OF_DEVICE,
        } | settings
        return run(settings, steps, flag, receipts_of, bisection, listed_for, afterwards, **(environment or {}))

    return start


@pytest.fixture(scope="module")
def counts(pytestconfig: pytest.Config) -> tuple[int, ...]:
    """Numbers of concurrent requests."""
    return CONCURRENT if pytestconfig.option.exhaustive or ON_GPU else FEWER_CONCURRENT


@pytest.fixture(scope="module")
def main(engine: Callable[..., Result], counts: tuple[int, ...]) -> Result:
    def check(running: Engine) -> EngineRun:
        checked = certified(running)
        checked.as_served()
        return checked

    return engine(
        plan(counts),
        receipts_of=tokens(90, 1),
        bisection=() if ON_GPU else ("injected",),
        listed_for=([tokens(length, 21) for length in (20, 45)], [tokens(length, 22) for length in range(1, 13)]),
        afterwards=check,
        max_logprobs=-1,
    )


def test_a_request_has_the_same_bits_alone_and_with_any_concurrent_requests(
    main: Result, counts: tuple[int, ...]
) -> None:
    alone = main.completions("alone 45")
    different = [count for count in counts if main.completions(f"with {count}") != alone]
    assert not different


def test_a_request_has_the_same_bits_at_any_place_in_the_batch(main: Result) -> None:
    for place in (0, 50, 100):
        assert main.completions(f"at place {place}", place) == main.completions("alone 45")


def test_a_concurrent_prompt_of_any_length_moves_no_bit(main: Result) -> None:
    different = [
        length
        for length in CONCURRENT_LENGTHS
        if main.completions(f"with a prompt of {length}") != main.completions("alone 300")
    ]
    assert not different


def test_a_warm_prefix_cache_gives_the_bits_of_a_cold_one(main: Result) -> None:
    assert main.steps["cold"][0]["cached"] == 0
    assert main.steps["warm"][0]["cached"] >= 512
    assert main.completions("warm") == main.completions("cold")
    assert 0 < main.steps["half warm"][0]["cached"] < 512
    assert main.completions("half warm") == main.completions("half warm, cold")


def test_prompt_logprobs_have_the_same_bits_cold_and_warm_and_with_others(main: Result) -> None:
    cold, warm = (main.steps[f"prompt logprobs, {state}"][0] for state in ("cold", "warm"))
    assert len(cold["prompt_logprobs"]) == 700
    assert warm["prompt_logprobs"] == cold["prompt_logprobs"]
    assert (
        warm["completions"]
        == cold["completions"]
        == main.completions("cold")
        == main.completions("after prompt logprobs")
    )


@pytest.mark.parametrize("others", listed.CONCURRENT)
def test_listed_candidates_and_ranks_do_not_follow_what_others_ask_for(main: Result, others: str) -> None:
    assert main.listed is not None
    assert main.listed[others] == main.listed["alone"]


def test_candidates_are_listed_by_value_and_equal_ones_by_id(main: Result) -> None:
    assert main.listed is not None
    answers = main.listed["alone"]
    positions = [position for answer in answers for position in answer["logprobs"] + answer["prompt_logprobs"]]
    ties = 0
    for position in positions:
        order = sorted((-float.fromhex(value), token) for token, _, value in position)
        ranks = {token: rank for token, rank, _ in position}
        assert [ranks[token] for _, token in order] == sorted(ranks.values())
        assert sorted(ranks.values())[: len(position) - 1] == list(range(1, len(position)))
        ties += len({value for value, _ in order}) < len(order)
    assert ties


def test_a_greedy_token_is_the_first_candidate(main: Result) -> None:
    assert main.listed is not None
    for answer, asked in zip(main.listed["alone"], listed.TARGETS * 2, strict=True):
        first = [(token, rank) for [token, rank, _], *_ in answer["logprobs"]]
        assert (asked["temperature"] > 0) or first == [(token, 1) for token in answer["tokens"]]


@pytest.mark.parametrize("kind", SAMPLING)
def test_seeded_sampling_gives_the_same_tokens_whatever_others_ask_for(main: Result, kind: str) -> None:
    assert main.completions(f"{kind} with others", 9) == main.completions(f"{kind} alone")


def test_samples_of_one_request_differ_from_each_other_and_not_from_run_to_run(main: Result) -> None:
    samples = main.completions("four samples")
    assert len({tuple(sample["tokens"]) for sample in samples}) == 4
    assert main.completions("four samples with others", len(OTHER_SAMPLING)) == samples
    assert len({tuple(sample["tokens"]) for sample in main.completions("four without a seed")}) == 4


def test_the_log_says_what_serves_each_operation(main: Result) -> None:
    assert main.log.count("Batch-invariant mode is on") == 1
    assert "Matmuls" in main.log
    assert "sampling without a seed" in main.log
    kind = "cuda.CudaFixedSplitAttention" if torch.cuda.is_available() else "cpu.CpuFixedSplitAttention"
    assert main.kernels["impl"] == [f"vllm_batch_invariant.integration.layers.attention_{kind}"]
    assert all(name.startswith("vllm_batch_invariant.") for name in main.kernels.get("cpu_linear", []))
    assert not any(name.endswith("layernorm.RMSNorm") for name in main.kernels["modules"])


@pytest.fixture(scope="module")
def small(main: Result, engine: Callable[..., Result]) -> Result:
    """An engine with small chunks and a small KV cache."""

    def check(running: Engine) -> None:
        EngineRun(running, "small", CHECK, main.afterwards.results, lambda now: None).with_small_limits(main.afterwards)

    return engine(
        again(*RESTARTED),
        afterwards=check,
        max_num_batched_tokens=64,
        max_num_seqs=64,
        max_model_len=768,
        num_gpu_blocks_override=8 * 128 // PAGE,
        enable_prefix_caching=False,
    )


def test_small_chunks_and_preemption_and_a_restart_move_no_bit(main: Result, small: Result) -> None:
    # On a GPU this load was never seen to preempt: there the comparison covers chunks and the restart.
    assert small.preemptions > 0 or torch.cuda.is_available()
    for name in RESTARTED:
        ours, theirs = ([answer["completions"] for answer in result.steps[name]] for result in (small, main))
        assert ours == theirs, name
    name = "prompt logprobs, cold"
    assert small.steps[name][0]["prompt_logprobs"] == main.steps[name][0]["prompt_logprobs"]


def test_a_check_of_the_mode_holds_for_every_guarantee(main: Result, small: Result) -> None:
    found = main.afterwards.results
    assert [case for case in found.cases if case.outcome is not Outcome.HOLDS] == []
    assert found.status is Status.REPRODUCIBLE
    assert {certificate.operation for certificate in found.certificates} == set(OPERATIONS) - {"experts"}
    assert all("vllm_batch_invariant" in certificate.served_by for certificate in found.certificates)
    assert found.latency.tokens == 4 * 8


@pytest.fixture(scope="module")
def other(engine: Callable[..., Result]) -> Result:
    """An engine with other pages and chunks, which gives requests a seed."""
    settings = {"max_num_batched_tokens": 300, "max_num_seqs": 5, "block_size": 32, "async_scheduling": True}
    steps = [*again(*RESTARTED, *SAMPLES, *UNSEEDED), *(step | {"requests": samples_of()} for step in UNSEEDED_SAMPLES)]
    return engine(steps, environment={SEED.name: "5"}, **settings)


def test_other_pages_other_chunks_and_async_scheduling_move_no_bit(main: Result, other: Result) -> None:
    for name in RESTARTED:
        ours, theirs = ([answer["completions"] for answer in result.steps[name]] for result in (other, main))
        assert ours == theirs, name


def test_a_request_without_a_seed_gets_the_same_sample_again_if_seeds_are_made_for_it(
    main: Result, other: Result
) -> None:
    alone, again_alone, with_others, four = UNSEEDED
    assert main.completions(again_alone) != main.completions(alone)
    [sample] = other.completions(alone)
    assert other.completions(again_alone) == [sample]
    assert other.completions(with_others, 9) == [sample]
    samples = other.completions(four)
    assert samples[0] == sample
    assert len({tuple(sample["tokens"]) for sample in samples}) == 4
    assert f"{SEED.name}=5" in other.log


def test_samples_that_have_names_differ_and_are_the_same_in_any_order_and_in_another_engine(
    main: Result, other: Result
) -> None:
    alone, with_others = SAMPLES
    samples = [answer["completions"] for answer in main.steps[alone]]
    assert len({tuple(sample["tokens"]) for [sample] in samples}) == 4
    assert [answer["completions"] for answer in reversed(main.steps[with_others][9:])] == samples
    assert [answer["completions"] for answer in other.steps[alone]] == samples
    assert [answer["completions"] for answer in reversed(other.steps[with_others][9:])] == samples


def test_samples_that_have_names_need_no_seed_if_seeds_are_made_for_them(other: Result) -> None:
    first, second = ([answer["completions"] for answer in other.steps[step["name"]]] for step in UNSEEDED_SAMPLES)
    assert first == second
    assert len({tuple(sample["tokens"]) for [sample] in first}) == 4


@pytest.mark.exhaustive
def test_flex_attention_gives_a_request_the_same_bits_with_any_concurrent_requests(
    engine: Callable[..., Result],
) -> None:
    result = engine(
        again("alone 300", "with a prompt of 10", "with a prompt of 64"), environment={ATTENTION.name: "flex"}
    )
    assert "Attention: flex" in result.log
    for length in (10, 64):
        assert result.completions(f"with a prompt of {length}") == result.completions("alone 300")


@pytest.fixture(scope="module")
def stock(engine: Callable[..., Result]) -> Result:
    """Plain vLLM with the plugin installed and the flag off; afterwards a check, and what a fuzzer finds first."""

    def check(running: Engine) -> tuple[EngineRun, str]:
        checked = check_of(running, "0")
        checked.certify()
        checked.again()
        checked.with_concurrent_requests()
        trial = Trial(running, Row("checkpoint", "0", "", 0))
        targets = dict(enumerate(draw_targets(0, 12, trial.accepts, 300)))
        taken = {number: target for number, target in targets.items() if trial.take(target) is not None}
        settings = replace(draw_settings(0, 0, 300, Place("cpu")), requests=16, options={})
        schedules = (draw_schedule(f"plain {number}", settings, taken, trial.accepts) for number in range(6))
        found = (trial.fuzz(schedule)[1] for schedule in schedules)
        return checked, next((where for where in found if "values" in where or "token" in where), "")

    steps = again("alone 45", *(f"with {count}" for count in CONCURRENT[:12]))
    bisection = () if ON_GPU else ("first_divergence_among", CONCURRENT[:12])
    return engine(steps, flag="0", **STOCK, bisection=bisection, afterwards=check)


@where_batches_move_plain_vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU this model is too small for plain vLLM to vary")
def test_plain_vllm_fails_the_same_comparison(stock: Result) -> None:
    assert any(stock.completions(f"with {count}") != stock.completions("alone 45") for count in CONCURRENT[:12])


@where_batches_move_plain_vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU this model is too small for plain vLLM to vary")
def test_a_check_of_plain_vllm_breaks_and_says_where(stock: Result) -> None:
    found = stock.afterwards[0].results
    broken = {case.name: case for case in found.cases if case.outcome is Outcome.BREAKS}
    assert found.status is Status.DIVERGED
    assert "logprobs from token" in broken[CONCURRENT_CASE[1]].difference
    assert {one.guarantee.name for one in found.guarantees if one.outcome is Outcome.BREAKS} == {"batch"}
    assert any(certificate.difference for certificate in found.certificates if certificate.operation == "linear")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU this model is too small for plain vLLM to vary")
def test_a_fuzzer_finds_that_plain_vllm_differs_within_its_first_schedules(stock: Result) -> None:
    assert stock.afterwards[1]


def test_without_the_flag_the_plugin_does_nothing(stock: Result, engine: Callable[..., Result]) -> None:
    absent = engine(again("alone 45", "with 17"), flag=None, environment={"VLLM_PLUGINS": ""}, **STOCK)
    assert stock.kernels == absent.kernels
    assert not any("vllm_batch_invariant" in name for names in stock.kernels.values() for name in names)
    assert "atch-invariant" not in stock.log
    for name in ("alone 45", "with 17"):
        assert [a["completions"] for a in stock.steps[name]] == [a["completions"] for a in absent.steps[name]]


def test_a_receipt_is_equal_when_it_is_computed_again_with_others(main: Result) -> None:
    assert main.receipts is not None
    engines, equal = main.receipts["verdict"].splitlines()
    assert engines == "engines: nothing that decides bits differs: bits may be expected equal"
    assert equal.startswith("equal: 12 tokens and the bits of ")
    assert "computed again with " in equal
    assert main.receipts["trainer agrees"]


def test_a_receipt_with_a_changed_bit_is_found_out(main: Result) -> None:
    assert main.receipts is not None
    assert "differs: at token 4 the logprob of " in main.receipts["of changed"]


def test_a_receipt_says_what_computed_it_and_none_is_made_of_what_nobody_can_repeat(
    main: Result, checkpoint: Path
) -> None:
    assert main.receipts is not None
    made = Receipt.from_json(main.receipts["receipt"])
    assert made.sampling.seed == sample_seed(7, 3)
    assert made.environment.mode is True
    assert made.environment.reductions["linear (output head)"]["k"] == 512
    assert made.model.digest is not None
    assert made.model.name == checkpoint.name
    assert main.receipts["without a seed"].startswith("sampling without a seed is random")


@pytest.fixture(scope="module")
def bisected(request: pytest.FixtureRequest, engine: Callable[..., Result]) -> dict[str, Any]:
    """On a GPU by an engine without CUDA graphs, inside which a bisection does not see."""
    if ON_GPU:
        return engine([], bisection=("injected",), enforce_eager=True).bisected
    return request.getfixturevalue("main").bisected


@pytest.mark.parametrize("name", ["no fault", "a fault that the batch does not reach"])
def test_a_bisection_of_the_mode_finds_nothing(bisected: dict[str, Any], name: str) -> None:
    result = bisected[name]
    assert result["found"] is None, result["verdict"]
    assert result["first_logprob"] is None
    assert not result["unrecorded_differ"]
    assert result["answers_recorded"]
    assert result["coverage"]["compared"] > 100
    assert set(result["requests"]) == {8}


@pytest.mark.parametrize("count", OTHER_COUNTS)
def test_a_bisection_of_the_mode_finds_nothing_with_any_number_of_requests(
    bisected: dict[str, Any], count: int
) -> None:
    result = bisected[f"no fault with {count}"]
    assert result["found"] is None, result["verdict"]
    assert result["first_logprob"] is None
    assert set(result["requests"]) == {count + 1}


@pytest.mark.parametrize(
    ("fault", "module", "operation", "token"),
    [
        ("down_proj", "model.layers.2.mlp.down_proj", "injected.copy", 0),
        ("norm", "model.layers.1.post_attention_layernorm", "injected.copy_into", 1),
        ("unseen", "model.layers.0.mlp.act_fn", MODULE_OUTPUT, 1),
    ],
)
def test_a_bisection_names_an_injected_fault(
    bisected: dict[str, Any], fault: str, module: str, operation: str, token: int
) -> None:
    found = bisected[fault]["found"]
    key, comparison = found["divergence"]["key"], found["comparison"]
    assert (key["module"], key["operation"], found["output_token"]) == (module, operation, token)
    assert found["repeats"]
    assert comparison["different"] == found["rows"]
    assert comparison["first"]["where"] == [0, comparison["shape"][-1] - 1]
    assert found["operands_differ"] == (None if operation == MODULE_OUTPUT else [])


@where_batches_move_plain_vllm
@pytest.mark.skipif(ON_GPU, reason="on a GPU this model is too small for plain vLLM to vary")
def test_a_bisection_of_plain_vllm_finds_an_operation_that_is_variant_by_itself(stock: Result) -> None:
    found = stock.bisected["found"]
    assert found["comparison"]["different"] > 0
    assert found["operands_differ"] == []
    assert found["repeats"]
    assert stock.bisected["answers_recorded"]
