"""Nemotron-H, Granite 4 H and Falcon-H1, whose state spaces of Mamba-2 keep a state: a request has the same bits alone
and among others, from chunks of any size, after a preemption, from the prefix cache, and in a page that another has
left.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers

from tests.engine import kept_states
from tests.engine.drafters import add_nemotron_mtp
from tests.engine.engines import UNTRIED_THERE, differing_answers, untried_on_gpu
from tests.engine.kept_states import ON_GPU, REPEATING, SAME, decodes_as_it_prefills, distance_from_float64, written
from tests.engine.states import FAULTS
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.harness.requests import NGRAMS
from vllm_batch_invariant.verify.harness.worker import EngineFailed

COVERED = reviews.ran().on_gpus if ON_GPU else reviews.ran().mamba2["cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
NEAR = 0.25
"""Of logprobs in bf16."""
PAGES = {"block_size": 128} if ON_GPU else {}
"""Of keys, of which vLLM makes one page as large as a state: a CPU's."""
DEFAULT = {"max_num_batched_tokens": 61, "num_gpu_blocks_override": 18}
"""With so few pages some requests are preempted."""
UNCACHED = {"enable_prefix_caching": False, "max_num_batched_tokens": 61}
"""A request then has one state, and a prompt is cut anywhere, not also at the ends of pages."""
LENGTH = 250
"""Of prompts that need a page of keys more than they begin with."""
STATES = ("ConvStates", "DeltaStates")


class Family(NamedTuple):
    model: type[transformers.PreTrainedModel]
    config: type[transformers.PreTrainedConfig]
    sizes: dict[str, Any]
    groups: int = 3
    """Of layers that share pages."""

    def few_pages(self, dtype: str = "bfloat16") -> dict[str, int]:
        """Without a prefix cache, for some requests to be preempted. Pages of fp32 have fewer tokens, so that a prompt
        takes more of them.
        """
        return {"num_gpu_blocks_override": (16 if dtype == "float32" else 12) * self.groups // 3}

    def checkpoint(self, folder: Path, **sizes: Any) -> Path:
        return written(self.model(self.config(**self.sizes | sizes)), folder)


_GRANITE = transformers.GraniteMoeHybridForCausalLM, transformers.GraniteMoeHybridConfig
FAMILIES = {
    "Nemotron-H": Family(transformers.NemotronHForCausalLM, transformers.NemotronHConfig, kept_states.NEMOTRON_H),
    "Granite-4-H": Family(*_GRANITE, kept_states.GRANITE_4_H),
    "Falcon-H1": Family(transformers.FalconH1ForCausalLM, transformers.FalconH1Config, kept_states.FALCON_H1, 2),
}
AS_PUBLISHED = {
    "Nemotron-H": {
        "hidden_size": 512,
        "num_attention_heads": 4,
        "head_dim": 128,
        "n_groups": 8,
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
    },
    "Granite-4-H": {
        "hidden_size": 512,
        "num_attention_heads": 4,
        "mamba_n_heads": 16,
        "mamba_d_state": 128,
        "mamba_expand": 2,
    },
    "Falcon-H1": {
        "hidden_size": 512,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_rms_norm": True,
    },
}
"""With heads, states and groups of the sizes of published models, whose pages of keys are no power of two."""
SMALL_STATES = {
    "Nemotron-H": {"mamba_num_heads": 2, "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 1},
    "Granite-4-H": {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16},
    "Falcon-H1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 2,
        "mamba_d_head": 32,
        "mamba_d_state": 32,
        "mamba_n_groups": 1,
    },
}
GROUPS_FOR: dict[str, dict[int, dict[str, int]]] = {
    "Nemotron-H": {2: {}, 4: {"mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 4}},
    "Falcon-H1": {2: {}, 4: {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 4}},
}
"""Changes by which a number of workers divides the groups."""
PAGE = 64
"""Of keys, in tokens, no smaller than such states."""
EXPERTS = {
    "Granite-4-H": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Nemotron-H": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), 128),
        "routed_scaling_factor": 2.5,
    },
}
"""Of Nemotron-H without a gate, as Nemotron 3 Nano has them."""
LATENT = EXPERTS["Nemotron-H"] | {"moe_latent_size": 128}
"""As Nemotron 3 Super has them: experts of vectors of that size, between two linear layers."""
started: Callable[..., Any] = partial(
    kept_states.started,
    afterwards=partial(kept_states.ask, of=STATES, length=LENGTH),
    **PAGES,
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def checkpoint(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.checkpoint(tmp_path_factory.mktemp("hybrid"))


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
    for states in STATES:
        assert distance_from_float64(checkpoint, found[f"a chunk begins anew: {states}"]) > 4 * NEAR


@pytest.mark.parametrize(("states", "fault"), [(states, fault) for states in STATES for fault in FAULTS[states]])
def test_a_fault_of_the_states_shows(found: dict[str, Any], states: str, fault: str) -> None:
    assert found[f"{fault}: {states}"] != found["alone"]


def test_without_a_prefix_cache_the_bits_are_the_same(found: dict[str, Any], family: Family, checkpoint: Path) -> None:
    uncached = started(checkpoint, **UNCACHED, **family.few_pages())
    assert uncached["preemptions"] > 0
    assert [name for name in SAME if uncached[name] != found["alone"]] == []


@pytest.mark.skipif(not ON_GPU, reason="a CPU has no graphs")
@pytest.mark.parametrize("cached", [True, False], ids=["prefix cache", "no prefix cache"])
def test_steps_of_decode_in_cuda_graphs_have_the_same_bits(
    found: dict[str, Any], checkpoint: Path, cached: bool
) -> None:
    settings = DEFAULT if cached else UNCACHED | {"num_gpu_blocks_override": 12}
    # vLLM wants a page for each request of the largest graph
    replayed = started(checkpoint, **settings | {"enforce_eager": False, "max_num_seqs": 8})
    assert [name for name in SAME if replayed[name] != found["alone"]] == []


@pytest.mark.parametrize("name", AS_PUBLISHED)
@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.skipif(not ON_GPU, reason="no graphs"))])
def test_layers_of_published_sizes_keep_their_bits(tmp_path: Path, name: str, eager: bool) -> None:
    folder = FAMILIES[name].checkpoint(tmp_path, **AS_PUBLISHED[name])
    own_pages = {"block_size": 16} if ON_GPU else {}
    brief = started(
        folder, afterwards=kept_states.ask_briefly, max_num_batched_tokens=61, enforce_eager=eager, **own_pages
    )
    assert brief["among others"] == brief["alone"]
    assert decodes_as_it_prefills(brief)
    assert distance_from_float64(folder, brief["alone"]) < NEAR


@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-4), ("float16", NEAR / 4)])
def test_other_dtypes_keep_their_bits(family: Family, checkpoint: Path, dtype: str, near: float) -> None:
    other = started(checkpoint, dtype=dtype, variables=UNTRIED_THERE, **UNCACHED, **family.few_pages(dtype))
    assert other["preemptions"] > 0
    assert [name for name in SAME if other[name] != other["alone"]] == []
    assert distance_from_float64(checkpoint, other["alone"]) < near


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_beside_state_spaces_keep_their_bits(tmp_path: Path, name: str) -> None:
    """Near Transformers' in fp32: in bf16 a token may have other experts."""
    folder = FAMILIES[name].checkpoint(tmp_path, **EXPERTS[name])
    other = started(folder, **DEFAULT)
    assert other["preemptions"] > 0
    assert [name for name in SAME if other[name] != other["alone"]] == []
    assert decodes_as_it_prefills(other)
    in_fp32 = started(folder, afterwards=kept_states.alone, variables=UNTRIED_THERE, dtype="float32")
    assert distance_from_float64(folder, in_fp32) < 1e-4
    assert [fault for of in STATES for fault in FAULTS[of] if other[f"{fault}: {of}"] == other["alone"]] == []


