"""Drafts of DFlash: a model that proposes all of a step's drafts at once, whose tokens see each other, over keys and
values made of what layers of the target gave. An answer is that of plain decoding, in any company.
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.drafters import make_dflash, prefer_few
from tests.engine.engines import OF_DEVICE, UNTRIED_THERE, Result, differing_answers, run, tokens, untried_on_gpu
from tests.engine.test_speculation import ON_GPU, RUNNERS, SMALL, requests
from vllm_batch_invariant.envs import UNTRIED
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, untried_on_gpu]

LIKELY, CONTEXT = 5, 512
"""Tokens that targets give, so that a draft of random weights is right now and then."""
WINDOW = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 70, "use_sliding_window": True}
BOTH_WAYS = {"is_causal": False}
ONE_GROUP: dict[str, Any] = {} if ON_GPU else {"disable_hybrid_kv_cache_manager": True}
"""Of a model with windows in some layers vLLM's first model runner takes no draft model whose layers are in several
groups of pages.
"""
FAULT = f"tests.engine.{'states:accept_every_draft' if ON_GPU else 'images_drafts:soften_verify_steps'}"
"""On a GPU graphs keep what they were captured with, so that a fault of attention does not show."""


def make_qwen3(folder: Path, **more: Any) -> Path:
    shape = Shape(hidden=512, intermediate=1536, layers=3, heads=8, kv_heads=2, max_length=1024, **more)
    return prefer_few(make_checkpoint(folder, shape), LIKELY)


def make_llama(folder: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    return _save(config, folder)


def make_laguna(folder: Path) -> Path:
    """With a window in some layers, which have other heads, and experts behind a dense layer, as Laguna XS.2."""
    config = transformers.LagunaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, sliding_window=100,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        num_attention_heads_per_layer=[6, 8, 8, 6], mlp_layer_types=["dense", *["sparse"] * 3],
        moe_intermediate_size=128, shared_expert_intermediate_size=128, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    return _save(config, folder)


def _save(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return prefer_few(folder, LIKELY)


def of_laguna(kind: str) -> dict[str, Any]:
    """The configuration of a draft model of Laguna's own class, all of whose layers have one kind of attention."""
    return {
        "architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna", "layer_types": [kind] * 2,
        "sliding_window": 70, "num_attention_heads_per_layer": [8, 8], "mlp_layer_types": ["dense"] * 2,
        "draft_vocab_size": 4096, "gating": True,
    }  # fmt: skip


def as_speculators_write_it(folder: Path) -> None:
    """Of vLLM's Speculators: what is read of the target is counted from the first layer's inputs on."""
    config = json.loads((folder / "config.json").read_text())
    of_drafts, few = config.pop("dflash_config"), config.pop("draft_vocab_size")
    method = {"proposal_type": "greedy", "speculative_tokens": 3}
    written = {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "transformer_layer_config": config,
        "draft_vocab_size": few, "mask_token_id": of_drafts["mask_token_id"],
        "aux_hidden_state_layer_ids": [1 + number for number in of_drafts["target_layer_ids"]],
        "speculators_config": {
            "algorithm": "dflash", "proposal_methods": [method], "verifier": {"name_or_path": "a target"},
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(written))


CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Any], dict[str, Any]]] = {
    "Qwen3": (make_qwen3, {}, {}),
    "Qwen3, two workers": (make_qwen3, {}, {"tensor_parallel_size": 2}),
    "Qwen3, a cache in FP8": (make_qwen3, {}, {"kv_cache_dtype": "fp8"}),
    "Qwen3, windows": (make_qwen3, WINDOW, {}),
    "Qwen3, windows both ways": (make_qwen3, WINDOW | BOTH_WAYS, {}),
    "Qwen3 with experts": (partial(make_qwen3, experts=8, expert_intermediate=128), {}, {}),
    "Llama": (make_llama, {}, {}),
    "Laguna, as Speculators write it": (make_laguna, {"draft_vocab_size": 1000}, ONE_GROUP),
    "Laguna, of its own class": (make_laguna, of_laguna("full_attention"), ONE_GROUP),
    "Laguna, of its own class, windows": (make_laguna, of_laguna("sliding_attention"), ONE_GROUP),
}
"""A target, what a draft model's configuration has, and arguments of engines."""


def long_requests() -> list[dict[str, Any]]:
    """Answers that end at the context's limit, where no draft fits any more."""
    greedy = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "logprobs": 3}
    prompts = (tokens(CONTEXT - 40 - more, 900 + more) for more in (0, 1, 5))
    return [{"prompt": prompt, "params": greedy | {"max_tokens": CONTEXT - len(prompt)}} for prompt in prompts]


