"""Multimodal models served as text: encoders are not built, requests with pictures are refused, bits stay."""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.engine import multimodal
from tests.engine.engines import (
    OF_DEVICE,
    PATHS,
    Result,
    concurrent_requests,
    request,
    run,
    some_exhaustive,
    tokens,
)
from vllm_batch_invariant.verify.harness.worker import Engine

pytestmark = pytest.mark.engine

TEXT_ONLY: dict[str, object] = {"language_model_only": True}
FP32: dict[str, object] = {"dtype": "float32"}
"""vLLM would serve such weights in bf16."""
MODELS = {
    "qwen2.5-vl in fp32": (multimodal.qwen2_5_vl(), torch.float32, TEXT_ONLY | FP32),
    "qwen3-vl": (multimodal.qwen3_vl(), torch.bfloat16, TEXT_ONLY),
    "gemma3": (multimodal.gemma3(), torch.bfloat16, {"limit_mm_per_prompt": '{"image": 0}'}),
    "muse-glimmer": (multimodal.muse_glimmer(), torch.bfloat16, TEXT_ONLY),
    "muse-glimmer in fp32": (multimodal.muse_glimmer(), torch.float32, TEXT_ONLY | FP32),
}
"""With the arguments that have each served as text."""
MUSE = ["vision_encoder", "vision_adapter", "vision_projection", "perception_emb_norm"]
ENCODERS = {
    "qwen2.5-vl in fp32": ["visual"],
    "qwen3-vl": ["visual"],
    "gemma3": ["vision_tower", "multi_modal_projector"],
    **{name: MUSE for name in MODELS if "muse" in name},
}
TEXT_MODEL = "qwen2 with the weights of qwen2.5-vl"
PLAIN = "qwen3-vl without the mode"
ALWAYS = ()
"""None where each minute counts: `test_images.py` serves such models, with texts among its requests."""

CONCURRENT = (1, 3, 17, 40)
LENGTHS = (1, 2, 7, 8, 9, 16, 17, 40)
LONG = [request(tokens(110, 60 + i), max_tokens=30) for i in range(18)]
WATCHED = 3
"""So many of the long answers are compared."""
LISTED = ([tokens(45, 21)], [tokens(length, 22) for length in (1, 9)])
PICTURE = (tokens(30, 31), [tokens(length, 32) for length in (1, 20, 45)])
LIMITS = {
    "max_model_len": 1024, "skip_tokenizer_init": True, "max_num_batched_tokens": 128, "max_num_seqs": 64,
    "max_logprobs": -1,
}  # fmt: skip
FEW_PAGES = {} if torch.cuda.is_available() else {"num_gpu_blocks_override": 18}
"""Of 128 keys: the long answers take more."""


def plan() -> list[dict[str, Any]]:
    """A prompt in two chunks alone, with others and from the cache; prompts of some lengths; many long answers."""
    target = request(tokens(150, 1), max_tokens=12)
    steps = [{"name": "alone", "requests": [target]}, {"name": "warm", "requests": [target]}]
    steps += [
        {"name": f"with {n}", "reset_prefix_cache": True, "requests": [*concurrent_requests(n, n), target]}
        for n in CONCURRENT
    ]
    prompts = [request(tokens(length, 7), max_tokens=2) for length in LENGTHS]
    for name, requests, watched in (("prompt", prompts, prompts), ("answer", LONG, LONG[:WATCHED])):
        steps += [{"name": f"{name} {i}", "requests": [one]} for i, one in enumerate(watched)]
        steps.append({"name": f"{name}s", "reset_prefix_cache": True, "requests": requests})
    return steps


