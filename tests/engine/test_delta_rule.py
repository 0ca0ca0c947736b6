"""Qwen3.5, whose gated delta rules keep a state: a request has the same bits alone and among others, from chunks of any
size, after a preemption, from the prefix cache, and in a page that another has left.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine import kept_states, multimodal
from tests.engine.drafters import add_mtp, prefer_few
from tests.engine.engines import UNTRIED_THERE, differing_answers, untried_on_gpu
from tests.engine.kept_states import ON_GPU, REPEATING, SAME, decodes_as_it_prefills, distance_from_float64, written
from tests.engine.states import FAULTS
from vllm_batch_invariant.envs import TP_TREE
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.harness.requests import NGRAMS

COVERED = reviews.ran().delta_rules["cuda" if ON_GPU else "cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
NEAR = 0.25
"""Of logprobs in bf16."""
PAGES = {"block_size": 128} if ON_GPU else {}
"""Of keys, of which vLLM makes one page as large as a state: a CPU's."""
DEFAULT = {"max_num_batched_tokens": 61, "num_gpu_blocks_override": 18}
"""With so few pages some requests are preempted."""
UNCACHED = {"enable_prefix_caching": False, "max_num_batched_tokens": 61, "num_gpu_blocks_override": 12}
"""A request then has one state, and a prompt is cut anywhere, not also at the ends of pages."""
IN_FP32 = UNCACHED | {"num_gpu_blocks_override": 16}
"""Pages of fp32 have fewer tokens, so that a prompt takes more of them."""
LENGTH = 250
"""Of prompts that need a page of keys more than they begin with."""
STATES = ("ConvStates", "DeltaStates")
SMALL_STATES = {
    workers: {
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
        "linear_num_key_heads": workers,
        "linear_num_value_heads": 2 * workers,
    }
    for workers in (1, 2, 4)
}
PAGES_OF = {1: 32, 2: 64, 4: 64}
"""Of keys, in tokens, as large as such states: each of several workers has one head of keys of attention, not two."""
HEADS_FOR: dict[int, dict[str, int]] = {
    2: {},
    4: {
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
}
"""Changes by which a number of workers divides the heads of keys of the rules."""
TRITON_ALONE = {"gdn_prefill_backend": "triton"} if ON_GPU else {}
"""Of plain vLLM, for which FlashInfer need not be installed."""
WITH_EXPERTS = {
    "Qwen3.5-MoE": (transformers.Qwen3_5MoeForCausalLM, transformers.Qwen3_5MoeTextConfig),
    "Qwen3-Next": (transformers.Qwen3NextForCausalLM, transformers.Qwen3NextConfig),
}
"""Each layer has experts, and one that all tokens share, with a gate. Qwen3-Next has the projections of a key head and
its value heads side by side.
"""


IN_GRAPHS = pytest.param(False, marks=pytest.mark.skipif(not ON_GPU, reason="a CPU has no graphs"))
BY_ANY_THAT_DRAFT = kept_states.by_any_that_draft("gated delta rules")
EAGER_OR_NOT = pytest.mark.parametrize("eager", [True, IN_GRAPHS])
OF_GRAPHS: dict[bool, dict[str, Any]] = {True: {}, False: {"enforce_eager": False, "max_num_seqs": 8}}
"""Settings of an engine that is eager or not: vLLM wants a page for each request of the largest graph."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """With what vLLM's file of the model imports for images."""
    path = multimodal.python_path(tmp_path_factory.mktemp("path"))
    ask = partial(kept_states.ask, of=STATES, length=LENGTH)
    return partial(kept_states.started, afterwards=ask, path=path, **PAGES)


def text_model(settings: dict[str, Any], folder: Path) -> Path:
    return written(transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**settings)), folder)


