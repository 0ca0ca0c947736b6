"""LFM2, whose short convolutions keep a state: a request has the same bits alone and among others, from chunks of any
size, after a preemption, from the prefix cache, and in a page that another has left.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine import kept_states
from tests.engine.engines import untried_on_gpu
from tests.engine.kept_states import ON_GPU, REPEATING, SAME, decodes_as_it_prefills, distance_from_float64
from tests.engine.states import FAULTS
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.harness.requests import NGRAMS

COVERED = reviews.ran().short_convolutions["cuda" if ON_GPU else "cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_dense_layers": 1}
NEAR = 0.25
"""Of logprobs in bf16."""
DEFAULT = {"max_num_batched_tokens": 61, "num_gpu_blocks_override": 28}
"""With so few pages some requests are preempted."""
UNCACHED = {
    "enable_prefix_caching": False, "max_num_seqs": 16, "max_num_batched_tokens": 61, "num_gpu_blocks_override": 20,
}  # fmt: skip
"""A request then has one state, and a prompt is cut anywhere, not also at the ends of pages."""
LENGTH = 118
"""Of prompts that need a page of keys more than they begin with."""
PAGE = 32
"""The smallest of keys that vLLM makes as large as these states."""
STATES = "ConvStates"
started = partial(kept_states.started, afterwards=partial(kept_states.ask, of=[STATES], length=LENGTH))


def written(model: transformers.PreTrainedModel, folder: Path) -> Path:
    """Random weights in bf16, with taps that matter as much as what goes around them. vLLM ties the embeddings of every
    LFM2: they are small, so that a token does not foretell itself, and the last norm makes up for that.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                size = 0.4 if ".conv.conv." in name else 0.02 if "embed_tokens" in name else 0.08
                weight.normal_(0, size, generator=generator)
        for name, bias in model.named_buffers():
            if name.endswith("expert_bias"):
                bias.normal_(0, 0.2, generator=generator)
        model.model.embedding_norm.weight.fill_(8.0)
    model.bfloat16().save_pretrained(folder)
    return folder


def with_experts(folder: Path) -> Path:
    return written(transformers.Lfm2MoeForCausalLM(transformers.Lfm2MoeConfig(**kept_states.LFM2, **EXPERTS)), folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**kept_states.LFM2))
    return written(model, tmp_path_factory.mktemp("lfm2"))


@pytest.fixture(scope="module")
def found(checkpoint: Path) -> dict[str, Any]:
    """As vLLM starts: with a prefix cache."""
    return started(checkpoint, **DEFAULT)


def test_a_request_has_the_same_bits_in_any_company_at_any_cut_and_in_any_page(found: dict[str, Any]) -> None:
    kept_states.check_company(found)


def test_logprobs_of_decode_are_those_of_prefill(found: dict[str, Any]) -> None:
    assert decodes_as_it_prefills(found)


def test_logprobs_are_near_those_of_transformers_in_float64(found: dict[str, Any], checkpoint: Path) -> None:
    assert distance_from_float64(checkpoint, found["alone"]) < NEAR
    assert distance_from_float64(checkpoint, found[f"a chunk begins anew: {STATES}"]) > 10 * NEAR


@pytest.mark.parametrize("fault", FAULTS[STATES])
def test_a_fault_of_the_states_shows(found: dict[str, Any], fault: str) -> None:
    assert found[f"{fault}: {STATES}"] != found["alone"]


@pytest.mark.exhaustive
def test_without_a_prefix_cache_the_bits_are_the_same(found: dict[str, Any], checkpoint: Path) -> None:
    uncached = started(checkpoint, **UNCACHED)
    assert uncached["preemptions"] > 0 or ON_GPU  # where a page holds a request whole
    assert [name for name in SAME if uncached[name] != found["alone"]] == []


