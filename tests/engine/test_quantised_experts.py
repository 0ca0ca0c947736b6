"""Experts in four bits, and those that become int8 while they are loaded: an engine of them has the bits of an engine
of the matrices that they stand for.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import kept_states
from tests.engine.engines import OF_DEVICE, UNTRIED_THERE, Result, differing_answers, run, some_exhaustive
from tests.engine.plans import GREEDY, SEEDED, alone_and_among, moved
from tests.engine.quantised_experts import INTEGERS, NVFP4, WITH_CACHE, int8_of, mxfp4_of, nvfp4_of, qwen_of
from tests.engine.reloads import EXTENSION, TRANSFER
from tests.engine.test_experts import LIMITS, OF_TWO_WORKERS, SHAPE, engine_of
from vllm_batch_invariant.envs import UNTRIED
from vllm_batch_invariant.verify.demo_model import make_checkpoint
from vllm_batch_invariant.verify.harness.requests import NGRAMS
from vllm_batch_invariant.verify.harness.worker import Engine

pytestmark = pytest.mark.engine

MXFP4 = "MXFP4 of gpt-oss"
INT8 = "int8 while they are loaded"
IN_NVFP4 = (*NVFP4, WITH_CACHE)
KINDS = (MXFP4, *INTEGERS, *IN_NVFP4, INT8)
ARGUMENTS = {kind: of[3] for kind, of in INTEGERS.items()} | {INT8: {"quantization": "int8_per_channel_weight_only"}}
"""Of engines of the stored experts, by kinds that need some."""
WAYS = ("by_reload_weights", "by_hand")
BY_HAND = WAYS[1]
"""The way that writes where weights lie: with it the others are compared."""
WAYS_OF = dict.fromkeys(KINDS, WAYS) | {INT8: (*WAYS, "by_transfer", "by_buckets", "by_name")}
"""Of kinds: the last takes weights that are not what it multiplies with."""
FAMILY = "gpt-oss with sinks and biases"
COMPARED = len((*GREEDY, SEEDED)) + 1
"""Steps that both engines take: each target alone, and all of them among others."""
REPLACED = {"worker_extension_cls": EXTENSION, "weight_transfer_config": json.dumps({"backend": TRANSFER})}
OTHER = 1
"""Number of the checkpoint that replaces another."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[Path, Path]]:
    """By kind and number, two of the same experts: as they are stored, and as the matrices that they stand for."""

    @cache
    def unquantised(of_gpt_oss: bool, number: int) -> Path:
        folder = tmp_path_factory.mktemp("bf16")
        if of_gpt_oss:
            engine_of(FAMILY, folder, number)
            return folder
        return make_checkpoint(folder, SHAPE, number)

    @cache
    def made(kind: str, number: int) -> tuple[Path, Path]:
        folder, at = unquantised(kind == MXFP4, number), tmp_path_factory.mktemp("quantised")
        others = partial(nvfp4_of if kind in IN_NVFP4 else qwen_of, kind=kind)
        write = {MXFP4: mxfp4_of, INT8: int8_of}.get(kind, others)
        return write(folder, at), at / "matrix"

    return made


@pytest.fixture(scope="module")
def both(folders: Callable[[str, int], tuple[Path, Path]]) -> Callable[..., list[Result]]:
    """What engines of both checkpoints of a kind answer, side by side: before and after their weights are replaced."""

    @cache
    def answered(kind: str, **settings: Any) -> list[Result]:
        of_numbers = [folders(kind, number) for number in (OTHER, 0)]

        def engine(which: int) -> Result:
            others = [of_number[which] for of_number in of_numbers]

            def replaced(running: Engine) -> dict[str, list[dict[str, Any]]]:
                answers = {}
                for way in () if settings else WAYS_OF[kind]:
                    for number, folder in zip((OTHER, 0), others, strict=True):
                        running.call(f"tests.engine.reloads:{way}", str(folder))
                        answers[f"{way} {number}"] = running.step(way, list(GREEDY[:2])).requests
                return answers

            arguments = ARGUMENTS.get(kind, {}) if which == 0 else {}
            of_engine = {"model": str(others[1]), "dtype": "bfloat16", **REPLACED}
            variables = OF_TWO_WORKERS | ({UNTRIED.name: "1"} if kind == INT8 else {}) if settings else {}
            variables |= {UNTRIED.name: "1"} if kind in IN_NVFP4 and torch.cuda.is_available() else {}
            return run(
                of_engine | LIMITS | OF_DEVICE | arguments | settings,
                alone_and_among() if which == 0 else alone_and_among()[:COMPARED],
                "1",
                afterwards=replaced,
                **variables,
            )

        if torch.cuda.is_available():
            return [engine(which) for which in range(2)]
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(engine, range(2)))

    return answered


