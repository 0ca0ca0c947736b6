"""A model with an adapter of PEFT's has the logprobs of an engine that serves the adapter's files, bit for bit."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.parity import Gap, Sample, of_trainer, plain_logprobs
from tests.assertions import assert_same_bits
from tests.engine.adapters import EXPERT_FAULTS
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

MIXTURES = {
    "Qwen3-MoE": torch.bfloat16,
    "Qwen3-MoE without renormalised weights": torch.bfloat16,
    "Qwen3-MoE in fp32": torch.float32,
    "OLMoE": torch.bfloat16,
}
OF_FAMILIES = {
    "Qwen3, tied": torch.bfloat16,
    "Llama with biases and its rotary scaling, tied": torch.bfloat16,
    "Qwen2, untied": torch.bfloat16,
} | MIXTURES
"""In which dtype each family is, whose name may say so."""
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
OF_MIXTURES: dict[str, dict[str, Any]] = {
    name: config | {"target_modules": [one for one in config["target_modules"] if one in ATTENTION]}
    for name, config in ADAPTERS.items()  # PEFT would take the names of an MLP for those of experts
}
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "stacked experts and attention, in bf16": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": PARAMETERS,
    },
    "stacked experts alone, of rank 1, in fp32": {
        "r": 1,
        "lora_alpha": 3,
        "target_modules": [],
        "target_parameters": PARAMETERS,
        "alpha_pattern": {"experts.down_proj": 2},
    },
    "stacked experts by names of linear layers, in fp32": {  # of twice the rank in gate and up
        "r": 7,
        "lora_alpha": 20,
        "use_rslora": True,
        "target_modules": ["k_proj", "gate_proj", "up_proj", "down_proj"],
    },
}
WITH_FAULTS, *_ = OF_EXPERTS
CASES = [(name, adapter) for name in OF_FAMILIES if name not in MIXTURES for adapter in ADAPTERS]
CASES += [(name, adapter) for name in MIXTURES for adapter in OF_MIXTURES | OF_EXPERTS]


def adapters_of(name: str) -> dict[str, dict[str, Any]]:
    """Those of a family, by name."""
    return OF_MIXTURES | OF_EXPERTS if name in MIXTURES else ADAPTERS


def read(folder: Path, name: str) -> torch.nn.Module:
    """The model of a family in its folder."""
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=OF_FAMILIES[name])


@pytest.fixture(scope="module")
def rolled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, dict[str, list[Sample]], Any, int]]:
    """Of each family: the checkpoint with adapters beside it, samples by adapter, and what the engine said."""
    found = {}
    for name in selected(request, "name"):
        (kind, changed), dtype = FAMILIES[name.removesuffix(" in fp32")], OF_FAMILIES[name]
        folder = tmp_path_factory.mktemp("checkpoint")
        model(dtype, kind, **changed).save_pretrained(folder / "model")
        for adapter, config in adapters_of(name).items():
            made = peft.get_peft_model(
                read(folder, name),
                peft.LoraConfig(**config, task_type="CAUSAL_LM"),
                autocast_adapter_dtype="fp32" in adapter,
            )
            fill(made)
            made.save_pretrained(folder / adapter)
        arguments = [*ARGUMENTS, *LORA, "--dtype", str(dtype).removeprefix("torch.")]
        arguments += ["--enable-mixed-moe-lora-format"] if name in MIXTURES else []
        with Engine(str(folder / "model"), arguments, flag="1", environment=SETTINGS) as engine:
            said = engine.call("tests.engine.engines:declared")
            found[name] = folder, roll_out(engine, folder, adapters_of(name)), said
            for fault in EXPERT_FAULTS if name in MIXTURES and dtype == torch.bfloat16 else ():
                engine.call("tests.engine.adapters:plant_in_experts", fault)
                found[name][1][fault] = roll_out(engine, folder, adapters_of(name))[WITH_FAULTS]
    return found


def roll_out(engine: Engine, folder: Path, adapters: Iterable[str]) -> dict[str, list[Sample]]:
    """What prompts with every adapter, and with none, get together."""
    sent, known = [], {adapter: [number, str(folder / adapter)] for number, adapter in enumerate(adapters, 1)}
    for seed, adapter in enumerate((*adapters, None)):
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


@pytest.mark.parametrize(("name", "adapter"), CASES)
def test_an_adapter_has_the_logprobs_of_its_rollout_and_peft_has_others(
    name: str, adapter: str, rolled: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cuda":
        monkeypatch.setenv(envs.UNTRIED.name, "1")
    folder, samples, said = rolled[name]
    plain = read(folder, name).to(DEVICE)
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


@pytest.mark.parametrize("name", ["Qwen3-MoE"])
def test_faults_of_an_engines_adapters_of_experts_show(name: str, rolled: Mapping[str, Any]) -> None:
    folder, samples, _ = rolled[name]
    trainer = patch(peft.PeftModel.from_pretrained(read(folder, name), folder / WITH_FAULTS))
    for fault in EXPERT_FAULTS:
        assert Gap.of(samples[fault], of_trainer(trainer, samples[fault])).different > 0, fault


@pytest.mark.parametrize("name", ["Qwen3, tied"])
def test_an_engine_without_lora_is_refused(name: str, rolled: Mapping[str, Any]) -> None:
    folder, _, said = rolled[name]
    plain = read(folder, name)
    check_engine(patch(plain), said)
    trainer = patch(peft.PeftModel.from_pretrained(plain, folder / next(iter(ADAPTERS))))
    without = [
        one | {"reductions": {key: kept for key, kept in one["reductions"].items() if not key.startswith("adapters")}}
        for one in said
    ]
    assert without != said
    refuses(lambda: check_engine(trainer, without), "start the engine with --enable-lora")
