"""Gemma 4 as text, whose layers have heads of two sizes and may read each other's KV cache: a request has the same bits
alone and among others, from chunks of any size, after a preemption, from the prefix cache, and in pages of NaN.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine import gemma4, kept_states, multimodal
from tests.engine.drafters import prefer_few
from tests.engine.engines import UNTRIED_THERE, untried_on_gpu
from tests.engine.gemma4 import AROUND, CONFIGS, FAULTS
from tests.engine.kept_states import ON_GPU, REPEATING, SAME, decodes_as_it_prefills, distance_from_float64
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.harness.requests import NGRAMS

COVERED = reviews.ran().on_gpus if ON_GPU else reviews.ran().large_heads["cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
DEFAULT = {"max_num_batched_tokens": 61, "num_gpu_blocks_override": 40}
"""With so few pages some requests are preempted."""
FEW_PAGES = {} if ON_GPU else {"E2B": {"num_gpu_blocks_override": 11}}
"""Of one whose layers share them."""
UNCACHED = DEFAULT | {"enable_prefix_caching": False, "max_num_batched_tokens": 47}
ONE = {"max_num_seqs": 1, "max_num_batched_tokens": 1}
WAYS = ("by_reload_weights", "by_transfer", "by_buckets", "by_name")
EXTENSION = "tests.engine.reloads.Extension"
NEAR = 1e-4
"""Of logprobs in fp32; in bf16 a token may get other experts."""
in_graphs = pytest.mark.skipif(not ON_GPU, reason="a CPU has no graphs")
started = partial(kept_states.started, variables=UNTRIED_THERE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(name: str) -> Path:
        return gemma4.written(name, tmp_path_factory.mktemp("gemma4"))

    return made


@pytest.fixture(scope="module")
def found(checkpoint: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    """As vLLM starts: with a prefix cache."""

    @cache
    def answers(name: str) -> dict[str, Any]:
        return started(checkpoint(name), partial(gemma4.ask, faults=FAULTS), **DEFAULT | FEW_PAGES.get(name, {}))

    return answers


@pytest.mark.parametrize("name", CONFIGS)
def test_a_request_has_the_same_bits_in_any_company_at_any_cut_and_in_any_page(
    name: str, found: Callable[[str], dict[str, Any]]
) -> None:
    answers = found(name)
    assert answers["preemptions"] > 0 or ON_GPU
    assert answers["cached"][0] >= 128
    assert {size for _, size, _ in answers["poisoned"]} == {256, 512}
    assert [reads for *_, reads in answers["poisoned"]].count(True) == CONFIGS[name].get("num_kv_shared_layers", 0)
    assert [where for where in SAME if answers[where] != answers["alone"]] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_of_decode_are_those_of_prefill(name: str, found: Callable[[str], dict[str, Any]]) -> None:
    assert decodes_as_it_prefills(found(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_that_end_around_windows_and_pages_have_the_same_bits_together(
    name: str, found: Callable[[str], dict[str, Any]]
) -> None:
    alone, together = found(name)["edges"]
    assert [gemma4.EDGES[i] for i, one in enumerate(alone) if one != together[i]] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fault_of_windows_of_shared_caches_and_of_experts_shows(
    name: str, found: Callable[[str], dict[str, Any]]
) -> None:
    """The negative control."""
    answers = found(name)
    planted = [fault for fault in FAULTS if answers[fault, "did"]]
    assert len(planted) == (1 if name == "31B" else 2)
    assert [fault for fault in planted if answers[fault] == answers["alone"]] == []


@pytest.mark.parametrize("settings", [UNCACHED, ONE], ids=["no prefix cache", "limits of 1"])
@pytest.mark.parametrize("name", CONFIGS)
def test_other_limits_move_no_bit(
    name: str, settings: dict[str, Any], found: Callable[[str], dict[str, Any]], checkpoint: Callable[[str], Path]
) -> None:
    assert started(checkpoint(name), kept_states.alone, **settings) == found(name)["alone"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_other_dtypes_keep_their_bits_and_are_near_transformers_in_float64(
    name: str, dtype: str, checkpoint: Callable[[str], Path]
) -> None:
    other = started(checkpoint(name), kept_states.ask_briefly, dtype=dtype, **DEFAULT)
    assert other["among others"] == other["alone"]
    assert decodes_as_it_prefills(other)
    if dtype == "float32":
        assert distance_from_float64(checkpoint(name), other["alone"]) < NEAR


@untried_on_gpu
def test_an_answer_is_that_of_plain_decoding_whatever_is_proposed(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """And not where verify steps scale scores otherwise."""
    settings = {"dtype": "float32", "max_num_batched_tokens": 61}
    found = kept_states.with_any_drafts(started, checkpoint("E2B"), tmp_path, "soften_verify_steps", settings)
    kept_states.check_drafts(found)


@pytest.mark.parametrize("name", CONFIGS)
def test_n_grams_leave_answers_alone(name: str, checkpoint: Callable[[str], Path]) -> None:
    """Beside a prefix cache, which plain decoding has not."""
    settings, cached = UNCACHED | FEW_PAGES.get(name, {}), {"enable_prefix_caching": True} | kept_states.IN_GRAPHS
    differing, counted = kept_states.with_drafts(started, checkpoint(name), NGRAMS, REPEATING, settings, **cached)
    assert differing == []
    assert counted["accepted"] > 0


@untried_on_gpu
@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=in_graphs)], ids=["eager", "in graphs"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_drafter_that_reads_its_caches_leaves_answers_alone(name: str, graphs: bool, tmp_path: Path) -> None:
    """Beside a prefix cache, which plain decoding has not. And not where verify steps scale scores otherwise."""
    folder = prefer_few(gemma4.written(name, tmp_path / "model"))
    drafter = prefer_few(gemma4.written_drafter(name, tmp_path / "drafter"))
    asked, drafts = kept_states.drafted_requests()[::3], {"method": "mtp", "model": str(drafter)}
    cached = {"enable_prefix_caching": True} | (kept_states.IN_GRAPHS if graphs else {})
    differing, counted, *faulty = kept_states.with_drafts(
        started, folder, drafts, asked, UNCACHED, fault="" if graphs else "soften_verify_steps", **cached
    )
    assert differing == []
    assert 0 < counted["accepted"] < counted["drafts"]
    assert [] not in faulty


@kept_states.needs_two_gpus
@pytest.mark.parametrize("name", CONFIGS)
def test_two_gpus_in_graphs_leave_a_request_its_bits(name: str, checkpoint: Callable[[str], Path]) -> None:
    kept_states.check_workers_without_a_tree(kept_states.started, checkpoint(name), DEFAULT | kept_states.IN_GRAPHS)


@kept_states.BY_WORKERS
@pytest.mark.parametrize("name", CONFIGS)
def test_workers_keep_their_bits_and_are_near_transformers_in_float64(
    name: str, checkpoint: Callable[[str], Path], workers: int
) -> None:
    """Some have the same heads of keys."""
    variables = UNTRIED_THERE | kept_states.cores_of(workers)
    settings = {"tensor_parallel_size": workers, "dtype": "float32"} | DEFAULT
    shared = kept_states.started(checkpoint(name), gemma4.ask, variables=variables, **settings)
    assert [where for where in SAME if shared[where] != shared["alone"]] == []
    assert decodes_as_it_prefills(shared)
    assert distance_from_float64(checkpoint(name), shared["alone"]) < NEAR
    assert started(checkpoint(name), kept_states.alone, dtype="float32", **DEFAULT) != shared["alone"]


@pytest.mark.parametrize("name", CONFIGS)
def test_replaced_weights_give_the_bits_of_a_fresh_engine(
    name: str, found: Callable[[str], dict[str, Any]], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    first, other = str(checkpoint(name)), str(gemma4.written(name, tmp_path, seed=1))

    fresh = {other: started(other, kept_states.alone), first: found(name)["alone"]}
    assert fresh[other] != fresh[first]
    asked = partial(kept_states.replaced, folders=(other, first), ways=WAYS)
    answers = started(first, asked, worker_extension_cls=EXTENSION, weight_transfer_config='{"backend": "files"}')
    assert [how for how, answer in answers.items() if answer != fresh[how[1]]] == []


@pytest.mark.parametrize("name", AROUND)
def test_the_text_of_a_published_model_has_the_bits_of_the_text_model(
    name: str, found: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    path = multimodal.python_path(tmp_path / "path")
    folder = gemma4.written_around(name, tmp_path / "model")
    as_text = started(folder, kept_states.ask_briefly, path=path, language_model_only=True, **DEFAULT)
    assert as_text["alone"] == as_text["among others"] == found(AROUND[name][0])["alone"]


@in_graphs
@pytest.mark.parametrize("settings", [DEFAULT, UNCACHED], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_in_cuda_graphs_have_the_same_bits(
    name: str, settings: dict[str, Any], found: Callable[[str], dict[str, Any]], checkpoint: Callable[[str], Path]
) -> None:
    replayed = started(checkpoint(name), gemma4.ask, **settings | {"enforce_eager": False})
    assert [where for where in SAME if replayed[where] != found(name)["alone"]] == []


@pytest.mark.skipif(ON_GPU, reason="on a GPU these models are too small for plain vLLM to vary")
@pytest.mark.parametrize("name", CONFIGS)
def test_plain_vllm_fails_the_same_comparison(name: str, checkpoint: Callable[[str], Path]) -> None:
    company = partial(kept_states.in_company, length=118)
    plain = kept_states.started(checkpoint(name), company, "0", enforce_eager=True, dtype="float32", **DEFAULT)
    assert plain[0] != plain[1]
