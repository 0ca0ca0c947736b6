"""What an adapter makes of a token in its experts follows from the token and its adapter alone."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.assertions import DTYPES, assert_near, assert_same_bits
from tests.ops.moe.adapted import SLOTS, adapted
from tests.ops.moe.layers import ROUTINGS, Layer, layer, tokens, uniform
from vllm_batch_invariant.ops.linear import linear
from vllm_batch_invariant.ops.lora import LoraReduction, add_adapters
from vllm_batch_invariant.ops.moe import ExpertAdapters, cpu, moe, reference, route

COUNT = 41


def made(
    of: Layer, x: torch.Tensor, logits: torch.Tensor, adapters: ExpertAdapters | None, rows: slice = slice(None)
) -> torch.Tensor:
    """What some tokens become, with the adapters of all."""
    own = None if adapters is None else replace(adapters, slots=adapters.slots[rows])
    return cpu.prepared_moe(x[rows], *route(logits[rows], of.reduction), replace(of.prepared, adapters=own))


def differing(of: Layer, adapters: ExpertAdapters, routing: Callable[..., torch.Tensor] = uniform) -> list[int]:
    """Tokens that have other bits alone than among all."""
    x = tokens(COUNT, of.reduction.dtype)
    logits = routing(x, of)
    among = made(of, x, logits, adapters)
    alone = (made(of, x, logits, adapters, slice(row, row + 1))[0] for row in range(COUNT))
    return [row for row, one in enumerate(alone) if not torch.equal(one, among[row])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
def test_values_are_near_float64(dtype: torch.dtype, activation: str) -> None:
    of, x = layer(dtype, activation=activation), tokens(12, dtype)
    experts = replace(of.experts, adapters=adapted(of, 12))
    routes = route(uniform(x, of), of.reduction)
    exact = reference.moe(x, *routes, experts)
    assert_near(moe(x, *routes, experts), exact, 8)
    plain = reference.moe(x, *routes, of.experts)
    assert float((exact - plain).abs().max()) > 0.1 * float(plain.abs().max())


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_a_token_has_the_same_bits_alone_and_among_others(routing: Callable[..., torch.Tensor]) -> None:
    of = layer()
    assert differing(of, adapted(of, COUNT), routing) == []


def test_a_token_without_an_adapter_has_the_bits_of_experts_without_any() -> None:
    of, x = layer(), tokens(COUNT)
    adapters, logits = adapted(of, COUNT), uniform(x, of)
    none = adapters.slots[:COUNT] < 0
    assert none.any()
    found, plain = made(of, x, logits, adapters), made(of, x, logits, None)
    assert_same_bits(found[none], plain[none], "without an adapter")
    assert not torch.equal(found[~none], plain[~none])


def test_bits_do_not_follow_from_the_slot_the_room_or_what_is_in_others() -> None:
    of, x = layer(), tokens(COUNT)
    adapters, logits, places = adapted(of, COUNT), uniform(x, of), torch.tensor([5, 1, 3])

    def moved(slices: tuple[torch.Tensor, ...], side: int) -> tuple[torch.Tensor, ...]:
        found = []
        for one in slices:
            size = list(one.shape)
            size[0], size[side] = 6, 24
            more = torch.full(size, torch.nan, dtype=one.dtype)
            more[places] = torch.nn.functional.pad(one, (0, 0, 0, 8) if side == 2 else (0, 8))
            found.append(more)
        return tuple(found)

    slots = torch.where(adapters.slots < 0, adapters.slots, places[adapters.slots.clamp_min(0)])
    pairs = ((moved(a, 2), moved(b, 3)) for a, b in (adapters.gate_up, adapters.down))
    other = ExpertAdapters(slots, *pairs)
    assert_same_bits(made(of, x, logits, other), made(of, x, logits, adapters), "other slots, beside NaN")


def test_tokens_that_are_computed_in_parts_have_their_own_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    of, x = layer(), tokens(COUNT)
    adapters, logits = adapted(of, COUNT), uniform(x, of)
    whole = made(of, x, logits, adapters)
    monkeypatch.setattr(cpu, "_TOKENS_AT_ONCE", 7)
    assert_same_bits(made(of, x, logits, adapters), whole, "7 at once")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_of_one_expert_has_the_bits_of_a_dense_layer_with_its_adapter(dtype: torch.dtype) -> None:
    of, x, expert = layer(dtype, top_k=1), tokens(9, dtype), 5
    adapters = adapted(of, 9)
    ids = torch.full((9, 1), expert)
    found = cpu.prepared_moe(x, torch.ones(9, 1), ids, replace(of.prepared, adapters=adapters))

    def product(rows: torch.Tensor, weight: torch.Tensor, pair: tuple[tuple[torch.Tensor, ...], ...]) -> torch.Tensor:
        y = linear(rows, weight[expert])
        a, b = ([one[:, expert : expert + 1].contiguous() for one in slices] for slices in pair)
        add_adapters(y, rows, a, b, adapters.slots[:9], LoraReduction.of_device("cpu", rows.shape[1], dtype))
        return y

    activated = cpu._activated(product(x, of.gate_up, adapters.gate_up), "silu")
    assert_same_bits(found, product(activated, of.down, adapters.down), "dense")


def _neighbour(add: Callable[..., None]) -> Callable[..., None]:
    """The adapter of the token before, where there are several."""

    def faulty(
        self: ExpertAdapters, y: torch.Tensor, x: torch.Tensor, of: object, tokens: torch.Tensor, experts: object
    ):
        add(self, y, x, of, tokens.roll(1), experts)

    return faulty


def _rounded(add: Callable[..., None]) -> Callable[..., None]:
    """What is added is rounded before, where there are several."""

    def faulty(self: ExpertAdapters, y: torch.Tensor, *rest: object) -> None:
        if len(y) == 1:
            return add(self, y, *rest)
        delta = torch.zeros_like(y)
        add(self, delta, *rest)
        y += delta
        return None

    return faulty


@pytest.mark.parametrize("fault", [_neighbour, _rounded])
def test_a_fault_shows(fault: Callable[..., Callable[..., None]], monkeypatch: pytest.MonkeyPatch) -> None:
    of = layer()
    monkeypatch.setattr(ExpertAdapters, "_add", fault(ExpertAdapters._add))
    assert differing(of, adapted(of, COUNT))


def test_what_does_not_fit_is_refused() -> None:
    of, x = layer(), tokens(4)
    routes, adapters = route(uniform(x, of), of.reduction), adapted(of, 4)
    (a, b), down = adapters.gate_up, adapters.down
    for wrong in (
        replace(adapters, slots=adapters.slots[:3]),
        replace(adapters, slots=adapters.slots[:, None]),
        replace(adapters, gate_up=(a[:1], b)),
        replace(adapters, gate_up=(a[:1], b[:1])),
        replace(adapters, down=(down[0], (down[1][0][:, 1:],))),
        replace(adapters, gate_up=(a, (b[0], b[1][:, :, :, :3]))),
    ):
        with pytest.raises(ValueError, match="no adapters of"):
            moe(x, *routes, replace(of.experts, adapters=wrong))
    assert len(adapters.down[0][0]) == SLOTS