def of_family(family: str, folder: Path, **more: Any) -> Path:
    """A checkpoint of a family, with more settings."""
    if family not in WITH_EXPERTS:
        return text_model(kept_states.QWEN3_5 | more, folder)
    model, config = WITH_EXPERTS[family]
    return written(model(config(**kept_states.QWEN3_5_MOE | more)), folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model(kept_states.QWEN3_5, tmp_path_factory.mktemp("qwen3.5"))


@pytest.fixture(scope="module")
def found(started: Callable[..., Any], checkpoint: Path) -> dict[str, Any]:
    """As vLLM starts: with a prefix cache."""
    return started(checkpoint, **DEFAULT)


@pytest.mark.exhaustive
def test_a_request_has_the_same_bits_alone_and_among_others(started: Callable[..., Any], checkpoint: Path) -> None:
    brief = started(checkpoint, afterwards=kept_states.ask_briefly, max_num_batched_tokens=61)
    assert brief["among others"] == brief["alone"]
    assert decodes_as_it_prefills(brief)
    assert distance_from_float64(checkpoint, brief["alone"]) < NEAR


@pytest.mark.exhaustive
def test_a_request_has_the_same_bits_in_any_company_at_any_cut_and_in_any_page(found: dict[str, Any]) -> None:
    kept_states.check_company(found)


@pytest.mark.exhaustive
def test_logprobs_of_decode_are_those_of_prefill(found: dict[str, Any]) -> None:
    assert decodes_as_it_prefills(found)


@pytest.mark.exhaustive
def test_logprobs_are_near_those_of_transformers_in_float64(found: dict[str, Any], checkpoint: Path) -> None:
    assert distance_from_float64(checkpoint, found["alone"]) < NEAR
    for states in STATES:
        assert distance_from_float64(checkpoint, found[f"a chunk begins anew: {states}"]) > 10 * NEAR


@pytest.mark.exhaustive
@pytest.mark.parametrize(("states", "fault"), [(states, fault) for states in STATES for fault in FAULTS[states]])
def test_a_fault_of_the_states_shows(found: dict[str, Any], states: str, fault: str) -> None:
    assert found[f"{fault}: {states}"] != found["alone"]


@pytest.mark.exhaustive
def test_without_a_prefix_cache_the_bits_are_the_same(
    started: Callable[..., Any], found: dict[str, Any], checkpoint: Path
) -> None:
    uncached = started(checkpoint, **UNCACHED)
    assert uncached["preemptions"] > 0
    assert [name for name in SAME if uncached[name] != found["alone"]] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", ["triton", "flashinfer"])
def test_the_kernel_that_vllm_would_prefill_with_moves_no_bit(
    started: Callable[..., Any], found: dict[str, Any], checkpoint: Path, kernel: str
) -> None:
    named = started(checkpoint, **DEFAULT, gdn_prefill_backend=kernel)
    assert [name for name in SAME if named[name] != found["alone"]] == []


@pytest.mark.exhaustive
@pytest.mark.skipif(not ON_GPU, reason="a CPU has no graphs")
@pytest.mark.parametrize("settings", [DEFAULT, UNCACHED], ids=["prefix cache", "no prefix cache"])
def test_steps_of_decode_in_cuda_graphs_have_the_same_bits(
    started: Callable[..., Any], found: dict[str, Any], checkpoint: Path, settings: dict[str, Any]
) -> None:
    replayed = started(checkpoint, **settings | OF_GRAPHS[False])
    assert [name for name in SAME if replayed[name] != found["alone"]] == []


@pytest.mark.exhaustive
@EAGER_OR_NOT
def test_heads_of_published_sizes_keep_their_bits(started: Callable[..., Any], tmp_path: Path, eager: bool) -> None:
    folder = text_model(kept_states.AS_PUBLISHED, tmp_path)
    own_pages = {"block_size": 16} if ON_GPU else {}
    brief = started(
        folder, afterwards=kept_states.ask_briefly, max_num_batched_tokens=61, enforce_eager=eager, **own_pages
    )
    assert brief["among others"] == brief["alone"]
    assert decodes_as_it_prefills(brief)
    assert distance_from_float64(folder, brief["alone"]) < NEAR


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "settings", "near"), [("float32", IN_FP32, 1e-4), ("float16", UNCACHED, NEAR / 4)])
def test_other_dtypes_keep_their_bits(
    started: Callable[..., Any], checkpoint: Path, dtype: str, settings: dict[str, Any], near: float
) -> None:
    other = started(checkpoint, dtype=dtype, variables=UNTRIED_THERE, **settings)
    assert other["preemptions"] > 0
    assert [name for name in SAME if other[name] != other["alone"]] == []
    assert distance_from_float64(checkpoint, other["alone"]) < near


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_a_family_with_experts_keeps_its_bits(started: Callable[..., Any], family: str, tmp_path: Path) -> None:
    """Near Transformers' in fp32: in bf16 a token may have other experts."""
    model, config = WITH_EXPERTS[family]
    folder = written(model(config(**kept_states.QWEN3_5_MOE)), tmp_path)
    other = started(folder, **DEFAULT)
    assert other["preemptions"] > 0
    assert other["cached"][0] >= 256
    assert [name for name in SAME if other[name] != other["alone"]] == []
    assert decodes_as_it_prefills(other)
    in_fp32 = started(folder, afterwards=kept_states.alone, variables=UNTRIED_THERE, dtype="float32")
    assert distance_from_float64(folder, in_fp32) < 1e-4
    assert [fault for of in STATES for fault in FAULTS[of] if other[f"{fault}: {of}"] == other["alone"]] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_plain_vllm_fails_the_comparison_with_experts(started: Callable[..., Any], family: str, tmp_path: Path) -> None:
    model, config = WITH_EXPERTS[family]
    plain = started(
        written(model(config(**kept_states.QWEN3_5_MOE)), tmp_path),
        afterwards=partial(kept_states.in_company, length=LENGTH),
        flag="0",
        enforce_eager=True,
        **UNCACHED,
    )
    assert plain[0] != plain[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["Qwen3.5", "Qwen3.5-MoE"])
