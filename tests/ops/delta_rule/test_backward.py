"""Gradients of a gated delta net beside those of the definition, token by token in float64."""

from itertools import pairwise

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.delta_rule import DeltaRuleReduction, reference
from vllm_batch_invariant.ops.delta_rule_backward import gdn_backward

KEY_HEADS, VALUE_HEADS, SIZE = 2, 4, 32
NEAR = {torch.float32: 2e-5, torch.bfloat16: 8e-3}
"""|gradient - definition| / |definition|, in norms: results are rounded once."""


def layer(tokens: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """mixed, a, b, a_log, dt_bias; heads keep their states for some tokens, and for hundreds."""
    generator = torch.Generator().manual_seed(seed)
    widths = (2 * KEY_HEADS + VALUE_HEADS) * SIZE, VALUE_HEADS, VALUE_HEADS
    rows = [torch.randn(tokens, width, generator=generator).to(dtype) for width in widths]
    return [*rows, torch.linspace(-5.0, 0.0, VALUE_HEADS).to(dtype), torch.full((VALUE_HEADS,), 0.5).to(dtype)]


def of_definition(operands: list[torch.Tensor], grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [one.double().requires_grad_() for one in operands]
    out, _ = reference.delta_rule(*reference.gdn_inputs(*leaves, KEY_HEADS, SIZE))
    return torch.autograd.grad(out, leaves, grad.double())


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_gradients_are_near_those_of_the_definition(tokens: int, dtype: torch.dtype) -> None:
    operands = layer(tokens, dtype)
    grad = torch.randn(tokens, VALUE_HEADS, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    reduction = DeltaRuleReduction.of(SIZE, SIZE, dtype)
    found = gdn_backward(grad, *operands, KEY_HEADS, [0, tokens], reduction)
    for ours, exact, given in zip(found, of_definition(operands, grad), operands, strict=True):
        assert ours.dtype == given.dtype
        assert float((ours.double() - exact).norm()) <= NEAR[dtype] * float(exact.norm())


def test_a_sequences_gradients_do_not_depend_on_the_others() -> None:
    reduction, bounds = DeltaRuleReduction.of(SIZE, SIZE, torch.bfloat16), [0, 70, 70, 71, 150]
    operands = layer(bounds[-1], torch.bfloat16)
    grad = torch.randn(bounds[-1], VALUE_HEADS, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = gdn_backward(grad, *operands, KEY_HEADS, bounds, reduction)
    for start, stop in pairwise(bounds):
        own = [one[start:stop] for one in operands[:3]] + operands[3:]
        alone = gdn_backward(grad[start:stop], *own, KEY_HEADS, [0, stop - start], reduction)
        for ours, by_itself in zip(found[:3], alone, strict=False):
            assert_same_bits(ours[start:stop], by_itself)
    as_one = gdn_backward(grad, *operands, KEY_HEADS, [0, bounds[-1]], reduction)
    assert not torch.equal(as_one[0], found[0])


def test_what_does_not_fit_is_refused() -> None:
    reduction, operands = DeltaRuleReduction.of(SIZE, SIZE, torch.float32), layer(5, torch.float32)
    grad = torch.zeros(5, VALUE_HEADS, SIZE)
    for bounds in ([0, 4], [1, 5], [0, 4, 3, 5]):
        with pytest.raises(ValueError, match="sequences of 5 tokens"):
            gdn_backward(grad, *operands, KEY_HEADS, bounds, reduction)
    with pytest.raises(ValueError, match="no gradient"):
        gdn_backward(grad[:, :1], *operands, KEY_HEADS, [0, 5], reduction)
    with pytest.raises(NotCovered):
        gdn_backward(*(one.to("meta") for one in (grad, *operands)), KEY_HEADS, [0, 5], reduction)
