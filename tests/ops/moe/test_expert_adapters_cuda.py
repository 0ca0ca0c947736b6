"""Adapters of experts on a GPU: a token's bits are its own and its adapter's, and those of dense products."""

from dataclasses import replace

import pytest
import torch

from tests.assertions import assert_near, assert_same_bits
from tests.ops.moe.adapted import composed
from vllm_batch_invariant.ops.moe import ExpertAdapters, Experts, MoeReduction, moe, reference, route

SHAPES: dict[str, tuple[int, int, int, int, str]] = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8, "silu"),
    "Mixtral": (4096, 14_336, 8, 2, "silu"),
    "gpt-oss-20b": (2880, 2880, 32, 4, "swigluoai"),
    "odd": (264, 136, 5, 3, "silu"),
}
"""Hidden and intermediate size, experts, those of a token, and the activation."""
COUNTS = (1, 2, 3, 8, 16, 17, 33, 64, 65, 128, 257, 1000)
SLOTS = 4
"""The last one has NaN, and no tokens."""
RANKS = (8, 16, 64)


def drawn(shape: str, rank: int = 16, rows: int = max(COUNTS)) -> tuple[torch.Tensor, torch.Tensor, Experts]:
    """Tokens, logits of a router, and experts with adapters."""
    hidden, inner, count, top_k, activation = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(rank)

    def of_size(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator, device="cuda") * size[-1] ** -0.5).bfloat16()

    def pair(k: int, columns: list[int]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        a = tuple(of_size(SLOTS, count, rank, k) for _ in columns)
        b = tuple(of_size(SLOTS, count, n, rank) for n in columns)
        for one in (*a, *b):
            one[-1] = torch.nan
        return a, b

    slots = torch.randint(-1, SLOTS - 1, (rows + 5,), generator=generator, device="cuda")
    columns = [2 * inner] if activation == "swigluoai" else [inner, inner]
    adapters = ExpertAdapters(slots, pair(hidden, columns), pair(inner, [hidden]))
    reduction = MoeReduction(count, top_k, torch.bfloat16, activation=activation)
    experts = Experts(of_size(count, 2 * inner, hidden), of_size(count, hidden, inner), reduction, adapters=adapters)
    x = of_size(rows, hidden) * hidden**0.5
    return x, torch.randn(rows, count, generator=generator, device="cuda"), experts


def made(x: torch.Tensor, logits: torch.Tensor, experts: Experts, rows: slice = slice(None)) -> torch.Tensor:
    """What some tokens become, with the adapters of all."""
    weights, ids = route(logits[rows], experts.reduction)
    adapters = experts.adapters
    own = None if adapters is None else replace(adapters, slots=adapters.slots[rows])
    return moe(x[rows], weights, ids, replace(experts, adapters=own))


@pytest.mark.parametrize("shape", ["Qwen3-30B-A3B", "odd"])
def test_values_are_near_float64(shape: str) -> None:
    x, logits, experts = drawn(shape, rows=6)
    weights, ids = route(logits, experts.reduction)
    of = experts.adapters
    assert of is not None
    pairs = (tuple(tuple(one.cpu() for one in slices) for slices in pair) for pair in (of.gate_up, of.down))
    adapters = ExpertAdapters(of.slots.cpu(), *pairs)
    there = replace(experts, gate_up=experts.gate_up.cpu(), down=experts.down.cpu(), adapters=adapters)
    exact = reference.moe(x.cpu(), weights.cpu(), ids.cpu(), there)
    assert_near(moe(x, weights, ids, experts).cpu(), exact, factor=8)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_has_the_same_bits_among_any_number_of_tokens(shape: str, rank: int) -> None:
    x, logits, experts = drawn(shape, rank)
    whole = made(x, logits, experts)
    assert whole.isfinite().all()
    for count in COUNTS:
        for start in (0, len(x) - count):
            rows = slice(start, start + count)
            assert_same_bits(made(x, logits, experts, rows), whole[rows], f"{count} tokens from {start} on")
    assert_same_bits(whole, composed(x, *route(logits, experts.reduction), experts), "dense products")


def test_every_token_alone_has_the_bits_that_it_has_among_256() -> None:
    x, logits, experts = drawn("Qwen3-30B-A3B", rows=256)
    whole = made(x, logits, experts)
    alone = torch.cat([made(x, logits, experts, slice(row, row + 1)) for row in range(256)])
    assert_same_bits(alone, whole, "alone")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_without_an_adapter_has_the_bits_of_experts_without_any(shape: str) -> None:
    x, logits, experts = drawn(shape, rows=200)
    assert experts.adapters is not None
    none = experts.adapters.slots[:200] < 0
    found, plain = made(x, logits, experts), made(x, logits, replace(experts, adapters=None))
    assert none.any()
    assert_same_bits(found[none], plain[none], "without an adapter")
    assert not torch.equal(found[~none], plain[~none])


def test_a_graph_has_the_adapters_that_tokens_have_when_it_is_replayed() -> None:
    x, logits, experts = drawn("Qwen3-30B-A3B", rows=40)
    assert experts.adapters is not None
    other = experts.adapters.slots.roll(3)
    expected = made(x, logits, replace(experts, adapters=replace(experts.adapters, slots=other)))
    weights, ids = route(logits, experts.reduction)
    moe(x, weights, ids, experts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(x, weights, ids, experts)
    experts.adapters.slots.copy_(other)
    graph.replay()
    assert_same_bits(out, expected, "replayed")


def test_a_fault_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens have the adapter of their neighbour, where there are several."""
    x, logits, experts = drawn("odd", rows=33)
    add = ExpertAdapters._add
    monkeypatch.setattr(
        ExpertAdapters, "_add", lambda self, y, x, of, tokens, experts: add(self, y, x, of, tokens.roll(1), experts)
    )
    whole = made(x, logits, experts)
    assert any(not torch.equal(made(x, logits, experts, slice(row, row + 1))[0], whole[row]) for row in range(33))
