"""LoRA adapters in a patched model: logits of the engine's operation, and gradients that do not follow the batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3_5TextConfig

from tests.assertions import assert_same_bits
from tests.engine.engines import some_exhaustive
from tests.hf.adapted import TARGETS, Config, Linear, adapted, fill, own
from tests.hf.models import DELTA_NETS, DEVICE, FAMILIES, model, packed, ways_to_pad
from tests.hf.test_gradients import PARTS, WEIGHTS, loss_of, plain
from tests.hf.test_refusals import refuses
from vllm_batch_invariant import envs
from vllm_batch_invariant.hf import engine_weights, patch, token_logprobs
from vllm_batch_invariant.hf.adapters import add

RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.06, torch.float16: 0.012}
"""Largest |gradient - reference| / |reference| of any matrix, in norms, against a float64 model."""


@pytest.fixture(autouse=True)
def _untried(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cuda":
        monkeypatch.setenv(envs.UNTRIED.name, "1")


def gradients(trainer: torch.nn.Module, tokens: torch.Tensor, mask: torch.Tensor, logprobs: Any = token_logprobs):
    trainer.zero_grad()
    loss_of(trainer(tokens, attention_mask=mask).logits, mask, tokens, logprobs).backward()
    return {name: weight.grad.clone() for name, weight in own(trainer).items()}


KINDS = {
    "bf16, adapters in fp32": (torch.bfloat16, torch.float32),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "fp32": (torch.float32, None),
}


@pytest.mark.parametrize("kind", some_exhaustive(KINDS, ("bf16, adapters in fp32",)))
def test_gradients_are_near_the_exact_ones(kind: str) -> None:
    (dtype, of_adapters), (tokens, mask) = KINDS[kind], ways_to_pad(PARTS)["right"]
    expected = gradients(adapted(dtype, of_adapters=of_adapters).double(), tokens, mask, plain)
    trainer = patch(adapted(dtype, of_adapters=of_adapters))
    found = gradients(trainer, tokens, mask)
    for name, reference in expected.items():
        error = float((found[name].double() - reference).norm() / reference.norm())
        assert error <= RELATIVE_ERROR[dtype], (name, error)
    assert all(weight.grad is None for name, weight in trainer.named_parameters() if name not in expected)


@pytest.mark.parametrize("family", some_exhaustive(("Qwen3, tied", "Qwen3-MoE"), ("Qwen3-MoE",)))
def test_how_a_batch_is_padded_or_packed_moves_no_bit_of_a_gradient(family: str) -> None:
    kind, changed = FAMILIES[family]
    made = adapted(torch.bfloat16, kind, of_adapters=torch.float32, **changed)
    trainer, ways = patch(made), ways_to_pad(PARTS)
    expected = gradients(trainer, *ways.pop("right"))
    for way, batch in ways.items():
        for name, gradient in gradients(trainer, *batch).items():
            assert_same_bits(gradient, expected[name], f"{way}, {name}")
    tokens, positions = packed(PARTS)
    trainer.zero_grad()
    logits = trainer(tokens, position_ids=positions).logits[0].split([len(part) for part in PARTS])
    pairs = zip(logits, PARTS, WEIGHTS, strict=True)
    sum((token_logprobs(row[:-1], part[1:]) * weight.to(row.device)).sum() for row, part, weight in pairs).backward()
    for name, weight in own(trainer).items():
        assert_same_bits(weight.grad, expected[name], f"packed, {name}")


@pytest.mark.exhaustive
def test_a_sequences_logits_and_gradient_do_not_depend_on_the_others() -> None:
    trainer = patch(adapted())

    def of_the_first(tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embeddings = trainer.model.embed_tokens(tokens).detach().requires_grad_()
        logits = trainer(inputs_embeds=embeddings, attention_mask=mask).logits
        loss_of(logits, mask, tokens).backward()
        return tuple(one[0][mask[0].bool()] for one in (logits, embeddings.grad))

    expected = of_the_first(*ways_to_pad(PARTS[:1])["right"])
    for way, batch in ways_to_pad(PARTS).items():
        for found, one in zip(of_the_first(*batch), expected, strict=True):
            assert_same_bits(found, one, way)


@pytest.mark.exhaustive
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again_have_the_same_gradients(reentrant: bool) -> None:
    trainer = patch(adapted()).train()
    tokens, mask = ways_to_pad(PARTS)["right"]
    expected = gradients(trainer, tokens, mask)
    trainer.enable_input_require_grads()
    trainer.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for name, gradient in gradients(trainer, tokens, mask).items():
        assert_same_bits(gradient, expected[name], name)


def logits_of(trainer: torch.nn.Module) -> torch.Tensor:
    tokens, mask = ways_to_pad(PARTS)["right"]
    return trainer(input_ids=tokens, attention_mask=mask).logits


@pytest.mark.exhaustive
def test_matrices_in_fp32_have_the_logits_of_rounded_ones() -> None:
    wide, narrow = patch(adapted(of_adapters=torch.float32)), adapted()
    assert_same_bits(logits_of(wide), logits_of(patch(narrow)))


@pytest.mark.parametrize("fault", ["the factor is not rounded into B", "merged"])
def test_another_order_of_roundings_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits_of(patch(adapted()))
    trainer = patch(adapted())
    for layer in (module for module in trainer.modules() if hasattr(module, "lora_A")):
        a, b = layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data
        if fault == "merged":
            layer.base_layer.weight.data += (b.float() @ a.float() * layer.scaling["default"]).to(a.dtype)
            layer.merged = True
        else:
            a.mul_(layer.scaling["default"])
            layer.scaling["default"], layer.lora_alpha["default"], layer.r["default"] = 1.0, 1, 1
    found = logits_of(trainer)
    assert not torch.equal(found, expected)
    assert float((found - expected).detach().abs().max()) < 0.1 * float(expected.detach().abs().max())


def test_disabled_adapters_leave_a_model_without_them() -> None:
    trainer = patch(adapted())
    with_them = logits_of(trainer)
    for layer in (module for module in trainer.modules() if hasattr(module, "lora_A")):
        layer.disable_adapters = True
    without = logits_of(trainer)
    assert_same_bits(without, logits_of(patch(model())))
    assert not torch.equal(without, with_them)


def test_a_layers_parts_without_an_adapter_keep_their_bits() -> None:
    trainer = patch(adapted(targets=("0.self_attn.q_proj",)))
    attention, x = trainer.model.layers[0].self_attn, torch.randn(5, 192, device=DEVICE).bfloat16()
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    y = torch.randn(5, sum(layer.out_features for layer in layers), device=DEVICE).bfloat16()
    found = add(y.clone(), x, layers)
    assert_same_bits(found[:, 384:], y[:, 384:])
    assert not torch.equal(found[:, :384], y[:, :384])


def _layers(trainer: torch.nn.Module, **changed: Any) -> torch.nn.Module:
    for layer in (module for module in trainer.modules() if hasattr(module, "lora_A")):
        for name, value in changed.items():
            setattr(layer, name, value)
    return trainer


REFUSED: dict[str, Callable[[], torch.nn.Module]] = {
    "use_dora=True of the adapter default": lambda: adapted(config=Config(use_dora=True)),
    "bias=all of the adapter default": lambda: adapted(config=Config(bias="all")),
    "modules_to_save=": lambda: adapted(config=Config(modules_to_save=["lm_head"])),
    "init_lora_weights='pissa'": lambda: adapted(config=Config(init_lora_weights="pissa")),
    "dropout of adapters": lambda: adapted(config=Config(lora_dropout=0.1)).train(),
    "transposed weights": lambda: _layers(adapted(), fan_in_fan_out=True),
    "a variant of LoRA": lambda: _layers(adapted(), lora_variant={"default": object()}),
    "merged and disabled": lambda: _layers(adapted(), merged=True, disable_adapters=True),
    "an adapter whose factor is 1.0": lambda: _layers(adapted(), scaling={"default": 1.0}),
    r"an adapter in torch\.float64": lambda: adapted(of_adapters=torch.float64),
    r"adapter at lm_head of a Qwen3": lambda: adapted(targets=("lm_head",)),
    "adapter at .* of a Qwen3_5": lambda: adapted(
        torch.bfloat16, Qwen3_5TextConfig, targets=("1.self_attn.q_proj",), **DELTA_NETS
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_engine_has_is_refused(what: str) -> None:
    refuses(lambda: patch(REFUSED[what]()), what)


def test_what_changes_after_the_patch_is_refused_too() -> None:
    trainer = patch(adapted(config=Config(lora_dropout=0.1)).eval())
    logits_of(trainer)
    refuses(lambda: logits_of(trainer.train()), "dropout of adapters")
    later = patch(model())
    attention = later.model.layers[0].self_attn
    attention.q_proj = Linear(attention.q_proj, Config(), torch.bfloat16)
    refuses(lambda: logits_of(later), "which came after patch")
    hooked = patch(adapted())
    hooked.model.layers[0].mlp.up_proj.register_forward_pre_hook(lambda *_: None)
    refuses(lambda: logits_of(hooked), "a layer with hooks")


def test_quantisation_and_a_tree_are_refused_beside_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(lambda: patch(adapted(), quantization="fp8_per_channel"), "adapters in a trainer with quantization")
    refuses(lambda: dict(engine_weights(patch(adapted()))), "weights of a model with adapters")
    if DEVICE == "cpu":
        monkeypatch.setenv(envs.TP_TREE.name, "2")
        refuses(lambda: patch(adapted()), "adapters with VLLM_BATCH_INVARIANT_TP_TREE=2 in a trainer")


@pytest.mark.exhaustive
def test_a_bias_where_the_engine_adds_one_is_kept() -> None:
    kind, changed = FAMILIES["Llama with biases and its rotary scaling, tied"]
    assert kind is LlamaConfig
    trainer = patch(adapted(torch.bfloat16, kind, **changed))
    gradients(trainer, *ways_to_pad(PARTS)["right"])
    refuses(lambda: patch(adapted(attention_bias=True)), r"a bias at model\.layers\.0\.self_attn\.q_proj")


OF_PEFT: dict[str, dict[str, Any]] = {
    "use_dora=True": {"use_dora": True},
    "bias=lora_only": {"bias": "lora_only"},
    "ModulesToSaveWrapper at lm_head": {"modules_to_save": ["lm_head"]},
    "init_lora_weights='olora'": {"init_lora_weights": "olora"},
    "Embedding at model.embed_tokens": {"target_modules": ["embed_tokens"]},
}


@pytest.mark.parametrize("what", OF_PEFT)
def test_what_no_engine_has_of_pefts_is_refused(what: str) -> None:
    peft = pytest.importorskip("peft")
    given = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | OF_PEFT[what]
    refuses(lambda: patch(peft.get_peft_model(model(), peft.LoraConfig(**given))), what)


def test_adapters_of_pefts_of_experts_are_refused() -> None:
    peft = pytest.importorskip("peft")
    kind, changed = FAMILIES["Qwen3-MoE"]
    config = peft.LoraConfig(target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")
    refuses(
        lambda: patch(peft.get_peft_model(model(torch.bfloat16, kind, **changed), config)),
        "ParamWrapper at model.layers.1.mlp.experts",
    )


def test_pefts_layers_have_the_logits_of_those_of_these_tests() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=6, lora_alpha=20, use_rslora=True, target_modules=[*TARGETS], task_type="CAUSAL_LM")
    trainer = patch(peft.get_peft_model(model(), config))
    fill(trainer)
    assert_same_bits(logits_of(trainer), logits_of(patch(adapted())))
    tokens, mask = ways_to_pad(PARTS)["right"]
    refuses(lambda: trainer.eval()(input_ids=tokens, attention_mask=mask, adapter_names=["default"] * 3), "with hooks")


def test_another_kind_of_peft_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    refuses(lambda: patch(peft.get_peft_model(model(), config)), "a trainer's PeftModelForCausalLM")
