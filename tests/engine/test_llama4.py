"""Llama 4 as text, some of whose layers see a token's own chunk alone: a request has the same bits alone and among
others, at any cut, after a preemption, from the prefix cache, and in pages of NaN.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine import kept_states, llama4, multimodal
from tests.engine.engines import untried_on_gpu
from tests.engine.kept_states import ON_GPU, SAME, decodes_as_it_prefills, distance_from_float64, started
from tests.engine.quantised_layers import FORMS, MODELOPT, NVFP4, with_scales_of_cache, write
from vllm_batch_invariant.envs import TP_TREE
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.harness.worker import Engine

COVERED = reviews.ran().chunks["cuda" if ON_GPU else "cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
DEFAULT = {"max_num_batched_tokens": 61, "num_gpu_blocks_override": 60, "block_size": 32, "dtype": "float32"}
"""With so few pages some requests are preempted."""
UNCACHED = DEFAULT | {"enable_prefix_caching": False, "max_num_batched_tokens": 47}
ONE = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "block_size": 32, "dtype": "float32"}
WAYS = ("by_reload_weights", "by_transfer", "by_buckets", "by_name")
EXTENSION = "tests.engine.reloads.Extension"
NEAR = 1e-4
"""Of logprobs; in bf16 a token may get another expert."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama4.written(tmp_path_factory.mktemp("llama4"))


@pytest.fixture(scope="module")
def found(checkpoint: Path) -> Callable[[], dict[str, Any]]:
    """As vLLM starts: with a prefix cache."""

    @cache
    def answers() -> dict[str, Any]:
        return started(checkpoint, partial(llama4.ask, faults=llama4.FAULTS), **DEFAULT)

    return answers


def test_a_request_has_the_same_bits_in_any_company_at_any_cut_and_in_any_page(
    found: Callable[[], dict[str, Any]],
) -> None:
    answers = found()
    assert answers["preemptions"] > 0
    assert answers["cached"][0] >= 128
    assert [kind for kind, *_ in answers["poisoned"]].count("ChunkedLocalAttention") == 3
    assert [where for where in SAME if answers[where] != answers["alone"]] == []


def test_logprobs_of_decode_are_those_of_prefill(found: Callable[[], dict[str, Any]]) -> None:
    assert decodes_as_it_prefills(found())


def test_prompts_that_end_around_chunks_and_pages_have_the_same_bits_together(
    found: Callable[[], dict[str, Any]],
) -> None:
    alone, together = found()["edges"]
    assert [llama4.EDGES[i] for i, one in enumerate(alone) if one != together[i]] == []


@pytest.mark.parametrize("fault", llama4.FAULTS)
def test_a_fault_of_chunks_and_of_experts_shows(fault: str, found: Callable[[], dict[str, Any]]) -> None:
    """The negative control."""
    assert found()[fault] != found()["alone"]


