"""Two workers share each layer: a request has the same bits in any batch, and every worker the same tokens."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.engines import (
    EAGER_ON_GPU,
    OF_DEVICE,
    SETTINGS,
    Result,
    arguments_of,
    differing_answers,
    run,
)
from tests.engine.plans import GREEDY, SEEDED, TARGETS, alone_and_among, moved, targets
from tests.engine.reloads import EXTENSION
from vllm_batch_invariant.envs import FLAG, TP_TREE, UNTRIED
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.requests import request, tokens
from vllm_batch_invariant.verify.harness.worker import Engine

ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.engine, pytest.mark.core]

FAULTY = "model.layers.2.mlp.down_proj"
LIMITS = {"max_model_len": 512, "max_num_seqs": 64, "max_num_batched_tokens": 512, "tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two sets of weights of a model that has heads and columns for several workers."""
    shape = Shape(hidden=512, intermediate=1536, layers=3, heads=8, kv_heads=2, head_size=64, max_length=1024)
    return [str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), shape, seed)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def start(folders: list[str]) -> Callable[..., Result]:
    """An engine of that model."""

    def engine(
        flag: str,
        steps: list[dict[str, Any]],
        tree: str = "1",
        bisection: Sequence[Any] = (),
        afterwards: Callable[[Engine], Any] = lambda engine: None,
        **others: Any,
    ) -> Result:
        settings = {"model": folders[0]} | LIMITS | OF_DEVICE
        workers = others.get("tensor_parallel_size", LIMITS["tensor_parallel_size"])
        if ON_GPU and workers > torch.cuda.device_count():
            pytest.skip(f"needs {workers} GPUs")
        cores = "|".join(str(rank % 2) for rank in range(workers))
        variables = {"VLLM_CPU_OMP_THREADS_BIND": cores, TP_TREE.name: tree}
        if ON_GPU and (workers > 2 or (others.get("enable_expert_parallel") and tree != "1")):
            variables[UNTRIED.name] = "1"
        return run(settings | others, steps, flag, bisection=bisection, afterwards=afterwards, **variables)

    return engine


WAYS = ("by_reload_weights", "by_transfer", "by_buckets", "by_name")
ASKED = [*GREEDY, SEEDED]


