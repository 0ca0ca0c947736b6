"""A trainer whose linear layers quantise to FP8: gradients, layers that do not, codes for engines, what is refused."""

import itertools
from dataclasses import asdict
from functools import partial

import pytest
import torch
from transformers import Qwen2Config, Qwen3MoeConfig

from tests.assertions import assert_same_bits
from tests.hf.models import DEVICE, EXPERTS, model, sequences
from tests.hf.test_refusals import refuses
from vllm_batch_invariant import envs
from vllm_batch_invariant.hf import check_engine, engine_weights, patch, rollout
from vllm_batch_invariant.hf.experts import experts
from vllm_batch_invariant.hf.fp8 import QUANTIZATIONS, layers_of
from vllm_batch_invariant.hf.linear import linear
from vllm_batch_invariant.integration.layers.fp8 import Source
from vllm_batch_invariant.ops.moe import MoeReduction, route
from vllm_batch_invariant.ops.quantise import E4M3, reference
from vllm_batch_invariant.ops.quantise.weights import quantise_weight

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3}
"""Of the error of a gradient relative to it, in norms."""
IN_BLOCKS = {"num_attention_heads": 2, "num_key_value_heads": 2}
"""Whose query, key and value have whole blocks, as gate has with so many inner columns."""
of_blocks = partial(model, **IN_BLOCKS, intermediate_size=384)


@pytest.fixture(autouse=True)
def gpu_with_fp8() -> None:
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products of e4m3")


