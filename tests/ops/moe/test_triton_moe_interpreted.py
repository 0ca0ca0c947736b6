"""A mixture of experts by the GPU's kernels, in Triton's interpreter: choices are those of the CPU, and a token's bits
are its own.
"""

from dataclasses import replace

import pytest
import torch

from tests.ops.moe.layers import EXPERTS, ROUTINGS, Layer, layer, tied, tokens, uniform
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.linear import schedule as of_linear
from vllm_batch_invariant.ops.linear.schedule import Gpu
from vllm_batch_invariant.ops.moe import cpu, cuda, reference, triton_kernels

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
"""Largest error in units of the largest result."""
HOPPER = Gpu("a Hopper", 132, 232_448, has_tma=True, l2_bytes=50 << 20, has_wgmma=True)
OLDER = replace(HOPPER, name="an older GPU", has_tma=False, has_wgmma=False)


@pytest.fixture(autouse=True, params=[HOPPER], ids=lambda gpu: gpu.name)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """What the launchers take the interpreter for."""
    monkeypatch.setattr(of_linear, "gpu", lambda _: request.param)
    return request.param


on_every_gpu = pytest.mark.parametrize("gpu", [HOPPER, OLDER], indirect=True, ids=lambda gpu: gpu.name)


def made(of: Layer, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    weights, ids = cuda.route(logits, of.reduction, of.score_bias)
    return cuda.moe(x, weights, ids, of.gate_up, of.down, of.reduction, of.gate_up_bias, of.down_bias, None)


@pytest.mark.parametrize(
    ("fields", "top_k"), [({}, 8), ({"scoring": "sigmoid", "scale": 2.5}, 3), ({"renormalise": False}, 1)], ids=str
)
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_experts_are_chosen_as_on_a_cpu(routing, fields, top_k):
    of = layer(torch.float16, biased=True, **fields)
    logits = routing(tokens(13, torch.float16), of)
    logits[3], logits[4, 2], logits[5] = torch.nan, torch.nan, -torch.inf
    for bias in (None, of.score_bias, -torch.zeros(EXPERTS)):
        reduction = replace(of.reduction, top_k=top_k)
        scores = cpu.softmax(logits.float()) if reduction.scoring == "softmax" else logits.float().sigmoid()
        with_scores = cuda.route(logits, reduction, bias)
        weights, ids = cpu.route_by(scores, reduction, bias)
        assert torch.equal(with_scores[1], ids)
        torch.testing.assert_close(with_scores[0], weights, rtol=1e-5, atol=0, equal_nan=True)


def test_groups_of_experts_are_chosen_as_on_a_cpu():
    of = layer(torch.float16, biased=True, scoring="sigmoid", groups=4, top_groups=2)
    logits = uniform(tokens(21, torch.float16), of)
    for found, expected in zip(
        cuda.route(logits, of.reduction, of.score_bias),
        cpu.route_by(logits.float().sigmoid(), of.reduction, of.score_bias),
        strict=True,
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [("silu", torch.float16), *((one, torch.float32) for one in ("silu", "gelu", "gelu_tanh", "swigluoai"))],
)
def test_results_are_near_the_exact_ones(activation, dtype):
    of = layer(dtype, biased=True, activation=activation)
    x = tokens(4, dtype)
    weights, ids = cuda.route(uniform(x, of), of.reduction, of.score_bias)
    found = cuda.moe(x, weights, ids, of.gate_up, of.down, of.reduction, of.gate_up_bias, of.down_bias, None)
    exact = reference.moe(x, weights, ids, reduction=of.reduction, **of.experts)
    assert float((found.double() - exact).abs().max()) < TOLERANCE[dtype] * float(exact.abs().max())


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_a_token_has_the_same_bits_among_any_others_in_any_order(routing):
    of, x = layer(torch.float16), tokens(22, torch.float16)
    logits = routing(x, of)
    whole = made(of, x, logits)
    for row in range(0, len(x), 7):
        assert torch.equal(made(of, x[row : row + 1], logits[row : row + 1]), whole[row : row + 1])
    assert torch.equal(made(of, x[:2], logits[:2]), whole[:2])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert torch.equal(made(of, x[order], logits[order]), whole[order])


def test_rows_of_nan_and_parts_of_a_batch_move_no_bit(monkeypatch):
    of, x = layer(torch.float16), tokens(20, torch.float16)
    logits = tied(x, of)
    whole = made(of, x, logits)
    monkeypatch.setattr(cuda, "_PAIRS_AT_ONCE", 16)
    assert torch.equal(made(of, x, logits), whole)
    dirty, unclear = (torch.cat((one, torch.full_like(one[:5], torch.nan))) for one in (x, logits))
    assert torch.equal(made(of, dirty, unclear)[:20], whole)


def test_tiles_grow_with_the_pairs_of_an_expert():
    chosen = [cuda.layer_schedule(pairs, 128, torch.bfloat16, HOPPER) for pairs in (8, 64, 65, 2048, 8192, 100_000)]
    assert [one.few_pairs > 0 for one in chosen] == [True, True, False, False, False, False]
    assert [one.gate_up.block_m for one in chosen] == sorted(one.gate_up.block_m for one in chosen)


@pytest.mark.parametrize("gpu", [HOPPER, OLDER])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_number_of_pairs_has_a_schedule(gpu, dtype):
    schedules = cuda.layer_schedules(dtype, gpu)
    served = {cuda.layer_schedule(pairs, 32, dtype, gpu) for pairs in range(1, 4096)}
    assert served == set(schedules)


GROUPED = {
    "few": (torch.tensor([[5, 1]]), 16), "some": (torch.randint(0, 3, (700, 2)), 16),
    "of one expert": (torch.zeros(40, 1), 32), "many": (torch.randint(0, 6, (2100, 2)), 128),
}  # fmt: skip


@pytest.mark.parametrize(("ids", "block_m"), GROUPED.values(), ids=GROUPED)
def test_every_pair_is_in_a_block_of_its_expert(ids, block_m):
    tile = cuda.GroupedSchedule(block_m, 16, 16, 4, 2)
    groups = cuda.group(ids.long(), 6, cuda.LayerSchedule(tile, tile))
    placed = []
    for number, expert in enumerate(groups.expert_of_block.tolist()):
        own = range(number * block_m, min((number + 1) * block_m, int(groups.stop[expert]))) if expert >= 0 else []
        pairs = groups.pairs[list(own)]
        assert expert < 0 or (len(pairs) and (ids.flatten()[pairs] == expert).all())
        placed += pairs.tolist()
    assert sorted(placed) == list(range(ids.numel()))


@pytest.mark.parametrize("tokens_", [1, 2, 13])
def test_programs_that_look_for_their_pairs_find_all_of_them(tokens_):
    ids = torch.randint(0, 3, (tokens_, 4), generator=torch.Generator().manual_seed(tokens_))
    x, weight = torch.ones(tokens_, 16, dtype=torch.float16), torch.ones(3, 16, 16, dtype=torch.float16)
    weight *= torch.arange(1, 4)[:, None, None]
    tile = cuda.GroupedSchedule(16, 16, 16, 4, 2)
    groups = cuda.group(ids, 3, cuda.LayerSchedule(tile, tile, few_pairs=64))
    found = cuda.grouped_gemm(x, weight, None, groups, ids.numel(), torch.float32, tile)
    assert torch.equal(found, (16.0 * (ids.flatten() + 1))[:, None].expand(-1, 16))


@on_every_gpu
@pytest.mark.parametrize("biased", [False, True])
def test_an_activation_in_the_tile_rounds_as_one_of_a_written_product(gpu, biased):
    """For numbers whose sums are exact: the interpreter's other sums follow the tile."""
    draw = torch.Generator().manual_seed(0)
    gate_up = torch.randint(-9, 10, (EXPERTS, 80, 48), generator=draw).half() / 32
    bias = torch.randint(-9, 10, (EXPERTS, 80), generator=draw).half() / 32 if biased else None
    for count in (3, 20, 60, 100, 200):
        x = torch.randint(-9, 10, (count, 48), generator=draw).half() / 4
        ids = torch.arange(3 * count).view(count, 3) % EXPERTS
        schedule = cuda.layer_schedule(ids.numel(), EXPERTS, torch.float16, gpu)
        groups, tile = cuda.group(ids, EXPERTS, schedule), schedule.gate_up
        written = cuda.grouped_gemm(x, gate_up, bias, groups, ids.numel(), torch.float16, tile)
        found = cuda.grouped_gemm(x, gate_up, bias, groups, ids.numel(), torch.float16, tile, gated=True)
        assert torch.equal(found, cuda._activated(written, "silu"))


@on_every_gpu
def test_tiles_are_certified_and_another_product_is_not(gpu, monkeypatch):
    """Of integers: the interpreter's sums of other numbers follow the tile."""

    def integers(m, n, k, dtype, device, seed=0):
        draw = torch.Generator().manual_seed(seed)
        return [torch.randint(-3, 4, (rows, k), generator=draw).to(dtype) / 64 for rows in (m, n)]

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "the interpreter")
    monkeypatch.setattr(cuda, "cancelling", integers)
    monkeypatch.setattr(cuda.triton_gemm, "accumulate", lambda a, b: a.float() @ b.float())
    assert cuda.certify(40, 96, torch.float16, torch.device("cpu")) > 0
    monkeypatch.setattr(cuda.triton_gemm, "accumulate", lambda a, b: a.float() @ b.float() + (len(a) > 9))
    with pytest.raises(NotCovered, match=r"schedule \d \(.*\) of 19 rows has other bits than a dense layer"):
        cuda.certify(40, 96, torch.float16, torch.device("cpu"))
    monkeypatch.setattr(cuda.triton_gemm, "accumulate", lambda a, b: a.float() @ b.float())
    monkeypatch.setattr(cuda, "_activated", lambda hidden, _: hidden.chunk(2, 1)[0])
    with pytest.raises(NotCovered, match="gated"):
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