ASKED = [*requests()[::4], *long_requests()]
TOGETHER = {"name": "together", "reset_prefix_cache": True, "requests": ASKED}
WARM = {"name": "warm", "requests": ASKED}
IN_PARTS = [{"name": str(start), "requests": ASKED[start : start + 9]} for start in range(0, len(ASKED), 9)]


@pytest.fixture
def engine(checkpoint: Path, tmp_path: Path) -> Callable[..., Result]:
    """With a target, and a drafter of its own if it is given what its configuration has."""

    def start(
        target: Path,
        steps: list[dict[str, Any]],
        drafter: dict[str, Any] | None = None,
        afterwards: Callable[[Any], Any] = lambda _: None,
        mode: str | None = "1",
        runner: str = RUNNERS[0],
        **others: Any,
    ) -> Result:
        settings = {"max_model_len": CONTEXT, "max_num_seqs": 64, "max_num_batched_tokens": 512, **OF_DEVICE} | others
        if drafter is not None:
            model = make_dflash(target, tmp_path / "drafter", **drafter)
            if "draft_vocab_size" in drafter and "architectures" not in drafter:
                as_speculators_write_it(prefer_few(model, LIKELY))
            drafts = {"method": "dflash", "model": str(model), "num_speculative_tokens": 3}
            settings["speculative_config"] = json.dumps(drafts)
        environment = UNTRIED_THERE | ({"VLLM_USE_V2_MODEL_RUNNER": runner} if runner else {})
        if settings.get("tensor_parallel_size", 1) > 1 and not ON_GPU:
            environment[UNTRIED.name] = "1"
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(["0", str((os.cpu_count() or 1) - 1)])
        settings |= {"model": str(target), "tokenizer": str(checkpoint)}
        return run(settings, steps, mode, afterwards=afterwards, **environment)

    return start


@pytest.mark.parametrize("runner", RUNNERS, ids="runner_{}".format)
@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_that_of_plain_decoding(
    engine: Callable[..., Result], tmp_path: Path, name: str, runner: str
) -> None:
    """But not where a verify step has other scores, or, on a GPU, where every draft is accepted."""
    make, drafter, settings = CASES[name]
    if ON_GPU and settings:
        pytest.skip("refused beside drafts on a GPU")
    if ON_GPU and runner == "0" and "Laguna" in name:
        pytest.skip("vLLM's first model runner has no drafts of several groups of pages")
    target = make(tmp_path / "target")
    done = engine(target, IN_PARTS, runner=runner, **settings)
    plain = [answer for step in IN_PARTS for answer in done.steps[step["name"]]]

    def afterwards(running: Any) -> tuple[dict[str, int], list[dict[str, Any]] | None]:
        counted = running.call("tests.engine.drafters:counts")
        if settings.get("tensor_parallel_size", 1) > 1:  # whose workers the fault does not reach
            return counted, None
        running.call(FAULT)
        return counted, running.step(**TOGETHER).requests

    small, has_windows = SMALL, "windows" in name or "Laguna" in name
    if has_windows and (ON_GPU or settings is not ONE_GROUP):  # each kind of layers has pages of its own
        small = SMALL | {"num_gpu_blocks_override": 2 * SMALL["num_gpu_blocks_override"]}
    done = engine(target, [TOGETHER, WARM], drafter, afterwards, runner=runner, **small | settings)
    counted, faulty = done.afterwards
    for step in ("together", "warm"):
        assert differing_answers(done.steps[step], plain) == []
    assert 0 < counted["accepted"] < counted["drafts"]
    assert counted["preemptions"]
    assert faulty is None or differing_answers(faulty, plain)


@pytest.mark.skipif(ON_GPU, reason="the first model runner's drafts are looked at on a CPU")
def test_drafts_are_those_of_plain_vllm(engine: Callable[..., Result], tmp_path: Path) -> None:
    """In fp32, by greedy decoding; but not where a drafter's tokens see none after them."""
    target = make_qwen3(tmp_path / "target", dtype="float32")
    params = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
    step = {"name": "alone", "reset_prefix_cache": True, "requests": [{"prompt": tokens(150, 3), "params": params}]}

    def afterwards(running: Any) -> list[list[list[list[int]]]]:
        found = []
        for fault in ("", "tests.engine.drafters:see_no_later_tokens"):
            if fault and mode is None:
                continue
            if fault:
                running.call(fault)
            running.call("tests.engine.drafters:first_proposals")
            running.step(**step)
            found.append(running.call("tests.engine.drafters:first_proposals"))
        return found

    found = {}
    for mode in (None, "1"):
        found[mode] = engine(target, [], {}, afterwards, mode, dtype="float32").afterwards
    [theirs], [ours, faulty] = found[None], found["1"]
    assert len(ours) > 8
    assert ours == theirs
    assert faulty != theirs
