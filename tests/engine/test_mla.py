"""Multi-head latent attention: a request has the same bits alone and among others, from chunks of any size, after a
preemption, from the prefix cache, and in pages of NaN.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine import kept_states, mla, multimodal
from tests.engine.drafters import predict_by_last_layer
from tests.engine.engines import UNTRIED_THERE, untried_on_gpu
from tests.engine.kept_states import ON_GPU, REPEATING, SAME, decodes_as_it_prefills, distance_from_float64
from tests.engine.mla import CONFIGS, FAULTS
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.harness.requests import NGRAMS

COVERED = reviews.ran().on_gpus if ON_GPU else reviews.ran().latent["cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
GRAPHS = {"enforce_eager": False} if ON_GPU else {}
"""On a GPU steps are CUDA graphs unless something else is asked."""
DEFAULT = {"max_num_batched_tokens": 61, "num_gpu_blocks_override": 36, "block_size": 16} | GRAPHS
"""With so few pages some requests are preempted."""
UNCACHED = DEFAULT | {"enable_prefix_caching": False, "max_num_batched_tokens": 47}
ONE = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "block_size": 32}
WHOLE = {"max_num_batched_tokens": 1024, "block_size": 64} | GRAPHS
"""Prompts in one step, for which vLLM has another form of attention."""
WAYS = ("by_reload_weights", "by_transfer", "by_buckets", "by_name")
EXTENSION = "tests.engine.reloads.Extension"
NEAR = 1e-4
"""Of logprobs in fp32; in bf16 a token may get other experts."""
started = partial(kept_states.started, variables=UNTRIED_THERE)
BY_ANY_THAT_DRAFT = kept_states.by_any_that_draft("latent attention")


def heads_for(name: str, workers: int) -> dict[str, int]:
    """Changes by which so many workers divide a model's heads: the small GLM-4.7-Flash has five."""
    others = workers > 1 and name == "GLM-4.7-Flash"
    return dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 20) if others else {}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(name: str) -> Path:
        return mla.written(name, tmp_path_factory.mktemp("mla"))

    return made


@pytest.fixture(scope="module")
def found(checkpoint: Callable[[str], Path]) -> Callable[..., dict[str, Any]]:
    """As vLLM starts: with a prefix cache. In bf16 few results show another order of a sum, so faults are planted in
    fp32.
    """

    @cache
    def answers(name: str, dtype: str = "bfloat16") -> dict[str, Any]:
        faults = FAULTS if dtype == "float32" else ()
        return started(checkpoint(name), partial(mla.ask, faults=faults), dtype=dtype, **DEFAULT)

    return answers


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_request_has_the_same_bits_in_any_company_at_any_cut_and_in_any_page(
    name: str, dtype: str, found: Callable[..., dict[str, Any]]
) -> None:
    answers, fields = found(name, dtype), CONFIGS[name][1]
    assert answers["preemptions"] > 0 or ON_GPU
    assert answers["cached"][0] >= 128
    vectors = fields["kv_lora_rank"] + fields["qk_rope_head_dim"]
    assert [(kind, size) for kind, size, _ in answers["poisoned"]] == [("MLAAttention", vectors)] * 3
    assert [where for where in SAME if answers[where] != answers["alone"]] == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_of_decode_are_those_of_prefill(name: str, dtype: str, found: Callable[..., dict[str, Any]]) -> None:
    assert decodes_as_it_prefills(found(name, dtype))


@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_that_end_around_pages_and_steps_have_the_same_bits_together(
    name: str, found: Callable[..., dict[str, Any]]
) -> None:
    alone, together = found(name)["edges"]
    assert [mla.EDGES[i] for i, one in enumerate(alone) if one != together[i]] == []


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_fault_of_splits_and_of_products_shows(name: str, fault: str, found: Callable[..., dict[str, Any]]) -> None:
    """The negative control."""
    answers = found(name, "float32")
    assert answers[fault] != answers["alone"]


@pytest.mark.parametrize("settings", [UNCACHED, ONE, WHOLE], ids=["no prefix cache", "limits of 1", "whole prompts"])
@pytest.mark.parametrize("name", CONFIGS)
def test_other_limits_move_no_bit(
    name: str, settings: dict[str, Any], found: Callable[..., dict[str, Any]], checkpoint: Callable[[str], Path]
) -> None:
    assert started(checkpoint(name), kept_states.alone, **settings) == found(name)["alone"]


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_are_near_transformers_in_float64(
    name: str, found: Callable[..., dict[str, Any]], checkpoint: Callable[[str], Path]
) -> None:
    assert distance_from_float64(checkpoint(name), found(name, "float32")["alone"]) < NEAR


@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision_keeps_its_bits(name: str, checkpoint: Callable[[str], Path]) -> None:
    other = started(checkpoint(name), kept_states.ask_briefly, dtype="float16", **DEFAULT)
    assert other["among others"] == other["alone"]
    assert decodes_as_it_prefills(other)


