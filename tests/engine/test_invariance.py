"""A real engine gives a request the same tokens and logprobs in any company, under any schedule, after a restart."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.engines import Result, company, request, run, tokens
from vllm_batch_invariant.envs import ATTENTION

pytestmark = pytest.mark.engine

NEEDLES = {length: tokens(length, 1) for length in (1, 45, 300)}
COMPANY = (1, 2, 7, 8, 15, 16, 17, 43, 44, 45, 46, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300)
NEIGHBOURS = (0, 1, 5, 9, 10, 11, 64, 700, 3000)
CHUNK_ENDS = (127, 128, 129, 255, 256, 257)
"""Prompt lengths around the page (128) and the attention split (256)."""

SAMPLING = {
    "plain": {"temperature": 1.0, "seed": 7},
    "top_k": {"temperature": 0.8, "seed": 8, "top_k": 20},
    "top_p": {"temperature": 1.2, "seed": 9, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "seed": 10, "min_p": 0.05},
    "penalties": {
        "temperature": 0.7,
        "seed": 11,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
    "greedy penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.3},
}
OTHER_SAMPLING = [
    request(tokens(20 + i, 50 + i), max_tokens=6, **params)
    for i, params in enumerate(
        [
            {"temperature": 1.0},
            {"temperature": 0.5, "top_k": 3},
            {"temperature": 1.5, "top_p": 0.3, "seed": 5},
            {"min_p": 0.2},
        ]
        * 6
    )
]


def plan() -> list[dict]:
    """Every step of the main engine. The needle is the first request of a step unless the name says otherwise."""
    steps = [{"name": f"alone {length}", "requests": [request(needle)]} for length, needle in NEEDLES.items()]
    for count in COMPANY:
        steps.append({"name": f"with {count}", "requests": [request(NEEDLES[45]), *company(count, count)]})
    for place in (0, 50, 100):
        others = company(100, 1000 + place)
        others.insert(place, request(NEEDLES[45]))
        steps.append({"name": f"at place {place}", "requests": others})
    for length in NEIGHBOURS:
        neighbour = [request(tokens(length, 77), max_tokens=2)] if length else []
        steps.append(
            {"name": f"neighbour {length}", "reset_prefix_cache": True, "requests": [request(NEEDLES[300]), *neighbour]}
        )
    long = tokens(700, 3)
    steps += [
        {"name": "cold", "reset_prefix_cache": True, "requests": [request(long)]},
        {"name": "warm", "requests": [request(long)]},
        {"name": "half warm", "requests": [request(long[:500] + tokens(200, 4))]},
        {"name": "half warm, cold", "reset_prefix_cache": True, "requests": [request(long[:500] + tokens(200, 4))]},
        {"name": "prompt logprobs, cold", "reset_prefix_cache": True, "requests": [request(long, prompt_logprobs=5)]},
        {"name": "prompt logprobs, warm", "requests": [request(long, prompt_logprobs=5), *company(20, 5)]},
        {"name": "after prompt logprobs", "requests": [request(long)]},
    ]
    for name, params in SAMPLING.items():
        needle = request(NEEDLES[45], **params)
        steps.append({"name": f"{name} alone", "requests": [needle]})
        steps.append({"name": f"{name} in company", "requests": [*OTHER_SAMPLING[:9], needle, *OTHER_SAMPLING[9:]]})
    several = request(NEEDLES[45], n=4, temperature=1.0, seed=3)
    steps.append({"name": "four samples", "requests": [several]})
    steps.append({"name": "four samples in company", "requests": [*OTHER_SAMPLING, several]})
    steps.append({"name": "four without a seed", "requests": [request(NEEDLES[45], n=4, temperature=1.0)]})
    steps.append({"name": "borders", "requests": [request(tokens(length, 6), max_tokens=4) for length in CHUNK_ENDS]})
    steps.append({"name": "many", "requests": [request(tokens(250, 100 + i), max_tokens=40) for i in range(12)]})
    return steps


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    def start(
        steps: list[dict], flag: str | None = "1", environment: dict[str, str] | None = None, **settings: object
    ) -> Result:
        settings = {
            "model": str(checkpoint),
            "max_model_len": 4096,
            "max_num_seqs": 320,
            "skip_tokenizer_init": True,
        } | settings
        return run(tmp_path_factory.mktemp("engine"), settings, steps, flag, **(environment or {}))

    return start


@pytest.fixture(scope="module")
def main(engine: Callable[..., Result]) -> Result:
    return engine(plan())


def test_a_request_has_the_same_bits_alone_and_in_any_company(main: Result) -> None:
    alone = main.completions("alone 45")
    different = [count for count in COMPANY if main.completions(f"with {count}") != alone]
    assert not different


def test_a_request_has_the_same_bits_at_any_place_in_the_batch(main: Result) -> None:
    for place in (0, 50, 100):
        assert main.completions(f"at place {place}", place) == main.completions("alone 45")


def test_a_neighbours_prompt_of_any_length_moves_no_bit(main: Result) -> None:
    different = [
        length for length in NEIGHBOURS if main.completions(f"neighbour {length}") != main.completions("alone 300")
    ]
    assert not different


def test_a_warm_prefix_cache_gives_the_bits_of_a_cold_one(main: Result) -> None:
    assert main.steps["cold"][0]["cached"] == 0
    assert main.steps["warm"][0]["cached"] >= 512
    assert main.completions("warm") == main.completions("cold")
    assert 0 < main.steps["half warm"][0]["cached"] < 512
    assert main.completions("half warm") == main.completions("half warm, cold")


def test_prompt_logprobs_have_the_same_bits_cold_and_warm_and_in_company(main: Result) -> None:
    cold, warm = (main.steps[f"prompt logprobs, {state}"][0] for state in ("cold", "warm"))
    assert len(cold["prompt_logprobs"]) == 700
    assert warm["prompt_logprobs"] == cold["prompt_logprobs"]
    assert (
        warm["completions"]
        == cold["completions"]
        == main.completions("cold")
        == main.completions("after prompt logprobs")
    )


@pytest.mark.parametrize("kind", SAMPLING)
def test_seeded_sampling_gives_the_same_tokens_whatever_the_neighbours_ask_for(main: Result, kind: str) -> None:
    assert main.completions(f"{kind} in company", 9) == main.completions(f"{kind} alone")


def test_samples_of_one_request_differ_from_each_other_and_not_from_run_to_run(main: Result) -> None:
    samples = main.completions("four samples")
    assert len({tuple(sample["tokens"]) for sample in samples}) == 4
    assert main.completions("four samples in company", len(OTHER_SAMPLING)) == samples
    assert len({tuple(sample["tokens"]) for sample in main.completions("four without a seed")}) == 4


def test_the_log_says_what_serves_each_operation(main: Result) -> None:
    assert main.log.count("Batch-invariant mode is on") == 1
    assert "Products: BLAS" in main.log
    assert "sampling without a seed" in main.log
    assert main.kernels["impl"] == ["vllm_batch_invariant.integration.attention.FixedSplitAttention"]
    assert all(name.startswith("vllm_batch_invariant.") for name in main.kernels["cpu_linear"])
    assert not any(name.endswith("layernorm.RMSNorm") for name in main.kernels["modules"])


RESTARTED = (
    "alone 1",
    "alone 45",
    "alone 300",
    "cold",
    "borders",
    "many",
    "plain alone",
    "with 17",
    "prompt logprobs, cold",
)


def again(*names: str) -> list[dict]:
    return [step for step in plan() if step["name"] in names]


def test_small_chunks_and_preemption_and_a_restart_move_no_bit(main: Result, engine: Callable[..., Result]) -> None:
    other = engine(
        again(*RESTARTED),
        max_num_batched_tokens=64,
        max_num_seqs=64,
        max_model_len=1024,
        num_gpu_blocks_override=12,
        enable_prefix_caching=False,
    )
    assert other.preemptions > 0
    for name in RESTARTED:
        ours, theirs = ([answer["completions"] for answer in result.steps[name]] for result in (other, main))
        assert ours == theirs, name
    name = "prompt logprobs, cold"
    assert other.steps[name][0]["prompt_logprobs"] == main.steps[name][0]["prompt_logprobs"]


def test_other_pages_other_chunks_and_async_scheduling_move_no_bit(main: Result, engine: Callable[..., Result]) -> None:
    other = engine(again(*RESTARTED), max_num_batched_tokens=300, max_num_seqs=5, block_size=32, async_scheduling=True)
    for name in RESTARTED:
        ours, theirs = ([answer["completions"] for answer in result.steps[name]] for result in (other, main))
        assert ours == theirs, name


def test_flex_attention_gives_a_request_the_same_bits_in_any_company(engine: Callable[..., Result]) -> None:
    result = engine(again("alone 300", "neighbour 10", "neighbour 64"), environment={ATTENTION.name: "flex"})
    assert "Attention: flex" in result.log
    for length in (10, 64):
        assert result.completions(f"neighbour {length}") == result.completions("alone 300")


@pytest.fixture(scope="module")
def stock(engine: Callable[..., Result]) -> Result:
    """Plain vLLM with the plugin installed and the flag off."""
    return engine(again("alone 45", *(f"with {count}" for count in COMPANY[:12])), flag="0", enforce_eager=True)


def test_plain_vllm_fails_the_same_comparison(stock: Result) -> None:
    assert any(stock.completions(f"with {count}") != stock.completions("alone 45") for count in COMPANY[:12])


def test_without_the_flag_the_plugin_does_nothing(stock: Result, engine: Callable[..., Result]) -> None:
    absent = engine(again("alone 45", "with 17"), flag=None, environment={"VLLM_PLUGINS": ""}, enforce_eager=True)
    assert stock.kernels == absent.kernels
    assert not any("vllm_batch_invariant" in name for names in stock.kernels.values() for name in names)
    assert "atch-invariant" not in stock.log
    for name in ("alone 45", "with 17"):
        assert [a["completions"] for a in stock.steps[name]] == [a["completions"] for a in absent.steps[name]]
