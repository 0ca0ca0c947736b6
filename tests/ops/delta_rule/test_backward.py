"""Gradients of a gated delta net and of a state space beside those of the definition, token by token in float64."""

from itertools import pairwise

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.delta_rule import DeltaRuleReduction, reference
from vllm_batch_invariant.ops.delta_rule_backward import delta_rule_backward

KEY_HEADS, VALUE_HEADS, SIZE = 2, 4, 32
NEAR = {torch.float32: 2e-5, torch.bfloat16: 8e-3}
"""|gradient - definition| / |definition|, in norms: results are rounded once."""


@pytest.fixture(params=[True, False], ids=["delta net", "state space"])
def solve(request: pytest.FixtureRequest) -> bool:
    return request.param


def layer(tokens: int, dtype: torch.dtype, solve: bool) -> list[torch.Tensor]:
    """mixed, a, b, a_log, dt_bias, or mixed, dt, a, dt_bias, skip; heads keep their states for some tokens, and for
    hundreds.
    """
    generator = torch.Generator().manual_seed(0)
    widths = (2 * KEY_HEADS + VALUE_HEADS) * SIZE, VALUE_HEADS, *([VALUE_HEADS] * solve)
    rows = [torch.randn(tokens, width, generator=generator).to(dtype) for width in widths]
    a_log, bias = torch.linspace(-5.0, 0.0, VALUE_HEADS), torch.full((VALUE_HEADS,), 0.5).to(dtype)
    if solve:
        return [*rows, a_log.to(dtype), bias]
    return [*rows, -a_log.exp(), bias, torch.linspace(-1.0, 1.0, VALUE_HEADS).to(dtype)]


def gradient(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, VALUE_HEADS, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)


def of_definition(operands: list[torch.Tensor], grad: torch.Tensor, solve: bool) -> tuple[torch.Tensor, ...]:
    leaves = [one.double().requires_grad_() for one in operands]
    if solve:
        out, _ = reference.delta_rule(*reference.gdn_inputs(*leaves, KEY_HEADS, SIZE))
    else:
        mixed, dt, a, dt_bias, skip = leaves
        x, b, c = mixed.split([VALUE_HEADS * SIZE, KEY_HEADS * SIZE, KEY_HEADS * SIZE], dim=1)
        x, b, c = (one.unflatten(1, (-1, SIZE)) for one in (x, b, c))
        out, _ = reference.delta_rule(c, b, x, *reference.mamba2_gates(dt, a, dt_bias), solve=False, skip=skip)
    return torch.autograd.grad(out, leaves, grad.double())


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_gradients_are_near_those_of_the_definition(tokens: int, dtype: torch.dtype, solve: bool) -> None:
    operands, grad = layer(tokens, dtype, solve), gradient(tokens, dtype)
    reduction = DeltaRuleReduction.of(SIZE, SIZE, dtype, solve)
    found = delta_rule_backward(grad, operands, KEY_HEADS, [0, tokens], reduction)
    for ours, exact, given in zip(found, of_definition(operands, grad, solve), operands, strict=True):
        assert ours.dtype == given.dtype
        assert float((ours.double() - exact).norm()) <= NEAR[dtype] * float(exact.norm())


def test_a_sequences_gradients_do_not_depend_on_the_others(solve: bool) -> None:
    reduction, bounds = DeltaRuleReduction.of(SIZE, SIZE, torch.bfloat16, solve), [0, 70, 70, 71, 150]
    operands, grad = layer(bounds[-1], torch.bfloat16, solve), gradient(bounds[-1], torch.bfloat16)
    found, of_tokens = delta_rule_backward(grad, operands, KEY_HEADS, bounds, reduction), 3 if solve else 2
    for start, stop in pairwise(bounds):
        own = [one[start:stop] for one in operands[:of_tokens]] + operands[of_tokens:]
        alone = delta_rule_backward(grad[start:stop], own, KEY_HEADS, [0, stop - start], reduction)
        for ours, by_itself in zip(found[:of_tokens], alone, strict=False):
            assert_same_bits(ours[start:stop], by_itself)
    as_one = delta_rule_backward(grad, operands, KEY_HEADS, [0, bounds[-1]], reduction)
    assert not torch.equal(as_one[0], found[0])


def test_what_does_not_fit_is_refused(solve: bool) -> None:
    reduction, operands = DeltaRuleReduction.of(SIZE, SIZE, torch.float32, solve), layer(5, torch.float32, solve)
    grad = torch.zeros(5, VALUE_HEADS, SIZE)
    for bounds in ([0, 4], [1, 5], [0, 4, 3, 5]):
        with pytest.raises(ValueError, match="sequences of 5 tokens"):
            delta_rule_backward(grad, operands, KEY_HEADS, bounds, reduction)
    with pytest.raises(ValueError, match="no gradient"):
        delta_rule_backward(grad[:, :1], operands, KEY_HEADS, [0, 5], reduction)
    with pytest.raises(NotCovered):
        delta_rule_backward(grad.to("meta"), [one.to("meta") for one in operands], KEY_HEADS, [0, 5], reduction)
