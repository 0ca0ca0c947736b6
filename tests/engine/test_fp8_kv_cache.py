"""An engine whose KV cache is in fp8 gives a request the same bits alone and among others, from chunks of any size and
from the prefix cache: those of an engine whose cache has the numbers of the codes in bf16. A layer has one scale, or
each of its heads has its own, or each of their tokens.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from tests.engine.engines import (
    EAGER_ON_GPU,
    OF_DEVICE,
    UNTRIED_THERE,
    concurrent_requests,
    request,
    run,
    some_exhaustive,
    tokens,
)
from tests.engine.fp8_caches import with_scales
from tests.engine.test_models import MODELS
from tests.engine.test_models import checkpoint as model_of
from vllm_batch_invariant.envs import TP_TREE
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.worker import Engine

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
COVERED = reviews.ran().fp8_kv_cache[DEVICE]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]

CACHES = "tests.engine.fp8_caches"
SHAPE = Shape(intermediate=384, layers=2, vocab=1024, max_length=512)
VOCABULARY = range(3, 900)
TARGETS = [
    request(tokens(150, 1, VOCABULARY), max_tokens=12, logprobs=5),
    request(tokens(300, 2, VOCABULARY), max_tokens=4, temperature=1.0, seed=7, prompt_logprobs=2),
]
OTHERS = concurrent_requests(14, 3, vocabulary=VOCABULARY)
OTHERS += [request(tokens(60, 100 + number, VOCABULARY), max_tokens=60) for number in range(8)]
"""The last ones need twice the pages that they begin with."""
LIMITS = {"max_model_len": 512, "max_num_seqs": 24, "max_num_batched_tokens": 96, "skip_tokenizer_init": True}
LIMITS |= OF_DEVICE | EAGER_ON_GPU


SCALES = {"tensor": ([0.5], [0.25]), "attn_head": ([0.5, 0.125], [0.25, 2.0]), "token_head": ([0.5], [0.25])}
"""Of keys and of values in the first layer of the checkpoint, by what has one of its own; the last are not read."""
OF_KIND = {"token_head": {"kv_cache_dtype": "fp8_per_token_head"}}


@pytest.fixture(scope="module", params=some_exhaustive(SCALES, ("tensor",)))
def kind(request: pytest.FixtureRequest) -> str:
    """What has a scale of its own."""
    return request.param


@pytest.fixture(scope="module")
def checkpoint(kind: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_scales(make_checkpoint(tmp_path_factory.mktemp("fp8-kv") / "model", SHAPE), *SCALES[kind])


Start = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def started(kind: str, checkpoint: str) -> Start:
    """What is asked of an engine of the checkpoint with other settings."""

    def start(
        afterwards: Callable[[Engine], dict[str, Any]] = ask,
        environment: Mapping[str, str] = MappingProxyType({}),
        **more: object,
    ) -> dict[str, Any]:
        settings = {"model": checkpoint, **LIMITS, **OF_KIND.get(kind, {}), **more}
        return run(settings, [], "1", afterwards=afterwards, **UNTRIED_THERE, **environment).afterwards

    return start


def seen(answers: list[dict[str, Any]]) -> list[Any]:
    """Tokens, logprobs and candidates of the targets, which come last."""
    return [[one["completions"], one["prompt_logprobs"]] for one in answers[-len(TARGETS) :]]


def ask(engine: Engine) -> dict[str, Any]:
    """Answers of the targets alone, among others and from the prefix cache, and how often requests were preempted."""
    alone = [engine.step(f"alone {number}", [one], True) for number, one in enumerate(TARGETS)]
    among = engine.step("among others", [*OTHERS, *TARGETS], True)
    return {
        "alone": seen([step.requests[0] for step in alone]),
        "among others": seen(among.requests),
        "warm": seen(engine.step("warm", TARGETS).requests),
        "preemptions": among.preemptions,
    }


@pytest.fixture(scope="module")
def found(started: Start, kind: str) -> dict[str, Any]:
    def asked(engine: Engine) -> dict[str, Any]:
        made = ask(engine)
        made["bytes"] = engine.call(f"{CACHES}:bytes_of_caches")
        if kind != "token_head":
            made["scales"] = engine.call(f"{CACHES}:in_numbers", True)
            made["numbers of the codes"] = seen(engine.step("numbers of the codes", TARGETS, True).requests)
        engine.call(f"{CACHES}:in_numbers", False)
        made["exact numbers"] = seen(engine.step("exact numbers", TARGETS, True).requests)
        return made

    return started(asked)


def test_a_cache_in_fp8_moves_no_bit_with_the_batch_the_chunks_or_the_prefix_cache(found: dict[str, Any]) -> None:
    assert {dtype for dtype, _ in found["bytes"]} == {"torch.uint8"}
    assert all(written for _, written in found["bytes"])
    assert found["alone"] == found["among others"] == found["warm"]


def test_a_cache_in_fp8_has_the_bits_of_one_of_its_numbers_in_bf16(found: dict[str, Any], kind: str) -> None:
    """With the scales of the checkpoint, which are powers of two; those of tokens are none."""
    assert found["alone"] != found["exact numbers"], "so the comparison sees what codes lose"
    if kind != "token_head":
        keys, values = SCALES[kind]
        assert found["scales"] == [[keys, values], [[0.5 * one for one in keys], [2.0 * one for one in values]]]
        assert found["alone"] == found["numbers of the codes"]


NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
DRAFTS = {"method": "draft_model", "num_speculative_tokens": 3}


@pytest.mark.exhaustive
@pytest.mark.parametrize("speculation", [NGRAMS, DRAFTS], ids=["ngram", "draft_model"])
def test_drafts_leave_the_bits_of_a_cache_in_fp8(
    found: dict[str, Any], started: Start, checkpoint: str, speculation: dict[str, Any]
) -> None:
    drafter = speculation | ({"model": checkpoint} if speculation is DRAFTS else {})
    answers = started(speculative_config=json.dumps(drafter))
    assert answers["alone"] == answers["among others"] == answers["warm"] == found["alone"]


@pytest.mark.exhaustive
def test_preemption_leaves_the_bits_of_a_cache_in_fp8(found: dict[str, Any], started: Start) -> None:
    """And steps and pages of other sizes."""
    few = {"block_size": 32, "num_gpu_blocks_override": 20, "max_num_batched_tokens": 256}
    answers = started(**few)
    assert answers["preemptions"] > 0
    assert answers["alone"] == answers["among others"] == answers["warm"] == found["alone"]


@pytest.mark.exhaustive
def test_one_request_at_a_time_in_odd_chunks_leaves_the_bits_of_a_cache_in_fp8(
    found: dict[str, Any], started: Start
) -> None:
    answers = started(max_num_seqs=1, max_num_batched_tokens=37)
    assert answers["alone"] == answers["among others"] == answers["warm"] == found["alone"]


@pytest.mark.exhaustive
@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="it takes two GPUs")
def test_workers_that_share_heads_have_the_bits_of_one(started: Start) -> None:
    """Each reads the scales of its own."""
    tree = {TP_TREE.name: "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    one, two = (started(environment=tree, tensor_parallel_size=size) for size in (1, 2))
    assert two["alone"] == two["among others"] == two["warm"] == one["alone"]


@pytest.mark.exhaustive
def test_weights_that_are_replaced_bring_their_scales(
    kind: str, found: dict[str, Any], started: Start, checkpoint: str, tmp_path: Path
) -> None:
    """The same weights with other scales, and back; those of tokens are of what is written."""
    halved = [[0.5 * scale for scale in scales] for scales in SCALES[kind]]
    other = with_scales(make_checkpoint(tmp_path / "other", SHAPE), *halved)

    def asked(engine: Engine) -> dict[str, Any]:
        made = {}
        for name, folder in (("other", other), ("back", checkpoint)):
            engine.call("tests.engine.reloads:by_reload_weights", folder)
            steps = [engine.step(f"{name} {number}", [one], True) for number, one in enumerate(TARGETS)]
            made[name] = seen([step.requests[0] for step in steps])
        return made

    replaced = started(asked)
    assert replaced["back"] == found["alone"]
    assert (replaced["other"] == found["alone"]) == (kind == "token_head")
    assert replaced["other"] == started(model=other)["alone"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gemma2 with soft-caps", "granite with sinks and a sliding window"])
def test_windows_sinks_and_soft_caps_leave_the_bits_of_a_cache_with_a_scale_a_token_and_head(
    name: str, tmp_path: Path
) -> None:
    config, dtype = MODELS[name]
    model_of(config, dtype).save_pretrained(tmp_path / "model")
    cache, chunks = OF_KIND["token_head"], {"max_num_seqs": 1, "max_num_batched_tokens": 37}
    whole, in_chunks, plain = (
        run({"model": str(tmp_path / "model"), **LIMITS, **more}, [], "1", afterwards=ask, **UNTRIED_THERE).afterwards
        for more in (cache, cache | chunks, {})
    )
    assert whole["alone"] == whole["among others"] == whole["warm"] == in_chunks["alone"]
    assert plain["alone"] != whole["alone"], "so the comparison sees what codes lose"