@untried_on_gpu
def test_latent_experts_of_a_super_keep_their_bits(tmp_path: Path) -> None:
    """Near Transformers' in fp32."""
    folder = FAMILIES["Nemotron-H"].checkpoint(tmp_path, **LATENT)
    found = started(folder, **DEFAULT)
    kept_states.check_company(found)
    assert decodes_as_it_prefills(found)
    in_fp32 = started(folder, afterwards=kept_states.alone, variables=UNTRIED_THERE, dtype="float32")
    assert distance_from_float64(folder, in_fp32) < 1e-4


@pytest.mark.parametrize("experts", [EXPERTS["Nemotron-H"], LATENT], ids=["Nano", "Super"])
def test_layers_that_predict_more_tokens_leave_answers_alone(tmp_path: Path, experts: dict[str, Any]) -> None:
    """Attention and experts of random weights, which Super is published with; three drafts run them three times."""
    folder = add_nemotron_mtp(FAMILIES["Nemotron-H"].checkpoint(tmp_path, **experts))
    few = kept_states.drafted_requests()[::3]
    differing, counted = kept_states.with_drafts(
        started, folder, {"method": "mtp"}, few, UNCACHED, variables=UNTRIED_THERE, **kept_states.IN_GRAPHS
    )
    assert differing == []
    assert counted["drafts"] > 0


def test_layers_that_predict_more_tokens_beside_a_prefix_cache_leave_answers_alone(tmp_path: Path) -> None:
    sizes = LATENT | SMALL_STATES["Nemotron-H"]
    folder = add_nemotron_mtp(FAMILIES["Nemotron-H"].checkpoint(tmp_path / "small", **sizes))
    ways = [kept_states.WAYS_TO_KEEP_PAGES[0] | {"variables": UNTRIED_THERE} | kept_states.IN_GRAPHS]
    [found] = kept_states.in_kept_pages(kept_states.started, folder, tmp_path, PAGE, ways, {"method": "mtp"})
    assert differing_answers(found["answers"], found["expected"]) == []
    assert found["counts"]["drafts"] > 0
    assert sum(one["cached"] > 0 for one in found["answers"]) > 0


