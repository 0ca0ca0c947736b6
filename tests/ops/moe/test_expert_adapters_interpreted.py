"""Adapters of experts by the GPU's kernels, in Triton's interpreter: a pair is a row, and one adapter of one expert a
slot.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from tests import interpreted_dot
from tests.assertions import assert_same_bits
from tests.ops.moe.adapted import adapted, composed
from tests.ops.moe.layers import Layer, layer, one_expert, tokens, uniform
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.lora import LoraReduction
from vllm_batch_invariant.ops.lora import cuda as lora
from vllm_batch_invariant.ops.moe import ExpertAdapters, cuda, params, reference

HOPPER = Gpu("a Hopper", 132, 232_448, has_tma=True, l2_bytes=50 << 20, has_wgmma=True)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 8e-3}
"""Largest error in units of the largest result."""


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launchers take the interpreter for."""
    monkeypatch.setattr(Gpu, "of", lambda _: HOPPER)
    monkeypatch.setattr(params, "add_adapters", lora.add_adapters)
    of_device = LoraReduction.of_device
    monkeypatch.setattr(LoraReduction, "of_device", lambda _, k, dtype: of_device("cuda", k, dtype))


def made(
    of: Layer, x: torch.Tensor, logits: torch.Tensor, adapters: ExpertAdapters | None, rows: slice = slice(None)
) -> torch.Tensor:
    """What some tokens become, with the adapters of all."""
    own = None if adapters is None else replace(adapters, slots=adapters.slots[rows])
    weights, ids = cuda.route(logits[rows], of.reduction, None)
    return cuda.moe(x[rows], weights, ids, replace(of.experts, adapters=own))


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [("silu", torch.float16), ("swigluoai", torch.float32), ("relu2_no_mul", torch.float32), ("gelu", torch.float32)],
)
def test_results_are_near_the_exact_ones(activation: str, dtype: torch.dtype) -> None:
    of, x = layer(dtype, activation=activation), tokens(5, dtype)
    adapters, logits = adapted(of, 5), uniform(x, of)
    weights, ids = cuda.route(logits, of.reduction, None)
    exact = reference.moe(x, weights, ids, replace(of.experts, adapters=adapters))
    plain = reference.moe(x, weights, ids, of.experts)
    error = (made(of, x, logits, adapters).double() - exact).abs().max()
    assert float(error) < TOLERANCE[dtype] * float(exact.abs().max())
    assert float((exact - plain).abs().max()) > 0.1 * float(exact.abs().max())


@pytest.mark.parametrize("routing", [uniform, one_expert])
def test_a_token_has_the_same_bits_among_any_others(routing: Callable[..., torch.Tensor]) -> None:
    """22 tokens have 66 pairs, which a kernel groups; each program finds those of fewer."""
    of, x = layer(torch.float16), tokens(22, torch.float16)
    adapters, logits = adapted(of, 22), routing(x, of)
    whole = made(of, x, logits, adapters)
    for rows in (slice(0, 1), slice(7, 8), slice(21, 22), slice(4, 9)):
        assert_same_bits(made(of, x, logits, adapters, rows), whole[rows], str(rows))


@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_tokens_have_the_bits_of_dense_products(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of products that add K as a tensor core does."""
    monkeypatch.setattr(InterpreterBuilder, "create_dot", interpreted_dot.in_steps)
    of, x = layer(torch.float16, activation=activation), tokens(22, torch.float16)
    adapters, logits = adapted(of, 22), uniform(x, of)
    weights, ids = cuda.route(logits, of.reduction, None)
    of_dense = composed(x, weights, ids, replace(of.experts, adapters=adapters))
    assert_same_bits(made(of, x, logits, adapters), of_dense, "dense products")


def test_a_token_without_an_adapter_has_the_bits_of_experts_without_any() -> None:
    """The activation is then of the first product's own launch."""
    of, x = layer(torch.float16), tokens(22, torch.float16)
    adapters, logits = adapted(of, 22), uniform(x, of)
    none = adapters.slots[:22] < 0
    found, plain = made(of, x, logits, adapters), made(of, x, logits, None)
    assert none.any()
    assert_same_bits(found[none], plain[none], "without an adapter")
    assert not torch.equal(found[~none], plain[~none])


def test_tokens_that_are_computed_in_parts_have_their_own_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    of, x = layer(torch.float16), tokens(9, torch.float16)
    adapters, logits = adapted(of, 9), uniform(x, of)
    whole = made(of, x, logits, adapters)
    monkeypatch.setattr(cuda, "_BYTES_AT_ONCE", 4 * of.reduction.top_k * x.shape[1] * x.itemsize)
    assert_same_bits(made(of, x, logits, adapters), whole, "4 at once")


def _by_rows(add: Callable[..., None]) -> Callable[..., None]:
    """Pairs have the adapter of the token before, where there are several tokens."""

    def faulty(self: ExpertAdapters, y: Any, x: Any, of: Any, tokens_of: torch.Tensor, experts: Any) -> None:
        add(self, y, x, of, (tokens_of - 1).clamp_min(0), experts)

    return faulty


def test_a_fault_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    of, x = layer(torch.float16), tokens(9, torch.float16)
    adapters, logits = adapted(of, 9), one_expert(x, of)
    monkeypatch.setattr(ExpertAdapters, "_add", _by_rows(ExpertAdapters._add))
    whole = made(of, x, logits, adapters)
    alone: Sequence[torch.Tensor] = [made(of, x, logits, adapters, slice(row, row + 1))[0] for row in range(9)]
    assert any(not torch.equal(one, other) for one, other in zip(alone, whole, strict=True))
