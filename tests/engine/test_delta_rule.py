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
from tests.engine.kept_states import ON_GPU, SAME, decodes_as_it_prefills, distance_from_float64
from tests.engine.states import FAULTS
from vllm_batch_invariant.envs import UNTRIED
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points

COVERED = reviews.ran().on_gpus if ON_GPU else reviews.ran().delta_rules["cpu"]
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
TRITON_ALONE = {"gdn_prefill_backend": "triton"} if ON_GPU else {}
"""Of plain vLLM, for which FlashInfer need not be installed."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """With what vLLM's file of the model imports for images."""
    path = multimodal.python_path(tmp_path_factory.mktemp("path"))
    ask = partial(kept_states.ask, of=STATES, length=LENGTH)
    return partial(kept_states.started, afterwards=ask, path=path, variables={UNTRIED.name: "1"}, **PAGES)


def written(model: transformers.PreTrainedModel, folder: Path) -> Path:
    """Random weights in bf16. Gates are near 1, so that a token reads states of long ago: with others a model shows no
    difference that its states have.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3 if "conv1d" in name else 0.08, generator=generator)
            elif name.endswith("A_log"):
                weight.uniform_(0.002, 0.05, generator=generator).log_()
            elif name.endswith("dt_bias"):
                weight.zero_()
    model.bfloat16().save_pretrained(folder)
    return folder


def text_model(settings: dict[str, Any], folder: Path) -> Path:
    return written(transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**settings)), folder)


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
    assert found["preemptions"] > 0
    assert found["pages"] > 0
    assert found["cached"][0] >= 256
    assert [name for name in SAME if found[name] != found["alone"]] == []


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
@pytest.mark.skipif(not ON_GPU, reason="a CPU has no graphs")
@pytest.mark.parametrize("settings", [DEFAULT, UNCACHED], ids=["prefix cache", "no prefix cache"])
def test_steps_of_decode_in_cuda_graphs_have_the_same_bits(
    started: Callable[..., Any], found: dict[str, Any], checkpoint: Path, settings: dict[str, Any]
) -> None:
    replayed = started(checkpoint, **settings | {"enforce_eager": False})
    assert [name for name in SAME if replayed[name] != found["alone"]] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.skipif(not ON_GPU, reason="no graphs"))])
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
    other = started(checkpoint, dtype=dtype, **settings)
    assert other["preemptions"] > 0
    assert [name for name in SAME if other[name] != other["alone"]] == []
    assert distance_from_float64(checkpoint, other["alone"]) < near


@pytest.mark.exhaustive
def test_a_multimodal_checkpoint_as_text_has_the_bits_of_the_text_model(
    started: Callable[..., Any], found: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    """With M-RoPE, as Qwen3.5 is published."""
    text = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    config = multimodal.qwen3_5(kept_states.QWEN3_5)
    whole = transformers.AutoModelForImageTextToText.from_config(config).bfloat16()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    of_text = started(tmp_path, afterwards=kept_states.alone, language_model_only=True, max_num_batched_tokens=61)
    assert of_text == found["alone"]


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
