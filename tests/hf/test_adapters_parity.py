"""A model with an adapter of PEFT's has the logprobs of an engine that serves the adapter's files, bit for bit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.parity import Gap, Sample, of_trainer, plain_logprobs
from tests.assertions import assert_same_bits
from tests.engine.engines import SETTINGS, selected
from tests.hf.adapted import fill
from tests.hf.models import DEVICE, FAMILIES, VOCABULARY, model
from tests.hf.test_families import ARGUMENTS
from tests.hf.test_refusals import refuses
from vllm_batch_invariant import envs
from vllm_batch_invariant.hf import check_engine, patch
from vllm_batch_invariant.verify.harness.requests import request, tokens
from vllm_batch_invariant.verify.harness.worker import Engine

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

OF_FAMILIES = ("Qwen3, tied", "Llama with biases and its rotary scaling, tied", "Qwen2, untied", "Qwen3-MoE")
LORA = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "32"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "every layer, in bf16": {"r": 16, "lora_alpha": 32, "target_modules": EVERY},
    "parts, in fp32, with factors that are rounded": {
        "r": 6,
        "lora_alpha": 20,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
        "rank_pattern": {"o_proj": 20},
        "alpha_pattern": {"down_proj": 7},
    },
}


@pytest.fixture(scope="module")
def rolled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, dict[str, list[Sample]], Any, int]]:
    """Of each family: the checkpoint with adapters beside it, samples by adapter, and what the engine said."""
    found = {}
    for name in selected(request, "name"):
        kind, changed = FAMILIES[name]
        folder = tmp_path_factory.mktemp("checkpoint")
        model(torch.bfloat16, kind, **changed).save_pretrained(folder / "model")
        for adapter, config in ADAPTERS.items():
            plain = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
            if hasattr(plain.config, "num_experts"):  # PEFT would take the names of an MLP for those of experts
                config = config | {"target_modules": [one for one in config["target_modules"] if one in ATTENTION]}
            wide = "fp32" in adapter
            made = peft.get_peft_model(
                plain, peft.LoraConfig(**config, task_type="CAUSAL_LM"), autocast_adapter_dtype=wide
            )
            fill(made)
            made.save_pretrained(folder / adapter)
        with Engine(str(folder / "model"), [*ARGUMENTS, *LORA], flag="1", environment=SETTINGS) as engine:
            said = engine.call("tests.engine.engines:declared")
            found[name] = folder, roll_out(engine, folder), said
    return found


def roll_out(engine: Engine, folder: Path) -> dict[str, list[Sample]]:
    """What prompts with every adapter, and with none, get together."""
    sent, known = [], {adapter: [number, str(folder / adapter)] for number, adapter in enumerate(ADAPTERS, 1)}
    for seed, adapter in enumerate((*ADAPTERS, None)):
        for length in (1, 45, 257):
            asked = {"temperature": 1.0, "max_tokens": 12, "logprobs": 0, "prompt_logprobs": 0, "seed": seed}
            prompt = tokens(length, 1, range(16, VOCABULARY))
            sent.append(request(prompt, **asked) | {"adapter": adapter})
    answers = engine.call("tests.engine.adapters:step", sent, known)["answers"]
    found: dict[str, list[Sample]] = {}
    for one, ([completion], of_prompt) in zip(sent, answers, strict=True):
        every = one["prompt"] + completion["tokens"]
        listed = [{token: value for token, value, _ in entry} for entry in of_prompt[1:] + completion["logprobs"]]
        values = [float.fromhex(values[token]) for token, values in zip(every[1:], listed, strict=True)]
        sample = Sample(every, len(one["prompt"]), torch.tensor(values, dtype=torch.float32))
        found.setdefault(str(one["adapter"]), []).append(sample)
    return found


def equal(logprobs: list[torch.Tensor], samples: list[Sample]) -> None:
    for ours, sample in zip(logprobs, samples, strict=True):
        assert_same_bits(ours, sample.logprobs, f"prompt of {sample.prompt}")


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", OF_FAMILIES)
def test_an_adapter_has_the_logprobs_of_its_rollout_and_peft_has_others(
    name: str, adapter: str, rolled: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cuda":
        monkeypatch.setenv(envs.UNTRIED.name, "1")
    folder, samples, said = rolled[name]
    plain = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).to(DEVICE)
    trainer = peft.PeftModel.from_pretrained(plain, folder / adapter, is_trainable=True).eval()
    stock = Gap.of(samples[adapter], of_trainer(trainer, samples[adapter], plain_logprobs))
    assert stock.different > stock.tokens / 2
    patched = patch(trainer)
    check_engine(patched, said)
    equal(of_trainer(patched, samples[adapter]), samples[adapter])
    with patched.disable_adapter():
        equal(of_trainer(patched, samples["None"]), samples["None"])
    patched.merge_adapter()
    merged = Gap.of(samples[adapter], of_trainer(patched, samples[adapter]))
    assert merged.different > 0
    assert merged.largest < 2 * stock.largest + 0.1


@pytest.mark.parametrize("name", OF_FAMILIES[:1])
def test_an_engine_without_lora_is_refused(name: str, rolled: Mapping[str, Any]) -> None:
    folder, _, said = rolled[name]
    plain = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    check_engine(patch(plain), said)
    trainer = patch(peft.PeftModel.from_pretrained(plain, folder / next(iter(ADAPTERS))))
    without = [
        one | {"reductions": {key: kept for key, kept in one["reductions"].items() if not key.startswith("adapters")}}
        for one in said
    ]
    assert without != said
    refuses(lambda: check_engine(trainer, without), "start the engine with --enable-lora")