def afterwards(running: Engine) -> dict[str, Any]:
    """What was built, and what a request with a picture gets; another is answered after it."""
    prompt, others = PICTURE
    return {
        "built": running.call("tests.engine.multimodal:weights"),
        "without a picture": running.call("tests.engine.multimodal:answers", others),
        "picture": running.call("tests.engine.multimodal:answers", others, prompt),
    }


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """Every model in an engine of its own, one after the other: side by side, their threads wait for each other."""
    path = os.pathsep.join([*multimodal.python_path(tmp_path_factory.mktemp("path")), PATHS])

    @cache
    def folder(name: str) -> str:
        made = str(tmp_path_factory.mktemp("model"))
        if name == TEXT_MODEL:
            multimodal.text_of(multimodal.model(*MODELS["qwen2.5-vl in fp32"][:2])).save_pretrained(made)
        else:
            multimodal.model(*MODELS[name][:2]).save_pretrained(made)
        return made

    @cache
    def answers(name: str) -> Result:
        if name == PLAIN:
            plain = {"model": folder("qwen3-vl"), "enforce_eager": True} | LIMITS | OF_DEVICE | TEXT_ONLY | FP32
            return run(plain, plan(), None, PYTHONPATH=path)
        engine = {"model": folder(name)} | LIMITS | FEW_PAGES | OF_DEVICE
        if name == TEXT_MODEL:
            return run(engine | FP32, plan(), "1")
        return run(engine | MODELS[name][2], plan(), "1", listed_for=LISTED, afterwards=afterwards, PYTHONPATH=path)

    return answers


def moved(result: Result) -> list[str]:
    """The steps of a plan in which a request got other bits than alone."""
    pairs = [("alone", 0, "warm", 0), *(("alone", 0, f"with {n}", n) for n in CONCURRENT)]
    pairs += [(f"prompt {i}", 0, "prompts", i) for i in range(len(LENGTHS))]
    pairs += [(f"answer {i}", 0, "answers", i) for i in range(WATCHED)]
    return [
        f"{step} {i}"
        for alone, first, step, i in pairs
        if result.completions(step, i) != result.completions(alone, first)
    ]


@pytest.mark.parametrize("name", some_exhaustive([*MODELS, TEXT_MODEL], ALWAYS))
def test_a_model_served_as_text_gives_the_same_bits_under_any_load(name: str, asked: Callable[[str], Result]) -> None:
    result = asked(name)
    assert moved(result) == []
    assert result.steps["warm"][0]["cached"] >= 128
    assert result.preemptions > 0 or torch.cuda.is_available()


@pytest.mark.exhaustive
def test_plain_vllm_does_not(asked: Callable[[str], Result]) -> None:
    """The negative control."""
    assert moved(asked(PLAIN))


@pytest.mark.parametrize("name", some_exhaustive(MODELS, ALWAYS))
def test_listed_candidates_do_not_follow_what_others_ask_for(name: str, asked: Callable[[str], Result]) -> None:
    listed = asked(name).listed
    assert listed is not None
    assert [others for others in listed if listed[others] != listed["alone"]] == []


@pytest.mark.exhaustive
def test_the_text_of_a_multimodal_model_has_the_bits_of_the_text_model(asked: Callable[[str], Result]) -> None:
    """M-RoPE of text is the plain rotation: a Qwen2 with the same weights answers the same."""
    ours, theirs = (asked(name) for name in ("qwen2.5-vl in fp32", TEXT_MODEL))
    asked_for = [(step["name"], i) for step in plan() for i in range(len(step["requests"]))]
    assert [where for where in asked_for if ours.completions(*where) != theirs.completions(*where)] == []


@pytest.mark.parametrize("name", some_exhaustive(MODELS, ALWAYS))
def test_no_encoder_is_built(name: str, asked: Callable[[str], Result]) -> None:
    result = asked(name)
    built = result.afterwards["built"]
    assert built["encoders"] == dict.fromkeys(ENCODERS[name], "StageMissingLayer")
    assert built["on"] == ["meta"]
    assert built["parameters"]
    text = ("model.", "lm_head.") if "muse" in name else "language_model."
    assert [weight for weight in built["parameters"] if not weight.startswith(text)] == []
    assert not any("Vision" in kind or "Conv" in kind for kind in result.kernels["modules"])
    if "qwen" in name:
        rotary = [kind for kind in result.kernels["modules"] if kind.endswith("RotaryEmbedding")]
        assert rotary == ["vllm_batch_invariant.integration.layers.mrope.install.<locals>.PickedRotaryEmbedding"]


@pytest.mark.parametrize("name", some_exhaustive(MODELS, ALWAYS))
def test_a_request_with_a_picture_is_refused_and_its_neighbours_keep_their_bits(
    name: str, asked: Callable[[str], Result]
) -> None:
    told = asked(name).afterwards
    said = told["picture"]["said"]
    assert said
    assert "\n" not in said
    assert told["picture"]["answers"] == told["without a picture"]["answers"]