kinds = pytest.mark.parametrize("kind", some_exhaustive(KINDS, (MXFP4,)))


def differing(one: dict[str, list[dict[str, Any]]], other: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Steps of the second in which requests have other answers in the first."""
    return [name for name, answers in other.items() if differing_answers(one[name], answers)]


@kinds
def test_an_engine_has_the_bits_of_an_engine_of_the_matrices(both: Callable[..., list[Result]], kind: str) -> None:
    stored, matrices = both(kind)
    assert list(matrices.steps)[-1] == "among 1"
    assert differing(stored.steps, matrices.steps) == []


@kinds
def test_a_request_has_the_same_bits_alone_and_among_others(both: Callable[..., list[Result]], kind: str) -> None:
    assert moved(both(kind)[0]) == []


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, marks=[pytest.mark.exhaustive] * (kind != MXFP4))
        for kind, ways in WAYS_OF.items()
        for way in ways
    ],
)
def test_replaced_weights_serve_as_those_of_a_fresh_engine(
    both: Callable[..., list[Result]], kind: str, way: str
) -> None:
    stored, matrices = (one.afterwards for one in both(kind))
    fresh = [both(kind)[0].steps[f"alone {number}"][0] for number in range(2)]
    for replaced in (stored, matrices):
        assert differing_answers(replaced[f"{way} {OTHER}"], matrices[f"{BY_HAND} {OTHER}"]) == []
    assert differing_answers(stored[f"{way} {OTHER}"], fresh) == [0, 1], "the other weights are others"
    assert differing_answers(stored[f"{way} 0"], fresh) == []


@pytest.mark.exhaustive
def test_every_form_of_a_checkpoint_in_nvfp4_has_the_same_bits(both: Callable[..., list[Result]]) -> None:
    """Of which gate and up have different scales of their matrices; activations that a form names are left."""
    first, *others = (both(kind)[0].steps for kind in NVFP4)
    assert [differing(other, first) for other in others] == [[]] * 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", NVFP4)
def test_drafts_beside_experts_in_nvfp4_leave_answers_alone(
    folders: Callable[[str, int], tuple[Path, Path]], kind: str
) -> None:
    settings = {"variables": UNTRIED_THERE, "dtype": "bfloat16"} | kept_states.IN_GRAPHS
    folder, _ = folders(kind, 0)
    started, asked = kept_states.started, kept_states.REPEATING
    fault = "" if torch.cuda.is_available() else "soften_verify_steps"  # which a CUDA graph would not see
    differing, counted, *faulty = kept_states.with_drafts(started, folder, NGRAMS, asked, settings, fault=fault)
    assert differing == []
    assert 0 < counted["accepted"] < counted["drafts"]
    assert [] not in faulty


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("shared", ["by columns", "whole"])
@pytest.mark.parametrize("kind", [MXFP4, "compressed-tensors with zero points", *NVFP4, INT8])
@pytest.mark.exhaustive
def test_workers_that_share_experts_have_the_bits_of_those_that_share_matrices(
    both: Callable[..., list[Result]], kind: str, shared: str
) -> None:
    stored, matrices = both(kind, tensor_parallel_size=2, enable_expert_parallel=shared == "whole")
    assert moved(stored) == []
    assert differing(stored.steps, matrices.steps) == []