@kept_states.by_first_runner
def test_an_answer_is_that_of_plain_decoding_whatever_is_proposed(
    family: Family, checkpoint: Path, tmp_path: Path
) -> None:
    """And where a step takes drafts for tokens that stay."""
    found = kept_states.with_any_drafts(
        started, checkpoint, tmp_path, "keep_drafts", UNCACHED | family.few_pages(), max_num_seqs=16
    )
    kept_states.check_drafts(found)


@kept_states.by_first_runner
@pytest.mark.parametrize("name", SMALL_STATES)
def test_drafts_beside_a_prefix_cache_leave_answers_alone(name: str, tmp_path: Path) -> None:
    folder = FAMILIES[name].checkpoint(tmp_path / "small", **SMALL_STATES[name])
    found = kept_states.in_kept_pages(kept_states.started, folder, tmp_path, PAGE, kept_states.WAYS_TO_KEEP_PAGES)
    kept_states.check_kept_pages(found)


def test_n_grams_leave_answers_alone(family: Family, checkpoint: Path) -> None:
    """Beside a prefix cache, which plain decoding has not."""
    settings, beside = UNCACHED | family.few_pages(), {"enable_prefix_caching": True, "num_gpu_blocks_override": 18}
    beside |= kept_states.IN_GRAPHS
    differing, counted = kept_states.with_drafts(started, checkpoint, NGRAMS, REPEATING, settings, **beside)
    assert differing == []
    assert counted["accepted"] > 0


@untried_on_gpu
@kept_states.BY_WORKERS
@pytest.mark.parametrize("name", GROUPS_FOR)
def test_workers_have_the_bits_of_one(name: str, tmp_path: Path, workers: int) -> None:
    folder = FAMILIES[name].checkpoint(tmp_path, **GROUPS_FOR[name][workers])
    kept_states.check_workers(started, folder, LENGTH, DEFAULT, {}, workers)


@untried_on_gpu
@kept_states.needs_four
@pytest.mark.parametrize("name", GROUPS_FOR)
def test_four_workers_without_a_tree_leave_a_request_its_bits(name: str, tmp_path: Path) -> None:
    folder = FAMILIES[name].checkpoint(tmp_path, **GROUPS_FOR[name][4])
    kept_states.check_workers_without_a_tree(started, folder, DEFAULT, {}, 4)


@untried_on_gpu
@kept_states.needs_two
@pytest.mark.parametrize("sizes", [EXPERTS["Nemotron-H"], LATENT], ids=["Nano", "Super"])
def test_two_workers_with_whole_experts_have_the_bits_of_one(tmp_path: Path, sizes: dict[str, Any]) -> None:
    folder = FAMILIES["Nemotron-H"].checkpoint(tmp_path, **sizes)
    kept_states.check_workers(started, folder, LENGTH, DEFAULT, UNTRIED_THERE, enable_expert_parallel=True)


@untried_on_gpu
@kept_states.needs_two
@pytest.mark.parametrize("sizes", [EXPERTS["Nemotron-H"], LATENT], ids=["Nano", "Super"])
@pytest.mark.parametrize("whole", [False, True], ids=["by columns", "whole"])
def test_two_workers_share_experts_without_a_tree(tmp_path: Path, sizes: dict[str, Any], whole: bool) -> None:
    folder = FAMILIES["Nemotron-H"].checkpoint(tmp_path, **sizes)
    settings = DEFAULT | {"enable_expert_parallel": whole}
    kept_states.check_workers_without_a_tree(started, folder, settings, UNTRIED_THERE)


@kept_states.needs_two_gpus
@pytest.mark.parametrize("name", GROUPS_FOR)
def test_two_gpus_in_graphs_leave_a_request_its_bits(name: str, tmp_path: Path) -> None:
    folder = FAMILIES[name].checkpoint(tmp_path, **GROUPS_FOR[name][2])
    kept_states.check_workers_without_a_tree(started, folder, DEFAULT | kept_states.IN_GRAPHS)


@untried_on_gpu
@kept_states.BY_WORKERS
def test_workers_that_do_not_divide_the_groups_are_refused(tmp_path: Path, workers: int) -> None:
    folder = FAMILIES["Granite-4-H"].checkpoint(tmp_path)
    with pytest.raises(EngineFailed, match=f"state spaces of Mamba-2 with 1 groups by {workers} workers"):
        started(folder, variables=kept_states.cores_of(workers), tensor_parallel_size=workers)


def test_plain_vllm_fails_the_same_comparison(family: Family, checkpoint: Path) -> None:
    plain = started(
        checkpoint,
        afterwards=partial(kept_states.in_company, length=LENGTH),
        flag="0",
        enforce_eager=True,
        **UNCACHED,
        **family.few_pages(),
    )
    assert plain[0] != plain[1]
