"""On a GPU: which experts tokens had, and which candidates their sampling left, are those of our router and of our
top-k and top-p, and have the same bits alone and among others, in chunks, from a warm prefix cache and after a
preemption.

An engine starts in half a minute; there are three, and two more where there are two GPUs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.engines import EAGER_ON_GPU, OF_DEVICE, SETTINGS, Engine, arguments_of, tokens
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint

pytestmark = pytest.mark.engine

SHAPE = Shape(layers=3, intermediate=512, experts=8, max_length=1024)
"""The first layer is dense."""
CALLED = "tests.engine.beside_tokens:"
LIMITS = {
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 128,
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
    "enable_return_routed_experts": True,
    "return_sampling_mask": True,
}
LENGTHS = (1, 45, 300, 700)
TOP_K = 12
WANTED = (
    {"top_k": TOP_K, "temperature": 1.0, "seed": 7},
    {"top_k": TOP_K, "top_p": 0.7, "temperature": 0.8, "seed": 8},
    {"top_k": TOP_K, "min_p": 0.05, "temperature": 1.3, "seed": 9},
)
RUNS = ("together", "among 3", "among 40", "warm", "preempted")


def asked(length: int, number: int, **params: Any) -> dict[str, Any]:
    return {"prompt": tokens(length, number), "params": {"max_tokens": 12, "ignore_eos": True, "logprobs": 20} | params}


TARGETS = [asked(length, length, **wanted) for length in LENGTHS for wanted in WANTED]


def others(count: int) -> list[dict[str, Any]]:
    """With other filters, of which the widest decides how much memory a step's masks have."""
    return [
        asked(
            1 + 37 * i % 200,
            500 + i,
            top_k=1 + 97 * i % 3000,
            top_p=1 - i % 5 / 10,
            temperature=0.5 + i % 3 / 2,
            max_tokens=60,
        )
        for i in range(count)
    ]


def plan() -> dict[str, tuple[list[dict[str, Any]], str]]:
    """The requests of each run, the targets first, and what is let go of."""
    alone = {f"alone {number}": ([target], "cache") for number, target in enumerate(TARGETS)}
    return alone | {
        "together": (TARGETS, "cache"),
        "among 3": ([*TARGETS, *others(3)], "cache"),
        "among 40": ([*TARGETS, *others(40)], "cache"),
        "warm": (TARGETS, ""),
        "preempted": (TARGETS, "running"),
    }


def run(folder: Path, runs: dict[str, tuple[list[dict[str, Any]], str]], extra: bool = False, **more: Any) -> Any:
    arguments = arguments_of(LIMITS | OF_DEVICE | more)
    environment = SETTINGS | {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    with Engine(str(folder), arguments, "1", environment, patience=400) as engine:
        done = {name: engine.call(f"{CALLED}answers", requests, reset) for name, (requests, reset) in runs.items()}
        if extra:
            done["seen"] = [engine.call(f"{CALLED}seen", target) for target in TARGETS]
            done["faulty"] = engine.call(f"{CALLED}with_faults", plan()["among 40"][0])
    return done


def moved(done: dict[str, Any], name: str, expected: dict[str, Any]) -> list[tuple[int, str]]:
    """Targets of a run that got something else than alone in another engine, and what."""
    return [
        (number, what)
        for number, given in enumerate(done[name]["given"][: len(TARGETS)])
        for what, value in expected[f"alone {number}"]["given"][0].items()
        if given[what] != value
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), SHAPE)


@pytest.fixture(scope="module")
def eager(model: Path) -> dict[str, Any]:
    """An engine without CUDA graphs, in which hooks and faults are seen."""
    return run(model, plan(), extra=True, **EAGER_ON_GPU)


def test_the_experts_are_those_that_our_router_chose(eager: dict[str, Any]) -> None:
    for target, told in zip(TARGETS, eager["seen"], strict=True):
        computed = len(target["prompt"]) + len(told["tokens"]) - 1  # the last token is not
        assert told["shape"] == [computed, SHAPE.layers, SHAPE.top_k]
        experts = torch.tensor(told["experts"])
        assert not experts[:, : SHAPE.dense_layers].any()
        for layer, chosen in enumerate(told["seen"], SHAPE.dense_layers):
            assert torch.equal(experts[:, layer], torch.tensor(chosen)[:computed])
        assert experts.unique().numel() == SHAPE.experts


def test_the_masks_are_the_candidates_that_have_a_logprob(eager: dict[str, Any]) -> None:
    sizes = set()
    for number in range(len(TARGETS)):
        given = eager[f"alone {number}"]["given"][0]
        assert len(given["masks"]) == len(given["tokens"])
        for token, mask, listed in zip(given["tokens"], given["masks"], given["logprobs"], strict=True):
            kept = {candidate for candidate, logprob, _ in listed if float.fromhex(logprob) > float("-inf")}
            assert sorted(kept) == mask
            assert token in kept
            sizes.add(len(mask))
    assert max(sizes) == TOP_K
    assert len(sizes) > 2


@pytest.mark.parametrize("name", RUNS)
def test_they_have_the_same_bits_under_any_schedule(name: str, eager: dict[str, Any]) -> None:
    assert moved(eager, name, eager) == []
    assert eager[name]["largest"] > (40 if name == "among 40" else 1)
    if name == "warm":
        assert max(eager[name]["cached"]) >= 600
    if name == "preempted":
        assert eager[name]["preemptions"] > 0


def test_what_is_planted_is_found(eager: dict[str, Any]) -> None:
    assert {what for _, what in moved(eager, "faulty", eager)} >= {"experts", "masks"}


@pytest.mark.parametrize("blocks", [None, 70])
def test_cuda_graphs_and_a_small_cache_give_the_same(blocks: int | None, model: Path, eager: dict[str, Any]) -> None:
    more = {} if blocks is None else {"num_gpu_blocks_override": blocks}
    done = run(model, {name: plan()[name] for name in RUNS[2:4]}, **more)
    assert [moved(done, name, eager) for name in done] == [[], []]
    assert (done["among 40"]["preemptions"] > 0) == (blocks is not None)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("whole", [False, True])
def test_two_workers_give_the_same_under_any_schedule(whole: bool, model: Path) -> None:
    done = run(model, plan(), tensor_parallel_size=2, enable_expert_parallel=whole)
    assert [moved(done, name, done) for name in RUNS] == [[]] * len(RUNS)