@untried_on_gpu
def test_an_answer_is_that_of_plain_decoding_whatever_is_proposed(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """And where verify steps scale scores otherwise. GPUs refuse fp32."""
    settings = {"dtype": "float16" if ON_GPU else "float32"} | DEFAULT
    found = kept_states.with_any_drafts(started, checkpoint("V2-Lite"), tmp_path, "soften_verify_steps", settings)
    kept_states.check_drafts(found)


@BY_ANY_THAT_DRAFT
@pytest.mark.parametrize("name", CONFIGS)
def test_n_grams_leave_answers_alone(name: str, workers: int, tmp_path: Path) -> None:
    """Beside a prefix cache, which plain decoding has not."""
    folder = mla.written(name, tmp_path, **heads_for(name, workers))
    settings, cached = UNCACHED | kept_states.shared_by(workers), {"enable_prefix_caching": True}
    differing, counted = kept_states.with_drafts(started, folder, NGRAMS, REPEATING, settings, **cached)
    assert differing == []
    assert counted["accepted"] > 0


@BY_ANY_THAT_DRAFT
@pytest.mark.parametrize("name", ["V3", "GLM-4.7-Flash"])
def test_a_layer_that_predicts_more_tokens_leaves_answers_alone(name: str, workers: int, tmp_path: Path) -> None:
    """Three drafts run it three times; beside a prefix cache, which plain decoding has not. And not where verify steps
    scale scores otherwise, or, on a GPU, whose graphs keep what they were captured with, where all are accepted.
    """
    folder = predict_by_last_layer(mla.written(name, tmp_path, **heads_for(name, workers)), likely=8)
    asked, drafts = kept_states.drafted_requests()[::3], {"method": "mtp"}
    settings, cached = UNCACHED | kept_states.shared_by(workers), {"enable_prefix_caching": True}
    fault = "accept_every_draft" if ON_GPU else "soften_verify_steps"
    differing, counted, faulty = kept_states.with_drafts(
        started, folder, drafts, asked, settings, fault=fault, **cached
    )
    assert differing == []
    assert faulty != [], "the negative control"
    assert 0 < counted["accepted"] < counted["drafts"]
    assert counted["preemptions"] > 0


@kept_states.BY_WORKERS
@pytest.mark.parametrize("name", ["V2-Lite", "V3", "GLM-4.7-Flash"])
def test_workers_keep_their_bits_and_are_near_transformers_in_float64(name: str, tmp_path: Path, workers: int) -> None:
    """They share heads and experts; each has all of the latent cache."""
    folder, dtype = mla.written(name, tmp_path, **heads_for(name, workers)), "bfloat16" if ON_GPU else "float32"
    settings = {"tensor_parallel_size": workers, "dtype": dtype} | DEFAULT
    variables = UNTRIED_THERE | kept_states.cores_of(workers)
    shared = kept_states.started(folder, mla.ask, variables=variables, **settings)
    assert [where for where in SAME if shared[where] != shared["alone"]] == []
    assert decodes_as_it_prefills(shared)
    assert ON_GPU or distance_from_float64(folder, shared["alone"]) < NEAR
    assert started(folder, kept_states.alone, dtype=dtype, **DEFAULT) != shared["alone"]


@pytest.mark.parametrize("name", ["V2-Lite", "V3"])
def test_replaced_weights_give_the_bits_of_a_fresh_engine(
    name: str, found: Callable[..., dict[str, Any]], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """W_UK and W_UV among them, which no weight has the name of."""
    first, other = str(checkpoint(name)), str(mla.written(name, tmp_path, seed=1))

    fresh = {other: started(other, kept_states.alone), first: found(name)["alone"]}
    assert fresh[other] != fresh[first]
    asked = partial(kept_states.replaced, folders=(other, first), ways=WAYS)
    answers = started(first, asked, worker_extension_cls=EXTENSION, weight_transfer_config='{"backend": "files"}')
    assert [how for how, answer in answers.items() if answer != fresh[how[1]]] == []


def test_the_text_of_a_published_model_has_the_bits_of_the_text_model(
    found: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    path = multimodal.python_path(tmp_path / "path")
    folder = mla.written_around(tmp_path)
    as_text = started(folder, kept_states.ask_briefly, path=path, language_model_only=True, **DEFAULT)
    assert as_text["alone"] == as_text["among others"] == found("Moonlight")["alone"]


@pytest.mark.skipif(not ON_GPU, reason="a CPU has no graphs")
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_without_cuda_graphs_have_the_same_bits(
    name: str, found: Callable[..., dict[str, Any]], checkpoint: Callable[[str], Path]
) -> None:
    launched = started(checkpoint(name), kept_states.ask_briefly, **DEFAULT | {"enforce_eager": True})
    assert launched["among others"] == launched["alone"] == found(name)["alone"]


@pytest.mark.skipif(ON_GPU, reason="on a GPU these models are too small for plain vLLM to vary")
def test_plain_vllm_fails_the_same_comparison(checkpoint: Callable[[str], Path]) -> None:
    """Its kernel for CPUs has vectors of 512 and 64 elements alone."""
    company = partial(kept_states.in_company, length=118)
    settings = {"enforce_eager": True, "dtype": "float32"}
    plain = kept_states.started(checkpoint("V3"), company, "0", **settings)
    assert plain[0] != plain[1]
