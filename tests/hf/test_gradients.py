"""Gradients of a patched model: near those of float64, and independent of padding and of other sequences."""

from dataclasses import replace

import pytest
import torch

from tests.assertions import DTYPES, assert_same_bits
from tests.hf.models import DEVICE, FAMILIES, model, packed, sequences, ways_to_pad
from vllm_batch_invariant.envs import TP_TREE
from vllm_batch_invariant.hf import patch, recurrence, short_conv, token_logprobs

RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.06, torch.float16: 0.006}
"""Largest |gradient - reference| / |reference| of any weight, in norms, against a float64 model."""
OF_STOCK = 2.0
"""How much larger than Hugging Face's own that error may be."""
OF_STATES = {"linear_key_head_dim": (1e-4, 2.0), "ssm_state_size": (1e-5, 4.0)}
"""Both, in fp32 of Qwen3.5 and of Nemotron-H, by a size of theirs: Hugging Face's float64 model computes gates and
rules in fp32, as its fp32 model does.
"""
PARTS = sequences((45, 70, 7))
WEIGHTS = [torch.randn(len(part) - 1, generator=torch.Generator().manual_seed(len(part))) for part in PARTS]
"""Of each token's logprob in the loss."""


def plain(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(wide, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def loss_of(logits: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor, logprobs=token_logprobs) -> torch.Tensor:
    """A weighted sum of the logprobs of every real token but each sequence's first."""
    every = logprobs(logits[:, :-1], tokens[:, 1:])
    weights = torch.zeros_like(every)
    for row, weight in enumerate(WEIGHTS[: len(tokens)]):
        real = mask[row].nonzero().squeeze(1)
        weights[row, real[:-1]] = weight.to(weights)
    return (every * weights).sum()


def gradients(trainer: torch.nn.Module, tokens: torch.Tensor, mask: torch.Tensor, logprobs=token_logprobs):
    trainer.zero_grad()
    loss_of(trainer(tokens, attention_mask=mask).logits, mask, tokens, logprobs).backward()
    return {name: weight.grad.clone() for name, weight in trainer.named_parameters()}


def of_family(name: str) -> torch.nn.Module:
    kind, changed = FAMILIES[name]
    return model(torch.bfloat16, kind, **changed)


def compare_with_exact_ones(dtype: torch.dtype, *kind: type, **changed: object) -> None:
    most, of_theirs = next(
        (OF_STATES[size] for size in changed if size in OF_STATES), (RELATIVE_ERROR[dtype], OF_STOCK)
    )
    tokens, mask = ways_to_pad(PARTS)["right"]
    stock = model(dtype, *kind, **changed)
    exact = model(dtype, *kind, **changed).double()
    exact.set_experts_implementation("eager")  # the other ones have no float64
    expected = gradients(exact, tokens, mask, plain)
    theirs = gradients(stock, tokens, mask, plain)
    ours = gradients(patch(model(dtype, *kind, **changed)), tokens, mask)
    for name, reference in expected.items():
        error, of_stock = (
            float((found[name].double() - reference).norm() / reference.norm()) for found in (ours, theirs)
        )
        assert error <= min(most, of_theirs * of_stock), (name, error, of_stock)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_as_near_to_the_exact_ones_as_hugging_faces(dtype: torch.dtype) -> None:
    compare_with_exact_ones(dtype)


@pytest.mark.skipif(DEVICE == "cuda", reason="a tree is refused on a GPU")
def test_a_tree_of_workers_has_other_bits_and_gradients_as_near(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, mask = ways_to_pad(PARTS)["right"]
    without = patch(model(torch.bfloat16))(tokens, attention_mask=mask).logits
    monkeypatch.setenv(TP_TREE.name, "2")
    compare_with_exact_ones(torch.bfloat16)
    assert not torch.equal(patch(model(torch.bfloat16))(tokens, attention_mask=mask).logits, without)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_every_family_are_as_near_to_the_exact_ones(name: str) -> None:
    kind, changed = FAMILIES[name]
    compare_with_exact_ones(torch.float32, kind, **changed)


@pytest.mark.parametrize("name", ["Qwen3, tied", "Qwen3.5", "Nemotron-H", "LFM2, tied"])
def test_padding_moves_no_bit_of_any_gradient(name: str) -> None:
    trainer, ways = patch(of_family(name)), ways_to_pad(PARTS)
    expected = gradients(trainer, *ways.pop("right"))
    for way, (tokens, mask) in ways.items():
        for name, gradient in gradients(trainer, tokens, mask).items():
            assert_same_bits(gradient, expected[name], f"{way}, {name}")


def packed_gradients(trainer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those of :func:`gradients`, of all sequences in one row."""
    tokens, positions = packed(PARTS)
    trainer.zero_grad()
    logits = trainer(tokens, position_ids=positions).logits[0]
    logprobs = token_logprobs(logits[:-1], tokens[0, 1:])
    last = torch.tensor([len(part) for part in PARTS]).cumsum(0)[:-1] - 1
    within = torch.ones(len(logprobs), dtype=torch.bool)
    within[last] = False
    (logprobs[within.to(logprobs.device)] * torch.cat(WEIGHTS).to(logprobs)).sum().backward()
    return {name: weight.grad.clone() for name, weight in trainer.named_parameters()}


@pytest.mark.parametrize("name", ["Qwen3, tied", "Qwen3.5", "Nemotron-H", "LFM2, tied"])
def test_a_packed_row_has_the_gradients_of_a_padded_batch(name: str) -> None:
    trainer = patch(of_family(name))
    expected = gradients(trainer, *ways_to_pad(PARTS)["right"])
    for weight, gradient in packed_gradients(trainer).items():
        assert_same_bits(gradient, expected[weight], weight)


@pytest.mark.skipif(DEVICE == "cuda", reason="gradients of layers with states are a CPU's")
@pytest.mark.parametrize("name", ["Qwen3.5", "Nemotron-H"])
def test_a_gradient_that_goes_back_into_the_sequence_before_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = patch(of_family(name))
    expected, backward = packed_gradients(trainer), recurrence.delta_rule_backward

    def as_one_sequence(grad, operands, key_heads, cu_seqlens, reduction):
        return backward(grad, operands, key_heads, [0, cu_seqlens[-1]], reduction)

    monkeypatch.setattr(recurrence, "delta_rule_backward", as_one_sequence)
    found = packed_gradients(trainer)
    through = [name for name in found if "conv1d" in name]
    assert through
    assert all(not torch.equal(found[name], expected[name]) for name in through)


@pytest.mark.skipif(DEVICE == "cuda", reason="gradients of layers with states are a CPU's")
def test_a_convolutions_gradient_that_goes_back_into_the_sequence_before_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = patch(of_family("LFM2, tied"))
    expected, convolve = packed_gradients(trainer), short_conv.convolve

    def far_from_a_begin(x, weight, bias, batch, gated):
        return convolve(x, weight, bias, replace(batch, positions=batch.positions + weight.shape[1]), gated)

    monkeypatch.setattr(short_conv, "convolve", far_from_a_begin)
    found = packed_gradients(trainer)
    through = [name for name in found if ".conv." in name and "out_proj" not in name]
    assert through
    assert all(not torch.equal(found[name], expected[name]) for name in through)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3, tied",
        "Llama with biases and its rotary scaling, tied",
        "Qwen3-MoE",
        "Qwen3.5",
        "Nemotron-H",
        "LFM2, tied",
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_at_a_sequences_tokens_does_not_depend_on_the_others(dtype: torch.dtype, name: str) -> None:
    kind, changed = FAMILIES[name]
    trainer = patch(model(dtype, kind, **changed))

    def at_the_first(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        embeddings = trainer.get_input_embeddings()(tokens).detach().requires_grad_()
        loss_of(trainer(inputs_embeds=embeddings, attention_mask=mask).logits, mask, tokens).backward()
        return embeddings.grad[0][mask[0].bool()]

    whole = ways_to_pad(PARTS)
    expected = at_the_first(*ways_to_pad(PARTS[:1])["right"])
    assert expected.any()
    for way, batch in whole.items():
        assert_same_bits(at_the_first(*batch), expected, way)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["Qwen3, tied", "Qwen3-MoE", "Qwen3.5", "Nemotron-H", "LFM2, tied"])
def test_layers_that_are_computed_again_have_the_same_logits_and_gradients(name: str, reentrant: bool) -> None:
    kind, changed = FAMILIES[name]
    trainer = patch(model(torch.bfloat16, kind, **changed)).train()
    tokens, mask = ways_to_pad(PARTS)["right"]
    expected, logits = gradients(trainer, tokens, mask), trainer(tokens, attention_mask=mask).logits
    trainer.gradient_checkpointing_enable({"use_reentrant": reentrant})
    layer = trainer.model.layers[0]
    part = next(getattr(layer, name) for name in ("mlp", "mixer", "feed_forward") if hasattr(layer, name))
    forward, calls = part.forward, []
    part.forward = lambda *args: calls.append(0) or forward(*args)
    assert_same_bits(trainer(tokens, attention_mask=mask).logits, logits)
    calls.clear()
    for weight, gradient in gradients(trainer, tokens, mask).items():
        assert_same_bits(gradient, expected[weight], weight)
    assert len(calls) == 2


def test_a_frozen_weight_gets_no_gradient_and_changes_no_other() -> None:
    trainer, (tokens, mask) = patch(model()), ways_to_pad(PARTS)["right"]
    expected = gradients(trainer, tokens, mask)
    frozen = ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight")
    trainer.zero_grad(set_to_none=True)
    for name, weight in trainer.named_parameters():
        weight.requires_grad_(name not in frozen)
    loss_of(trainer(tokens, attention_mask=mask).logits, mask, tokens).backward()
    for name, weight in trainer.named_parameters():
        if name in frozen:
            assert weight.grad is None
        else:
            assert_same_bits(weight.grad, expected[name], name)