@pytest.mark.skipif(not ON_GPU, reason="a CPU has no graphs")
@pytest.mark.parametrize("settings", [DEFAULT, UNCACHED], ids=["prefix cache", "no prefix cache"])
def test_steps_of_decode_in_cuda_graphs_have_the_same_bits(
    found: dict[str, Any], checkpoint: Path, settings: dict[str, Any]
) -> None:
    replayed = started(checkpoint, **settings | {"enforce_eager": False})
    assert [name for name in SAME if replayed[name] != found["alone"]] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_keep_their_bits(checkpoint: Path, dtype: str) -> None:
    other = started(checkpoint, dtype=dtype, **UNCACHED)
    assert [name for name in SAME if other[name] != other["alone"]] == []
    assert distance_from_float64(checkpoint, other["alone"]) < (1e-4 if dtype == "float32" else NEAR / 4)


@pytest.mark.exhaustive
def test_experts_beside_short_convolutions_keep_their_bits(tmp_path: Path) -> None:
    """LFM2-MoE."""
    folder = with_experts(tmp_path)
    kept = started(folder, dtype="float32", **DEFAULT)
    assert kept["preemptions"] > 0
    assert [name for name in SAME if kept[name] != kept["alone"]] == []
    assert distance_from_float64(folder, kept["alone"]) < 1e-4


@pytest.mark.exhaustive
@untried_on_gpu
@kept_states.BY_WORKERS
def test_workers_have_the_bits_of_one(checkpoint: Path, workers: int) -> None:
    kept_states.check_workers(kept_states.started, checkpoint, LENGTH, DEFAULT, {}, workers)


@pytest.mark.exhaustive
@untried_on_gpu
@kept_states.needs_four
def test_four_workers_without_a_tree_leave_a_request_its_bits(checkpoint: Path) -> None:
    kept_states.check_workers_without_a_tree(kept_states.started, checkpoint, DEFAULT, {}, 4)


@pytest.mark.exhaustive
@kept_states.needs_two_gpus
def test_two_gpus_in_graphs_leave_a_request_its_bits(checkpoint: Path) -> None:
    kept_states.check_workers_without_a_tree(kept_states.started, checkpoint, DEFAULT | kept_states.IN_GRAPHS)


@pytest.mark.exhaustive
@kept_states.by_first_runner
def test_an_answer_is_that_of_plain_decoding_whatever_is_proposed(checkpoint: Path, tmp_path: Path) -> None:
    """With drafts that are right, wrong, or missing; and where the inputs before a draft have no room beside it."""
    fault = "leave_no_room_for_drafts"
    found = kept_states.with_any_drafts(kept_states.started, checkpoint, tmp_path, fault, UNCACHED)
    kept_states.check_drafts(found)


@pytest.mark.exhaustive
@kept_states.by_first_runner
def test_drafts_beside_a_prefix_cache_leave_answers_alone(checkpoint: Path, tmp_path: Path) -> None:
    ways = kept_states.WAYS_TO_KEEP_PAGES
    kept_states.check_kept_pages(kept_states.in_kept_pages(kept_states.started, checkpoint, tmp_path, PAGE, ways))


@pytest.mark.parametrize("cached", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize("family", ["LFM2", pytest.param("LFM2-MoE", marks=pytest.mark.exhaustive)])
def test_n_grams_leave_answers_alone(checkpoint: Path, tmp_path: Path, family: str, cached: bool) -> None:
    folder = checkpoint if family == "LFM2" else with_experts(tmp_path)
    beside = {"enable_prefix_caching": True, "block_size": PAGE, "num_gpu_blocks_override": 60} if cached else {}
    beside |= kept_states.IN_GRAPHS
    differing, counted = kept_states.with_drafts(kept_states.started, folder, NGRAMS, REPEATING, UNCACHED, **beside)
    assert differing == []
    assert counted["accepted"] > 0


@pytest.mark.exhaustive
@pytest.mark.skipif(ON_GPU, reason="on a GPU this model is too small for plain vLLM to vary")
def test_plain_vllm_fails_the_same_comparison(checkpoint: Path) -> None:
    """Where its rotary embedding on a CPU is wrong as well."""
    plain = kept_states.started(
        checkpoint, partial(kept_states.in_company, length=LENGTH), "0", enforce_eager=True, **UNCACHED
    )
    assert plain[0] != plain[1]