def numbers(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What codes [N, K] and scales of blocks, of rows or of all stand for, in float64."""
    scale = scale.double().view(-1, 1) if scale.dim() == 1 else scale.double()
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(128, 0)[: len(codes)].repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes.double() * scale


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_gradients_are_those_of_the_quantised_product_handed_on(name: str, dtype: torch.dtype) -> None:
    source, draw = QUANTIZATIONS[name], torch.Generator().manual_seed(0)
    x, *weights = (
        (torch.randn(rows, 300, generator=draw) * rows**0.5).to(DEVICE, dtype).requires_grad_()
        for rows in (20, 128, 70)
    )
    bias, seen = (torch.randn(size, generator=draw).to(DEVICE, dtype) for size in (128, (20, 198)))
    biases = [bias.requires_grad_(), bias[:70].detach().requires_grad_()]
    linear(x, *weights, biases=biases, fp8=source).backward(seen)
    of_x, scale = reference.quantise(x.detach(), codes=E4M3, group=source.group)
    near_x = of_x * (scale[:, None] if source.group is None else scale.repeat_interleave(128, 1)[:, :300])
    matrices = [numbers(*quantise_weight(weight.detach(), source.shared)) for weight in weights]
    wide = seen.double()
    expected = {x: wide @ torch.cat(matrices)}
    expected |= dict(zip(weights, (wide.t() @ near_x).split([128, 70]), strict=True))
    expected |= dict(zip(biases, wide.sum(0).split([128, 70]), strict=True))
    for parameter, right in expected.items():
        error = (parameter.grad.double() - right).norm() / right.norm()
        assert error < TOLERANCE[dtype], error
    plain = wide @ torch.cat([weight.detach().double() for weight in weights])
    assert (plain - expected[x]).norm() / plain.norm() > 2e-2, "what is not quantised has another gradient"


def handed_on(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The numbers, whose gradient is handed on to x."""
    return x + (numbers.double() - x).detach()


def of_codes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is multiplied in the place of x [rows, K] in a dtype."""
    codes, scale = reference.quantise(x.detach().to(dtype), codes=E4M3, group=128)
    return codes.double() * scale.double().repeat_interleave(128, 1)[:, : x.shape[1]]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_of_experts_are_those_of_the_quantised_products_handed_on(dtype: torch.dtype) -> None:
    """Where a number lies between two codes, a rounding decides, and in bf16 each product and each sum has one."""
    near = {torch.float32: 5e-3, torch.bfloat16: 2e-2}[dtype]
    draw, (tokens, count, top_k, hidden, inner) = torch.Generator().manual_seed(2), (30, 4, 2, 256, 256)
    sizes = (tokens, hidden), (count, 2 * inner, hidden), (count, hidden, inner)
    x, gate_up, down = (
        (torch.randn(size, generator=draw) * size[-1] ** (-0.5 * (number > 0))).to(DEVICE, dtype).requires_grad_()
        for number, size in enumerate(sizes)
    )
    logits, seen = (torch.randn(tokens, size, generator=draw).to(DEVICE, dtype) for size in (count, hidden))
    reduction = MoeReduction(count, top_k, dtype)
    experts(x, logits, gate_up, down, reduction, fp8=Source("block")).backward(seen)
    weights, ids = route(logits, reduction)

    def gradients(quantises: bool) -> list[torch.Tensor]:
        wide = [one.detach().double().requires_grad_() for one in (x, gate_up, down)]
        rows, *stored = wide
        if quantises:
            rows = handed_on(rows, of_codes(rows, dtype))
            stored = [
                handed_on(one, torch.stack([numbers(*quantise_weight(of.detach().to(dtype), "block")) for of in one]))
                for one in stored
            ]
        out = torch.zeros(tokens, hidden, dtype=torch.float64, device=DEVICE)
        for token, place in itertools.product(range(tokens), range(top_k)):
            expert = ids[token, place]
            gate, up = (rows[token] @ stored[0][expert].t()).chunk(2)
            activated = torch.nn.functional.silu(gate) * up
            if quantises:
                activated = handed_on(activated, of_codes(activated[None], dtype)[0])
            out[token] += weights[token, place].double() * (activated @ stored[1][expert].t())
        out.backward(seen.double())
        return [one.grad for one in wide]

    for parameter, right, plain in zip((x, gate_up, down), gradients(True), gradients(False), strict=True):
        error = (parameter.grad.double() - right).norm() / right.norm()
        assert error < near, error
        assert (parameter.grad.double() - plain).norm() / plain.norm() > 1.5 * near


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_a_row_has_the_same_bits_in_any_batch_and_a_step_of_a_weight_shows(name: str) -> None:
    trainer = patch(of_blocks(), name)
    tokens, *_ = sequences((45,))
    with torch.no_grad():
        alone = trainer(tokens[None]).logits[0]
        among = trainer(torch.cat([tokens, tokens])[None], position_ids=torch.arange(45, device=DEVICE).repeat(2)[None])
        assert_same_bits(among.logits[0, 45:], alone)
        trainer.model.layers[-1].mlp.down_proj.weight[5, 7] += 2.0
        assert not torch.equal(trainer(tokens[None]).logits[0], alone)


@pytest.mark.skipif(DEVICE == "cuda", reason="of every device")
def test_layers_that_are_named_stay_as_they_are_and_an_engine_has_to_say_so() -> None:
    down, gate_up = "model.layers.1.mlp.down_proj", "model.layers.0.mlp.gate_up_proj"
    parts = [gate_up.replace("gate_up", part) for part in ("gate", "up")]
    trainer = patch(of_blocks(), "fp8_per_block", [down, *parts])
    in_16_bits = {name for name, layers in layers_of(trainer).items() if layers[0].fp8 is None}
    assert in_16_bits == {down, gate_up}
    assert {name.rpartition(".")[0] for name, weight in engine_weights(trainer) if weight.dtype == E4M3} == {
        *(name for name, layer in trainer.named_modules() if getattr(layer, "fp8", None) == Source("block"))
    }
    declared = asdict(rollout._environment(trainer, torch.bfloat16))
    check_engine(trainer, declared)
    refuses(
        lambda: check_engine(patch(of_blocks(), "fp8_per_block", [down]), declared),
        rf"an engine with linear \({gate_up}\).* patch\(model, quantization=\.\.\., unquantised=\.\.\.\)",
    )
    for other, said in (("fp8_per_channel", "FP8 by block"), (None, "FP8 by block")):
        refuses(
            lambda other=other: check_engine(patch(of_blocks(), other), declared),
            rf"an engine with quantise \({said}\).* patch\(model, quantization=|trainer with quantise",
        )
    plain = asdict(rollout._environment(patch(of_blocks()), torch.bfloat16))
    refuses(lambda: check_engine(trainer, plain), r"quantise \(FP8 by block\) dtype unset beside a trainer with")


def test_what_an_engine_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(lambda: patch(model(), "fp8"), "a trainer with quantization 'fp8'.*fp8_per_block")
    refuses(lambda: patch(model(), unquantised=["lm_head"]), "a trainer with quantization None")
    refuses(lambda: patch(of_blocks(), "fp8_per_block", ["lm_head"]), "the layers lm_head of a trainer left")
    query = "model.layers.0.self_attn.q_proj"
    refuses(lambda: patch(of_blocks(), "fp8_per_block", [query]), rf"{query} in a trainer's dtype beside the rest of")
    refuses(
        lambda: patch(model(of=Qwen2Config, hidden_size=384), "fp8_per_block"),
        r"blocks of 128 x 128 of model\.layers\.0\.mlp\.gate_up_proj, of which a part has 320",
    )
    of_experts = partial(model, of=Qwen3MoeConfig, **EXPERTS | IN_BLOCKS)
    refuses(lambda: patch(of_experts(moe_intermediate_size=128), "fp8_per_channel"), "experts.*pass fp8_per_block")
    one = of_experts(moe_intermediate_size=128, num_hidden_layers=3, hidden_size=256, intermediate_size=256)
    refuses(
        lambda: patch(one, "fp8_per_block", ["model.layers.1.mlp.experts"]),
        "experts of some layers of a trainer in FP8 .*: model.layers.1.mlp.experts, model.layers.2.mlp.experts",
    )
    patch(one, "fp8_per_block", ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts", "model.layers.2.mlp.gate"])
    refuses(lambda: patch(of_experts(moe_intermediate_size=192), "fp8_per_block"), "192 inputs of the experts of model")
    if DEVICE == "cpu":
        monkeypatch.setenv(envs.TP_TREE.name, "2")
        refuses(lambda: patch(of_blocks(), "fp8_per_channel"), "activations in FP8 that have a scale a row")
