"""LoRA adapters in a patched model: logits of the engine's operation, and gradients that do not follow the batch."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3_5TextConfig, Qwen3Config

from tests.assertions import assert_same_bits
from tests.engine.engines import some_exhaustive
from tests.hf.adapted import TARGETS, WITH_EXPERTS, Config, Linear, adapted, fill, own
from tests.hf.models import DELTA_NETS, DEVICE, FAMILIES, model, packed, ways_to_pad
from tests.hf.test_gradients import PARTS, WEIGHTS, loss_of, plain
from tests.hf.test_refusals import refuses
from vllm_batch_invariant import envs
from vllm_batch_invariant.hf import engine_weights, patch, token_logprobs
from vllm_batch_invariant.hf.adapters import add
from vllm_batch_invariant.ops import moe as moe_op
from vllm_batch_invariant.ops.linear import linear
from vllm_batch_invariant.ops.moe import MoeReduction

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
    assert_near(patch(adapted(dtype, of_adapters=of_adapters)), expected, RELATIVE_ERROR[dtype])


def assert_near(trainer: torch.nn.Module, expected: dict[str, torch.Tensor], most: float) -> None:
    found = gradients(trainer, *ways_to_pad(PARTS)["right"])
    for name, reference in expected.items():
        error = float((found[name].double() - reference).norm() / reference.norm())
        assert error <= most, (name, error)
    assert all(weight.grad is None for name, weight in trainer.named_parameters() if name not in expected)


MIXTURE = FAMILIES["Qwen3-MoE"]


def mixture(dtype: torch.dtype = torch.bfloat16, targets: Sequence[str] = WITH_EXPERTS, **options: Any):
    """A Qwen3-MoE with adapters of experts, too."""
    kind, changed = MIXTURE
    return adapted(dtype, kind, targets=targets, **options, **changed)


MAKERS = adapted, mixture
NAMES = "dense", "mixture"


def test_gradients_of_experts_adapters_are_near_the_exact_ones() -> None:
    """In fp32: a model whose tokens are rounded otherwise may choose other experts."""
    exact = mixture(torch.float32).double()
    exact.set_experts_implementation("eager")  # the other ones have no float64
    expected = gradients(exact, *ways_to_pad(PARTS)["right"], plain)
    assert sum("experts" in name for name in expected) == 4
    assert_near(patch(mixture(torch.float32)), expected, RELATIVE_ERROR[torch.float32])


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_experts_adapters_in_16_bits_are_near_the_exact_ones(dtype: torch.dtype) -> None:
    """Of one layer, whose tokens go to the same experts in both."""
    generator = torch.Generator().manual_seed(5)
    x, grad = (torch.randn(70, 192, generator=generator).to(DEVICE, dtype) for _ in range(2))
    block = patch(mixture(dtype)).model.layers[1].mlp
    block(x).backward(grad)
    exact = mixture(dtype).double()
    exact.set_experts_implementation("eager")
    block_of_exact = exact.model.layers[1].mlp
    weights, ids = moe_op.route(
        linear(x, block.gate.weight), MoeReduction(block.gate.num_experts, block.gate.top_k, dtype, renormalise=True)
    )
    block_of_exact.experts(x.double(), ids, weights.double()).backward(grad.double())
    expected = dict(block_of_exact.named_parameters())
    for name, weight in block.named_parameters():
        if ".lora_" in name:
            reference = expected[name].grad
            error = float((weight.grad.double() - reference).norm() / reference.norm())
            assert error <= RELATIVE_ERROR[dtype], (name, error)
        else:
            assert weight.grad is None


@pytest.mark.parametrize("family", some_exhaustive(("Qwen3, tied", "Qwen3-MoE"), ("Qwen3-MoE",)))
def test_how_a_batch_is_padded_or_packed_moves_no_bit_of_a_gradient(family: str) -> None:
    kind, changed = FAMILIES[family]
    made = adapted(torch.bfloat16, kind, targets=WITH_EXPERTS, of_adapters=torch.float32, **changed)
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
@pytest.mark.parametrize("make", MAKERS, ids=NAMES)
def test_a_sequences_logits_and_gradient_do_not_depend_on_the_others(make: Callable[..., torch.nn.Module]) -> None:
    trainer = patch(make())

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
@pytest.mark.parametrize("make", MAKERS, ids=NAMES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again_have_the_same_gradients(
    reentrant: bool, make: Callable[..., torch.nn.Module]
) -> None:
    trainer = patch(make()).train()
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
@pytest.mark.parametrize("make", MAKERS, ids=NAMES)
def test_matrices_in_fp32_have_the_logits_of_rounded_ones(make: Callable[..., torch.nn.Module]) -> None:
    wide, narrow = patch(make(of_adapters=torch.float32)), make()
    assert_same_bits(logits_of(wide), logits_of(patch(narrow)))


@pytest.mark.parametrize("make", MAKERS, ids=NAMES)
@pytest.mark.parametrize("fault", ["the factor is not rounded into B", "merged"])
def test_another_order_of_roundings_shows(fault: str, make: Callable[..., torch.nn.Module]) -> None:
    expected = logits_of(patch(make()))
    trainer = patch(make())
    for layer in (module for module in trainer.modules() if hasattr(module, "lora_A")):
        if fault == "merged":
            layer.weight.data += layer.delta().to(layer.weight.dtype)
            layer.merged = True
        else:
            layer.lora_A["default"].weight.data.mul_(layer.scaling["default"])
            layer.scaling["default"], layer.lora_alpha["default"], layer.r["default"] = 1.0, 1, 1
    found = logits_of(trainer)
    assert not torch.equal(found, expected)
    found, expected = found.detach().float(), expected.detach().float()
    assert (found - expected).norm() < 0.1 * expected.norm()  # a few tokens may go to other experts


@pytest.mark.parametrize("make", MAKERS, ids=NAMES)
def test_disabled_adapters_leave_a_model_without_them(make: Callable[..., torch.nn.Module]) -> None:
    trainer = patch(make())
    with_them = logits_of(trainer)
    for layer in (module for module in trainer.modules() if hasattr(module, "lora_A")):
        layer.disable_adapters = True
    without = logits_of(trainer)
    kind, changed = MIXTURE if make is mixture else (Qwen3Config, {})
    assert_same_bits(without, logits_of(patch(model(torch.bfloat16, kind, **changed))))
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


def _one_product_in_force(trainer: torch.nn.Module) -> torch.nn.Module:
    trainer.model.layers[1].mlp.experts.base_layer.active_adapters = []
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
    "the adapters None and default of one layer's experts": lambda: _one_product_in_force(mixture()),
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


OF_PARAMETERS = {
    "an adapter of gate_up_proj of experts alone at model.layers.1.mlp.experts": ["experts.gate_up_proj"],
    "an adapter of down_proj of experts alone at model.layers.1.mlp.experts": ["experts.down_proj"],
    "an adapter of weight of a Qwen3MoeTopKRouter at model.layers.1.mlp.gate": ["gate.weight"],
    "an adapter of weight of a Linear at model.layers.0.self_attn.o_proj": ["o_proj.weight"],
}


@pytest.mark.parametrize("what", OF_PARAMETERS)
def test_adapters_of_other_parameters_are_refused(what: str) -> None:
    peft = pytest.importorskip("peft")
    kind, changed = MIXTURE
    config = peft.LoraConfig(target_modules=[], target_parameters=OF_PARAMETERS[what], task_type="CAUSAL_LM")
    refuses(lambda: patch(peft.get_peft_model(model(torch.bfloat16, kind, **changed), config)), what)


def test_pefts_layers_have_the_logits_of_those_of_these_tests() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=6, lora_alpha=20, use_rslora=True, target_modules=[*TARGETS], task_type="CAUSAL_LM")
    trainer = patch(peft.get_peft_model(model(), config))
    fill(trainer)
    assert_same_bits(logits_of(trainer), logits_of(patch(adapted())))
    tokens, mask = ways_to_pad(PARTS)["right"]
    refuses(lambda: trainer.eval()(input_ids=tokens, attention_mask=mask, adapter_names=["default"] * 3), "with hooks")


def test_pefts_layers_around_experts_have_the_logits_of_those_of_these_tests() -> None:
    peft = pytest.importorskip("peft")
    kind, changed = MIXTURE
    config = peft.LoraConfig(
        r=6,
        lora_alpha=20,
        use_rslora=True,
        target_modules=["q_proj", "v_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        rank_pattern={"experts.down_proj": 7},
        task_type="CAUSAL_LM",
    )
    trainer = patch(peft.get_peft_model(model(torch.bfloat16, kind, **changed), config, autocast_adapter_dtype=False))
    ours = mixture(targets=("q_proj", "v_proj", "o_proj", "experts"))
    fill(trainer)
    for theirs, layer in zip(_of_experts(trainer), _of_experts(ours), strict=True):
        assert_same_bits(theirs.get_delta_weight("default"), layer.delta())
    assert_same_bits(logits_of(trainer), logits_of(patch(ours)))
    with trainer.disable_adapter():
        without = logits_of(trainer)
    assert_same_bits(without, logits_of(patch(model(torch.bfloat16, kind, **changed))))


def _of_experts(trainer: torch.nn.Module) -> list[Any]:
    return [layer for layer in trainer.modules() if hasattr(layer, "parameter_name")]


def test_another_kind_of_peft_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    refuses(lambda: patch(peft.get_peft_model(model(), config)), "a trainer's PeftModelForCausalLM")