def test_a_multimodal_checkpoint_as_text_has_the_bits_of_the_text_model(
    started: Callable[..., Any], checkpoint: Path, tmp_path: Path, family: str
) -> None:
    """With M-RoPE, as Qwen3.5 is published."""
    folder, sizes = checkpoint, kept_states.QWEN3_5
    if family in WITH_EXPERTS:
        model, config = WITH_EXPERTS[family]
        folder, sizes = written(model(config(**kept_states.QWEN3_5_MOE)), tmp_path / "text"), kept_states.QWEN3_5_MOE
    text = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    whole = transformers.AutoModelForImageTextToText.from_config(multimodal.qwen3_5(sizes)).bfloat16()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    settings = {"afterwards": kept_states.alone, "max_num_batched_tokens": 61}
    as_text = started(tmp_path / "whole", language_model_only=True, **settings)
    assert as_text == started(folder, **settings)


@pytest.mark.exhaustive
@kept_states.BY_WORKERS
def test_workers_have_the_bits_of_one(started: Callable[..., Any], tmp_path: Path, workers: int) -> None:
    """By a tree, which is another order of sums than one worker has without it. Two of four have the same head of
    keys of attention.
    """
    folder = text_model(kept_states.QWEN3_5 | HEADS_FOR[workers], tmp_path)
    kept_states.check_workers(started, folder, LENGTH, DEFAULT, UNTRIED_THERE, workers)


@pytest.mark.exhaustive
@kept_states.BY_WORKERS
def test_workers_without_a_tree_leave_a_request_its_bits(
    started: Callable[..., Any], tmp_path: Path, workers: int
) -> None:
    folder = text_model(kept_states.QWEN3_5 | HEADS_FOR[workers], tmp_path)
    kept_states.check_workers_without_a_tree(started, folder, DEFAULT, UNTRIED_THERE, workers)


@pytest.mark.exhaustive
@kept_states.BY_WORKERS
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_workers_share_experts_too(started: Callable[..., Any], family: str, tmp_path: Path, workers: int) -> None:
    """With bits of their own: of parts of experts there is no tree."""
    model, config = WITH_EXPERTS[family]
    folder = written(model(config(**kept_states.QWEN3_5_MOE | HEADS_FOR[workers])), tmp_path)
    settings = {"max_num_batched_tokens": 61}
    kept_states.check_workers_without_a_tree(started, folder, settings, UNTRIED_THERE, workers)


@pytest.mark.exhaustive
@untried_on_gpu
@kept_states.BY_WORKERS
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_workers_with_whole_experts_have_the_bits_of_one(
    started: Callable[..., Any], family: str, tmp_path: Path, workers: int
) -> None:
    """By a tree; the shared expert has a gate."""
    model, config = WITH_EXPERTS[family]
    folder = written(model(config(**kept_states.QWEN3_5_MOE | HEADS_FOR[workers])), tmp_path)
    kept_states.check_workers(started, folder, LENGTH, DEFAULT | {"enable_expert_parallel": True}, {}, workers)


@pytest.mark.exhaustive
@kept_states.BY_ANY
def test_an_answer_is_that_of_plain_decoding_whatever_is_proposed(
    started: Callable[..., Any], tmp_path: Path, workers: int
) -> None:
    """With a drafter that knows the answers and gives them, others, or none; and where a step takes drafts for tokens
    that stay. By a tree several workers have the answers of one.
    """
    tree = UNTRIED_THERE | ({TP_TREE.name: str(workers)} if workers > 1 else {})
    shared = {"tensor_parallel_size": workers}
    folder = text_model(kept_states.QWEN3_5 | HEADS_FOR.get(workers, {}), tmp_path / "model")
    found = kept_states.with_any_drafts(started, folder, tmp_path, "keep_drafts", UNCACHED, tree, **shared)
    kept_states.check_drafts(found)
    assert found["preemptions"] > 0 or workers == 4  # whose pages have fewer tokens