@pytest.mark.parametrize("settings", [UNCACHED, ONE], ids=["no prefix cache", "limits of 1"])
def test_other_limits_move_no_bit(
    settings: dict[str, Any], found: Callable[[], dict[str, Any]], checkpoint: Path
) -> None:
    assert started(checkpoint, kept_states.alone, **settings) == found()["alone"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_keep_their_bits(dtype: str, checkpoint: Path) -> None:
    other = started(checkpoint, kept_states.ask_briefly, **DEFAULT | {"dtype": dtype})
    assert other["among others"] == other["alone"]
    assert decodes_as_it_prefills(other)


def test_logprobs_are_near_transformers_in_float64(found: Callable[[], dict[str, Any]], checkpoint: Path) -> None:
    assert distance_from_float64(checkpoint, found()["alone"]) < NEAR


def by_workers(checkpoint: Path, workers: int, tree: str, ask: Callable[[Engine], Any]) -> Any:
    """What is found of an engine of workers, who have experts whole where they add by a tree."""
    variables = {TP_TREE.name: tree} | kept_states.cores_of(workers)
    settings = {"tensor_parallel_size": workers, "enable_expert_parallel": tree != "1"} | DEFAULT
    return started(checkpoint, ask, variables=variables, **settings)


@untried_on_gpu
@kept_states.needs_two
def test_two_workers_keep_their_bits_and_are_near_transformers_in_float64(
    found: Callable[[], dict[str, Any]], checkpoint: Path
) -> None:
    fault = llama4.FAULTS[1]
    shared = by_workers(checkpoint, 2, "1", partial(llama4.ask, faults=(fault,)))
    assert [where for where in SAME if shared[where] != shared["alone"]] == []
    assert decodes_as_it_prefills(shared)
    assert distance_from_float64(checkpoint, shared["alone"]) < NEAR
    assert shared[fault] != shared["alone"], "the negative control"
    assert found()["alone"] != shared["alone"], "the negative control"


@untried_on_gpu
@kept_states.needs_two
def test_by_a_tree_two_workers_have_the_bits_of_one(checkpoint: Path) -> None:
    one, two = (by_workers(checkpoint, workers, "2", kept_states.ask_briefly) for workers in (1, 2))
    assert one["alone"] == one["among others"] == two["alone"] == two["among others"]


def test_replaced_weights_give_the_bits_of_a_fresh_engine(
    found: Callable[[], dict[str, Any]], checkpoint: Path, tmp_path: Path
) -> None:
    first, other = str(checkpoint), str(llama4.written(tmp_path, seed=1))

    fresh = {other: started(other, kept_states.alone, **DEFAULT), first: found()["alone"]}
    assert fresh[other] != fresh[first]
    asked = partial(kept_states.replaced, folders=(other, first), ways=WAYS)
    more = DEFAULT | {"worker_extension_cls": EXTENSION, "weight_transfer_config": '{"backend": "files"}'}
    answers = started(first, asked, **more)
    assert [how for how, answer in answers.items() if answer != fresh[how[1]]] == []


def test_a_longest_request_that_decides_bits_is_told(tmp_path: Path) -> None:
    """Of one above 32768 tokens late ones have a temperature, where the checkpoint does not say so."""
    folder = llama4.leave_temperatures_to_vllm(llama4.written(tmp_path))

    def ask(engine: Engine) -> tuple[Any, str]:
        return kept_states.alone(engine), engine.call("tests.engine.llama4:told")["attn_temperature_tuning"]

    room = DEFAULT | {"num_gpu_blocks_override": 1300}
    short, long = (started(folder, ask, **room | {"max_model_len": length}) for length in (512, 40000))
    assert (short[1], long[1]) == ("False", "True")
    assert short[0] != long[0]


def test_the_text_of_a_published_model_has_the_bits_of_the_text_model(
    found: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    path = multimodal.python_path(tmp_path / "path")
    folder = llama4.written_around(tmp_path / "model")
    as_text = started(folder, kept_states.ask_briefly, path=path, language_model_only=True, **DEFAULT)
    assert as_text["alone"] == as_text["among others"] == found()["alone"]


@pytest.mark.parametrize("in_fp8", [False, True], ids=["cache in 16 bits", "cache in FP8"])
@pytest.mark.parametrize("form", [MODELOPT, NVFP4[1]])
def test_codes_of_weights_and_of_a_cache_keep_their_bits(form: str, in_fp8: bool, tmp_path: Path) -> None:
    """Of a published model as text, as ModelOpt stores its experts."""
    folder = write(llama4.written_around(tmp_path / "source"), FORMS[form], tmp_path / "packed")
    if in_fp8:
        with_scales_of_cache(folder)
    settings = DEFAULT | {"dtype": "bfloat16", "language_model_only": True}
    path = multimodal.python_path(tmp_path / "path")
    answers = started(folder, partial(llama4.ask, faults=llama4.FAULTS), path=path, **settings)
    assert answers["preemptions"] > 0
    assert answers["cached"][0] >= 128
    assert [where for where in SAME if answers[where] != answers["alone"]] == []
    assert decodes_as_it_prefills(answers)
    alone, together = answers["edges"]
    assert alone == together
    assert [fault for fault in llama4.FAULTS if answers[fault] == answers["alone"]] == [], "the negative control"


def test_plain_vllm_fails_the_same_comparison(checkpoint: Path) -> None:
    company = partial(kept_states.in_company, length=118)
    plain = kept_states.started(checkpoint, company, "0", enforce_eager=True, **DEFAULT)
    assert plain[0] != plain[1]
