"""A mixture of experts by the GPU's kernels, in Triton's interpreter: choices are those of the CPU, and a token's bits
are its own.
"""

from dataclasses import replace

import pytest
import torch

from tests.ops.moe.layers import EXPERTS, ROUTINGS, Layer, layer, tied, tokens, uniform
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.moe import cpu, cuda, reference, triton_kernels

COUNTS = (1, 2, 19)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
"""Largest error in units of the largest result."""


def made(of: Layer, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    weights, ids = cuda.route(logits, of.reduction, of.score_bias)
    return cuda.moe(x, weights, ids, of.gate_up, of.down, of.reduction, of.gate_up_bias, of.down_bias, None)


@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("fields", [{}, {"scoring": "sigmoid", "scale": 2.5}, {"renormalise": False}], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_experts_are_chosen_as_on_a_cpu(routing, fields, top_k):
    of = layer(torch.float16, biased=True, **fields)
    logits = routing(tokens(21, torch.float16), of)
    logits[3], logits[4, 2], logits[5] = torch.nan, torch.nan, -torch.inf
    for bias in (None, of.score_bias, -torch.zeros(EXPERTS)):
        reduction = replace(of.reduction, top_k=top_k)
        scores = cpu.softmax(logits.float()) if reduction.scoring == "softmax" else logits.float().sigmoid()
        with_scores = cuda.route(logits, reduction, bias)
        for found, expected in zip(with_scores, cpu.route_by(scores, reduction, bias), strict=True):
            assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


def test_groups_of_experts_are_chosen_as_on_a_cpu():
    of = layer(torch.float16, biased=True, scoring="sigmoid", groups=4, top_groups=2)
    logits = uniform(tokens(21, torch.float16), of)
    for found, expected in zip(
        cuda.route(logits, of.reduction, of.score_bias),
        cpu.route_by(logits.float().sigmoid(), of.reduction, of.score_bias),
        strict=True,
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swigluoai"])
def test_results_are_near_the_exact_ones(activation, dtype):
    of = layer(dtype, biased=True, activation=activation)
    x = tokens(9, dtype)
    weights, ids = cuda.route(uniform(x, of), of.reduction, of.score_bias)
    found = cuda.moe(x, weights, ids, of.gate_up, of.down, of.reduction, of.gate_up_bias, of.down_bias, None)
    exact = reference.moe(x, weights, ids, reduction=of.reduction, **of.experts)
    assert float((found.double() - exact).abs().max()) < TOLERANCE[dtype] * float(exact.abs().max())


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_a_token_has_the_same_bits_among_any_others_in_any_order(routing):
    of, x = layer(torch.float16), tokens(max(COUNTS), torch.float16)
    logits = routing(x, of)
    alone = torch.cat([made(of, x[row : row + 1], logits[row : row + 1]) for row in range(len(x))])
    for count in COUNTS:
        assert torch.equal(made(of, x[:count], logits[:count]), alone[:count])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert torch.equal(made(of, x[order], logits[order]), alone[order])


def test_rows_of_nan_and_parts_of_a_batch_move_no_bit(monkeypatch):
    of, x = layer(torch.float16), tokens(20, torch.float16)
    logits = tied(x, of)
    whole = made(of, x, logits)
    monkeypatch.setattr(cuda, "_PAIRS_AT_ONCE", 16)
    assert torch.equal(made(of, x, logits), whole)
    dirty, unclear = (torch.cat((one, torch.full_like(one[:5], torch.nan))) for one in (x, logits))
    assert torch.equal(made(of, dirty, unclear)[:20], whole)


def test_tiles_grow_with_the_pairs_of_an_expert():
    chosen = [cuda.grouped_schedule(pairs, 128, torch.bfloat16).block_m for pairs in (8, 2048, 2049, 8192, 100_000)]
    assert chosen == [16, 16, 32, 64, 128]


def test_every_pair_is_in_a_block_of_its_expert():
    for ids, block_m in ((torch.tensor([[5, 1]]), 16), (torch.randint(0, 3, (700, 2)), 16), (torch.zeros(40, 1), 32)):
        groups = cuda.group(ids.long(), 6, block_m)
        blocks = groups.pairs.view(-1, block_m)
        assert sorted(groups.pairs[groups.pairs >= 0].tolist()) == list(range(ids.numel()))
        for expert, block in zip(groups.expert_of_block.tolist(), blocks, strict=True):
            assert (ids.flatten()[block[block >= 0]] == expert).all()
            assert expert < 0 or (block >= 0).any()


def test_tiles_are_certified_and_another_product_is_not(monkeypatch):
    """Of integers: the interpreter's sums of other numbers follow the tile."""

    def integers(m, n, k, dtype, device, seed=0):
        draw = torch.Generator().manual_seed(seed)
        return [torch.randint(-3, 4, (rows, k), generator=draw).to(dtype) for rows in (m, n)]

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "the interpreter")
    monkeypatch.setattr(cuda, "cancelling", integers)
    monkeypatch.setattr(cuda.triton_gemm, "accumulate", lambda a, b: a.float() @ b.float())
    assert cuda.certify(40, 96, torch.float16, torch.device("cpu")) > 0
    monkeypatch.setattr(cuda.triton_gemm, "accumulate", lambda a, b: a.float() @ b.float() + (len(a) > 9))
    with pytest.raises(NotCovered, match="tile 0 of 19 rows has other bits than a dense layer"):
        cuda.certify(40, 96, torch.float16, torch.device("cpu"))


def test_a_part_of_the_experts_is_refused():
    of, x = layer(torch.float16), tokens(2, torch.float16)
    weights, ids = cuda.route(uniform(x, of), of.reduction, None)
    with pytest.raises(NotCovered, match="a part of the experts on a GPU"):
        cuda.moe(x, weights, ids, of.gate_up, of.down, of.reduction, None, None, torch.arange(EXPERTS))


def test_another_tie_rule_is_found(monkeypatch):
    of = layer(torch.float16)
    logits = tied(tokens(21, torch.float16), of)
    expected = cpu.route_by(cpu.softmax(logits.float()), of.reduction, None)[1]
    assert torch.equal(cuda.route(logits, of.reduction, None)[1], expected)
    monkeypatch.setattr(triton_kernels.tl, "min", triton_kernels.tl.max)
    assert not torch.equal(cuda.route(logits, of.reduction, None)[1], expected)