@pytest.mark.exhaustive
@kept_states.by_first_runner
@BY_ANY_THAT_DRAFT
def test_drafts_beside_a_prefix_cache_leave_answers_alone(
    started: Callable[..., Any], tmp_path: Path, workers: int
) -> None:
    folder = of_family("Qwen3.5", tmp_path / "small", **SMALL_STATES[workers])
    ways = kept_states.WAYS_TO_KEEP_PAGES[: None if workers == 1 else 1]
    shared = kept_states.shared_by(workers)
    kept_states.check_kept_pages(
        kept_states.in_kept_pages(started, folder, tmp_path, PAGES_OF[workers], ways, **shared)
    )


COUNTED = {"Qwen3.5": "accepted", "Qwen3-Next": "drafts"}
"""Random weights of the second repeat nothing that n-grams guess."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["Qwen3.5", "Qwen3-Next"])
@EAGER_OR_NOT
def test_n_grams_leave_answers_alone(
    started: Callable[..., Any], checkpoint: Path, tmp_path: Path, family: str, eager: bool
) -> None:
    folder = checkpoint
    if family in WITH_EXPERTS:
        model, config = WITH_EXPERTS[family]
        folder = written(model(config(**kept_states.QWEN3_5_MOE)), tmp_path)

    of_drafting = {"variables": UNTRIED_THERE} | OF_GRAPHS[eager]
    differing, counted = kept_states.with_drafts(started, folder, NGRAMS, REPEATING, UNCACHED, **of_drafting)
    assert differing == []
    assert counted[COUNTED[family]] > 0


@pytest.mark.exhaustive
@BY_ANY_THAT_DRAFT
@pytest.mark.parametrize("family", ["Qwen3.5", "Qwen3-Next"])
def test_n_grams_beside_a_prefix_cache_leave_answers_alone(
    started: Callable[..., Any], tmp_path: Path, family: str, workers: int
) -> None:
    """Which plain decoding has not. Of models that give few tokens, which repeat."""
    folder = prefer_few(of_family(family, tmp_path, **HEADS_FOR.get(workers, {})))
    settings = UNCACHED | kept_states.shared_by(workers)
    of_drafting = {"enable_prefix_caching": True, "num_gpu_blocks_override": 18} | kept_states.IN_GRAPHS
    differing, counted = kept_states.with_drafts(started, folder, NGRAMS, REPEATING, settings, **of_drafting)
    assert differing == []
    assert 0 < counted["accepted"] < counted["drafts"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["Qwen3.5", *WITH_EXPERTS])
@pytest.mark.parametrize(
    ("workers", "eager"),
    [
        (1, True),
        pytest.param(1, *IN_GRAPHS.values, marks=IN_GRAPHS.marks),
        *(pytest.param(*one.values, not ON_GPU, marks=one.marks) for one in kept_states.WORKERS),
    ],
)
def test_a_layer_that_predicts_more_tokens_leaves_answers_alone(
    started: Callable[..., Any], tmp_path: Path, family: str, workers: int, eager: bool
) -> None:
    """Of random weights; three drafts run it three times."""
    folder = add_mtp(of_family(family, tmp_path, **HEADS_FOR.get(workers, {})))
    few, settings = kept_states.drafted_requests()[::3], UNCACHED | kept_states.shared_by(workers)
    differing, counted = kept_states.with_drafts(started, folder, {"method": "mtp"}, few, settings, **OF_GRAPHS[eager])
    assert differing == []
    assert counted["drafts"] > 0


@pytest.mark.exhaustive
@BY_ANY_THAT_DRAFT
@pytest.mark.parametrize("family", ["Qwen3.5", "Qwen3-Next"])
def test_a_layer_that_predicts_more_tokens_beside_a_prefix_cache_leaves_answers_alone(
    started: Callable[..., Any], tmp_path: Path, family: str, workers: int
) -> None:
    folder = add_mtp(of_family(family, tmp_path / "small", **SMALL_STATES[workers]))
    ways, shared = [kept_states.WAYS_TO_KEEP_PAGES[0] | kept_states.IN_GRAPHS], kept_states.shared_by(workers)
    page, drafts = PAGES_OF[workers], {"method": "mtp"}
    [found] = kept_states.in_kept_pages(started, folder, tmp_path, page, ways, drafts, **shared)
    assert differing_answers(found["answers"], found["expected"]) == []
    assert found["counts"]["drafts"] > 0
    assert sum(one["cached"] > 0 for one in found["answers"]) > 0


@pytest.mark.exhaustive
def test_plain_vllm_fails_the_same_comparison(started: Callable[..., Any], checkpoint: Path) -> None:
    plain = started(
        checkpoint,
        afterwards=partial(kept_states.in_company, length=LENGTH),
        flag="0",
        enforce_eager=True,
        **UNCACHED,
        **TRITON_ALONE,
    )
    assert plain[0] != plain[1]