def replaced(engine: Engine, folders: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """What the targets are answered after each way to replace the weights, by the other set and back."""
    done = {}
    for way in WAYS:
        for which in (1, 0):
            engine.call(f"tests.engine.reloads:{way}", folders[which])
            done[f"{way} {which}"] = engine.step(f"{way} {which}", ASKED).requests
    return done


@pytest.fixture(scope="module")
def two(start: Callable[..., Result], folders: list[str]) -> Result:
    """An engine of two workers whose weights are replaced, and which on a CPU is then bisected without a fault and with
    one in the second worker.
    """
    if ON_GPU:
        return start("1", alone_and_among())
    return start(
        "1",
        alone_and_among(),
        bisection=("in_a_worker", 1, FAULTY),
        afterwards=lambda engine: replaced(engine, folders),
        worker_extension_cls=EXTENSION,
        weight_transfer_config='{"backend": "files"}',
    )


@pytest.mark.skipif(ON_GPU, reason="in test_reload_cuda.py")
def test_both_workers_take_replaced_weights_however_they_come(two: Result) -> None:
    answers = two.afterwards
    fresh = [two.steps[f"alone {number}"][0] for number in range(len(ASKED))]
    for way in WAYS:
        assert differing_answers(answers[f"{way} 0"], fresh) == []
        assert differing_answers(answers[f"{way} 1"], answers["by_reload_weights 1"]) == []
    assert len(differing_answers(answers["by_reload_weights 1"], fresh)) == len(ASKED)


@pytest.mark.exhaustive
def test_workers_that_torchrun_starts_have_the_bits_of_those_that_vllm_starts(
    two: Result, folders: list[str], tmp_path: Path
) -> None:
    """Every process has an engine of its own, and the weights are replaced in all of them, on GPUs also while they
    sleep.
    """
    if ON_GPU and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    settings = arguments_of(LIMITS | OF_DEVICE | ({"enable_sleep_mode": True} if ON_GPU else {}))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "tests.engine.launched"]
    variables = {FLAG: "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    variables |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    ended = subprocess.run(
        [*torchrun, str(tmp_path / "answers"), *folders, *settings],
        env=os.environ | SETTINGS | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    first, second = (json.loads((tmp_path / f"answers.{rank}").read_text()) for rank in (0, 1))
    fresh = [first[f"alone {number}"][0] for number in range(len(ASKED))]
    for name, answers in first.items():
        assert differing_answers(answers, second[name]) == []
        if name in two.steps:
            assert differing_answers(answers, two.steps[name]) == []
        else:
            which = [fresh, first["reload, other"]][name.endswith("other")]
            assert differing_answers(answers, which) == []
    assert len(differing_answers(first["reload, other"], fresh)) == len(ASKED)


@pytest.fixture(scope="module")
def bisected(two: Result, start: Callable[..., Result]) -> dict[str, Any]:
    """What is found; on a GPU by an engine without CUDA graphs, which hide modules."""
    if not ON_GPU:
        return two.bisected
    return start("1", [], bisection=("in_a_worker", 1, FAULTY), **EAGER_ON_GPU).bisected


def test_a_request_has_the_same_bits_alone_and_among_others(two: Result) -> None:
    assert moved(two) == []


@pytest.mark.skipif(not ON_GPU, reason="on a CPU a partial result is added whole")
def test_a_request_has_the_same_bits_among_so_many_tokens_that_rows_are_sent(
    start: Callable[..., Result], tmp_path: Path
) -> None:
    """Partial results of a step have 64 MiB; the request is in the half that is sent first, and in the other."""
    shape = Shape(hidden=4096, intermediate=1024, layers=2, heads=32, kv_heads=2, head_size=128, max_length=1024)
    target, steps = request(TARGETS[300]), []
    for place in (None, 0, 12):
        others = [] if place is None else [request(tokens(500, 100 + seed), max_tokens=2) for seed in range(20)]
        others.insert(place or 0, target)
        steps.append({"name": f"at place {place}", "reset_prefix_cache": True, "requests": others})
    model = str(make_checkpoint(tmp_path, shape))
    done = start("1", steps, model=model, max_model_len=1024, max_num_batched_tokens=8192)
    assert "Long partial results are sent" in done.log
    alone = done.completions("at place None")
    assert [done.completions(f"at place {place}", place) for place in (0, 12)] == [alone, alone]


@pytest.mark.exhaustive
def test_four_workers_keep_the_bits_too(start: Callable[..., Result]) -> None:
    """They share two KV heads: each of these is there twice."""
    assert moved(start("1", alone_and_among(), tensor_parallel_size=4, max_num_batched_tokens=128)) == []


def test_a_bisection_names_a_faulty_layer_and_its_worker(bisected: dict[str, Any]) -> None:
    assert bisected["no fault"]["found"] is None, bisected["no fault"]["verdict"]
    assert bisected["no fault"]["coverage"]["compared"] > 100
    found = bisected["a fault"]["found"]
    assert (found["divergence"]["key"]["module"], found["rank"], found["workers"]) == (FAULTY, 1, 2)
    assert f"{FAULTY}: injected.copy (worker 1 of 2)" in bisected["a fault"]["verdict"]


def test_a_bisection_names_the_worker_of_the_first_fault(bisected: dict[str, Any]) -> None:
    found = bisected["a fault in the worker before"]["found"]
    assert (found["divergence"]["key"]["module"], found["rank"]) == ("model.layers.1.mlp.down_proj", 0)


@pytest.mark.skipif(ON_GPU, reason="on a GPU this model is too small for plain vLLM to vary")
@pytest.mark.exhaustive
def test_plain_vllm_fails_the_same_comparison(start: Callable[..., Result]) -> None:
    """In one dtype or the other: which one depends on the CPU."""
    assert any(moved(start("0", alone_and_among(), dtype=dtype)) for dtype in ("bfloat16", "float32"))


@pytest.fixture(scope="module")
def numbers_of_workers() -> list[int]:
    """Up to the slices of a tree of four, as many as there are GPUs."""
    most = torch.cuda.device_count() if ON_GPU else 4
    return [workers for workers in (1, 2, 4) if workers <= most]


@pytest.mark.exhaustive
def test_a_tree_gives_every_number_of_workers_the_same_bits(
    start: Callable[..., Result], numbers_of_workers: list[int]
) -> None:
    if ON_GPU and len(numbers_of_workers) == 1:
        pytest.skip("needs 2 GPUs")
    steps = [step for step in alone_and_among() if step["name"].startswith(("alone", "among 17"))]
    with_tree = [start("1", steps, tensor_parallel_size=workers, tree="4") for workers in numbers_of_workers]
    without = [start("1", steps, tensor_parallel_size=workers) for workers in (1, 2)]

    for done in with_tree:
        assert moved(done) == []
        assert differing_answers(targets(done), targets(with_tree[0])) == []
    assert differing_answers(targets(without[0]), targets(without[1]))
    assert differing_answers(targets(without[0]), targets(with_tree[0]))


OF_EXPERTS = {"experts": 8, "top_k": 3, "expert_intermediate": 128}
EXPERTS = Shape(hidden=512, layers=3, heads=8, kv_heads=2, head_size=64, max_length=1024, **OF_EXPERTS)
WHOLE = {"enable_expert_parallel": True}


@pytest.mark.exhaustive
def test_a_tree_and_whole_experts_give_every_number_of_workers_the_same_bits(
    start: Callable[..., Result], numbers_of_workers: list[int], tmp_path: Path
) -> None:
    if ON_GPU and len(numbers_of_workers) == 1:
        pytest.skip("needs 2 GPUs")
    model = {"model": str(make_checkpoint(tmp_path, EXPERTS))} | WHOLE
    steps = [step for step in alone_and_among() if step["name"].startswith(("alone", "among 17"))]
    with_tree = [start("1", steps, tensor_parallel_size=workers, tree="4", **model) for workers in numbers_of_workers]
    without = start("1", steps, tensor_parallel_size=2, **model)

    for done in with_tree:
        assert moved(done) == []
        assert differing_answers(targets(done), targets(with_tree[0])) == []
    assert differing_answers(targets(without), targets(with_tree[0]))


@pytest.mark.skipif(not ON_GPU, reason="on a CPU workers wait in gloo, whose connections end with a worker")
def test_a_worker_that_dies_ends_the_engine_and_the_other_worker(start: Callable[..., Result]) -> None:
    done = start("1", [], afterwards=lambda engine: engine.call("tests.engine.deaths:a_worker_dies", 1))
    found = done.afterwards
    assert found["error"]
    assert found["left"] == []
    assert found["seconds"] < 60
    assert "died unexpectedly" in done.log
