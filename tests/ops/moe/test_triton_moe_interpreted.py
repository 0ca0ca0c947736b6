"""A mixture of experts by the GPU's kernels, in Triton's interpreter: choices are those of the CPU, and a token's bits
are its own.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.moe_variants import COMBINE, combine
from tests.faults.experts import FAULTS, planted
from tests.ops.moe.layers import EXPERTS, ROUTINGS, Layer, layer, tied, tokens, uniform
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.moe import Experts, MoeReduction, cpu, cuda, reference, triton_kernels
from vllm_batch_invariant.ops.moe.reduction import ACTIVATIONS
from vllm_batch_invariant.ops.norm.cuda import rms_norm

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
"""Largest error in units of the largest result."""
HOPPER = Gpu("a Hopper", 132, 232_448, has_tma=True, l2_bytes=50 << 20, has_wgmma=True)
OLDER = replace(HOPPER, name="an older GPU", has_tma=False, has_wgmma=False)


@pytest.fixture(autouse=True, params=[HOPPER], ids=lambda gpu: gpu.name)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """What the launchers take the interpreter for."""
    monkeypatch.setattr(Gpu, "of", lambda _: request.param)
    return request.param


on_every_gpu = pytest.mark.parametrize("gpu", [HOPPER, OLDER], indirect=True, ids=lambda gpu: gpu.name)


def made(of: Layer, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    weights, ids = cuda.route(logits, of.reduction, of.score_bias)
    return cuda.moe(x, weights, ids, of.experts)


def products_of(of: Layer, x: torch.Tensor, logits: torch.Tensor) -> cuda.Products:
    weights, ids = cuda.route(logits, of.reduction, of.score_bias)
    return cuda.products(x, weights, ids, of.experts)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """As the kernels compute it, by the interpreter's exponential function."""
    return 1 / (1 + torch.from_numpy(np.exp(-x.numpy())))


ROUTERS = {
    "softmax": ({}, 8),
    "softmax in groups": ({"groups": 2, "top_groups": 1}, 4),
    "sigmoid": ({"scoring": "sigmoid", "scale": 2.5}, 3),
    "sigmoid in groups": ({"scoring": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5}, 3),
    "sigmoid in groups of one": ({"scoring": "sigmoid", "groups": 8, "top_groups": 3, "renormalise": False}, 3),
    "not renormalised": ({"renormalise": False}, 1),
}


@pytest.mark.parametrize(("fields", "top_k"), ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_experts_are_chosen_as_on_a_cpu(routing, fields, top_k):
    of = layer(torch.float16, biased=True, top_k=top_k, **fields)
    logits = routing(tokens(13, torch.float16), of)
    logits[3], logits[4, 2], logits[5], logits[6, 1:4] = torch.nan, torch.nan, -torch.inf, torch.inf
    by_softmax = of.reduction.scoring == "softmax"
    scores = cpu.softmax(logits.float()) if by_softmax else sigmoid(logits.float())
    low = of.score_bias.clone()
    low[::3] = -torch.inf
    for bias in (None, of.score_bias, -torch.zeros(EXPERTS), low):
        found, ids = cuda.route(logits, of.reduction, bias)
        expected, of_cpu = cpu.route_by(scores, of.reduction, bias)
        assert torch.equal(ids, of_cpu)
        torch.testing.assert_close(found, expected, rtol=1e-5 if by_softmax else 0, atol=0, equal_nan=True)


def test_as_many_experts_as_models_have_are_chosen_as_on_a_cpu():
    """160 in 8 groups are no power of two; of 2048 in 64 groups PyTorch's functions choose."""
    for experts, groups, top_groups in ((160, 8, 3), (2048, 64, 4)):
        reduction = MoeReduction(
            experts, 8, torch.float16, scoring="sigmoid", groups=groups, top_groups=top_groups, renormalise=False
        )
        draw = torch.Generator().manual_seed(experts)
        logits = torch.randint(-8, 9, (6, experts), generator=draw).half() / 4
        bias = torch.randint(-2, 3, (experts,), generator=draw).float() / 8
        for found, expected in zip(
            cuda.route(logits, reduction, bias), cpu.route_by(sigmoid(logits.float()), reduction, bias), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_another_rule_for_ties_of_groups_is_found(monkeypatch):
    reduction = MoeReduction(EXPERTS, 2, torch.float16, scoring="sigmoid", groups=4, top_groups=1)
    logits = torch.zeros(1, EXPERTS, dtype=torch.float16)
    assert cuda.route(logits, reduction, None)[1].tolist() == [[0, 1]]
    monkeypatch.setattr(triton_kernels.tl, "min", triton_kernels.tl.max)
    assert cuda.route(logits, reduction, None)[1].tolist() != [[0, 1]]


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [("silu", torch.float16), *((one, torch.float32) for one in ACTIVATIONS)],
)
def test_results_are_near_the_exact_ones(activation, dtype):
    of = layer(dtype, biased=True, activation=activation)
    x = tokens(4, dtype)
    weights, ids = cuda.route(uniform(x, of), of.reduction, of.score_bias)
    found = cuda.moe(x, weights, ids, of.experts)
    exact = reference.moe(x, weights, ids, of.experts)
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
    monkeypatch.setattr(cuda, "_BYTES_AT_ONCE", 16 * x.shape[1] * 4)
    assert torch.equal(made(of, x, logits), whole)
    dirty, unclear = (torch.cat((one, torch.full_like(one[:5], torch.nan))) for one in (x, logits))
    assert torch.equal(made(of, dirty, unclear)[:20], whole)


def test_tiles_grow_with_the_pairs_of_an_expert():
    for columns in (192, 768):
        chosen = [
            cuda.layer_schedule(pairs, 128, columns, torch.bfloat16, HOPPER)
            for pairs in (8, 64, 65, 2048, 8192, 100_000)
        ]
        assert [one.few_pairs > 0 for one in chosen] == [True, True, False, False, False, False]
        assert [one.gate_up.block_m for one in chosen] == sorted(one.gate_up.block_m for one in chosen)


@pytest.mark.parametrize("gpu", [HOPPER, OLDER])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_number_of_pairs_has_a_schedule(gpu, dtype):
    schedules = cuda.layer_schedules(dtype, gpu)
    served = {cuda.layer_schedule(pairs, 32, columns, dtype, gpu) for columns in (192, 193) for pairs in range(1, 8192)}
    assert served == set(schedules)


GROUPED = {
    "few": (torch.tensor([[5, 1]]), 16), "some": (torch.randint(0, 3, (700, 2)), 16),
    "of one expert": (torch.zeros(40, 1), 32), "many": (torch.randint(0, 6, (2100, 2)), 128),
    "many of one expert": (torch.full((4099, 1), 5), 64),
    "as many as every program counts": (torch.randint(0, 6, (4096, 1)), 64),
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


def test_programs_that_group_do_so_in_the_order_of_pairs_however_many_there_are(monkeypatch):
    """Of 300 experts, of which every third is elsewhere."""
    ids = torch.randint(0, 300, (3000, 2), generator=torch.Generator().manual_seed(2))
    places = torch.where(torch.arange(300) % 3 > 0, torch.arange(300).flip(0), -1).int()
    tile = cuda.GroupedSchedule(32, 16, 16, 4, 2)
    found = []
    for at_once in (8192, 1024):  # all programs' counts, and two of them
        monkeypatch.setattr(cuda, "_COUNTS_AT_ONCE", at_once)
        groups = cuda.group(ids, 300, cuda.LayerSchedule(tile, tile), places)
        of_blocks = groups.expert_of_block.tolist()
        pairs = [
            (expert, groups.pairs[number * 32 : min((number + 1) * 32, int(groups.stop[expert]))].tolist())
            for number, expert in enumerate(of_blocks)
            if expert >= 0
        ]
        found.append(pairs)
    placed = places[ids.flatten()]
    right = [(place, (placed == place).nonzero().flatten().tolist()) for place in range(300)]
    right = [(place, all_[at : at + 32]) for place, all_ in right for at in range(0, len(all_), 32)]
    assert found == [right, right]


@pytest.mark.parametrize("tokens_", [1, 2, 13])
def test_programs_that_look_for_their_pairs_find_all_of_them(tokens_):
    ids = torch.randint(0, 3, (tokens_, 4), generator=torch.Generator().manual_seed(tokens_))
    x, weight = torch.ones(tokens_, 16, dtype=torch.float16), torch.ones(3, 16, 16, dtype=torch.float16)
    weight *= torch.arange(1, 4)[:, None, None]
    tile = cuda.GroupedSchedule(16, 16, 16, 4, 2)
    groups = cuda.group(ids, 3, cuda.LayerSchedule(tile, tile, few_pairs=64))
    found = cuda.grouped_gemm(x, weight, None, groups, ids.numel(), torch.float32, tile)
    assert torch.equal(found, (16.0 * (ids.flatten() + 1))[:, None].expand(-1, 16))


def activated(hidden: torch.Tensor, activation: str) -> torch.Tensor:
    """The definition, by the interpreter's exponential function."""
    if activation == "swigluoai":
        gate, up = hidden[:, ::2].float().clamp(max=7.0), hidden[:, 1::2].float().clamp(-7.0, 7.0)
        return ((up + 1) * (gate * sigmoid(gate * 1.702))).to(hidden.dtype)
    if activation == "relu2_no_mul":
        return hidden.float().relu().square().to(hidden.dtype)
    gate, up = (half.float() for half in hidden.chunk(2, dim=1))
    return ((gate / (1 + torch.from_numpy(np.exp(-gate.numpy())))).to(hidden.dtype).float() * up).to(hidden.dtype)


@on_every_gpu
@pytest.mark.parametrize(
    ("activation", "biased"),
    [("silu", False), ("silu", True), ("swigluoai", True), ("gelu_tanh", True), ("relu2_no_mul", False)],
)
def test_an_activation_in_the_tile_rounds_as_one_of_a_written_product(gpu, activation, biased):
    """For numbers whose sums are exact: the interpreter's other sums follow the tile."""
    draw = torch.Generator().manual_seed(0)
    gate_up = torch.randint(-9, 10, (EXPERTS, 80, 48), generator=draw).half() / 32
    bias = torch.randint(-9, 10, (EXPERTS, 80), generator=draw).half() / 32 if biased else None
    for count in (3, 20, 60, 100, 200) if activation == "silu" else (3, 60):
        x = torch.randint(-9, 10, (count, 48), generator=draw).half() / 4
        ids = torch.arange(3 * count).view(count, 3) % EXPERTS
        schedule = cuda.layer_schedule(ids.numel(), EXPERTS, 40, torch.float16, gpu)
        groups, tile = cuda.group(ids, EXPERTS, schedule), schedule.gate_up
        written = cuda.grouped_gemm(x, gate_up, bias, groups, ids.numel(), torch.float16, tile)
        found = cuda.grouped_gemm(x, gate_up, bias, groups, ids.numel(), torch.float16, tile, activation=activation)
        assert torch.equal(found, cuda._activated(written, activation))
        if activation != "gelu_tanh":
            assert torch.equal(found, activated(written, activation))


def test_an_activation_keeps_nan_and_clamps():
    gate, up = torch.tensor([torch.nan, 1.0, 100.0, -100.0]), torch.tensor([1.0, torch.nan, 100.0, -100.0])
    found = cuda._activated(torch.stack((gate, up), dim=1).reshape(1, -1), "swigluoai")
    assert found[0, :2].isnan().all()
    assert torch.equal(found[0, 2:], activated(torch.tensor([[7.0, 7.0, -100.0, -7.0]]), "swigluoai")[0])
    squares = cuda._activated(torch.stack((gate, up)), "relu2_no_mul")
    assert squares[0, 0].isnan()
    assert squares[1, 1].isnan()
    assert squares[0, 1:].tolist() == [1.0, 10_000.0, 0.0]


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
    monkeypatch.setattr(cuda, "_activated", lambda hidden, *_: hidden.chunk(2, 1)[0])
    with pytest.raises(NotCovered, match="silu"):
        cuda.certify(40, 96, torch.float16, torch.device("cpu"))


@pytest.mark.parametrize("count", [2, 30])
def test_experts_that_are_not_here_are_left_out(count):
    """Weights of 0 leave them out, too. Integers: the interpreter's sums of other numbers follow the tile."""
    draw, reduction = torch.Generator().manual_seed(count), MoeReduction(EXPERTS, 3, torch.float16)
    x, gate_up, down = (
        torch.randint(-3, 4, shape, generator=draw).half()
        for shape in ((count, 48), (EXPERTS, 64, 48), (EXPERTS, 48, 32))
    )
    ids = torch.rand(count, EXPERTS, generator=draw).argsort(1)[:, :3].contiguous()
    weights = torch.rand(count, 3, generator=draw)
    whole = cuda.moe(x, weights, ids, Experts(gate_up, down, reduction))
    for here in (torch.tensor([6, 1, 3]), torch.arange(EXPERTS)):
        places = torch.full((EXPERTS,), -1, dtype=torch.int32)
        places[here] = torch.arange(len(here), dtype=torch.int32)
        absent = ~torch.isin(ids, here)
        own = Experts(gate_up[here], down[here], reduction, places=places)
        found = cuda.moe(x, weights.masked_fill(absent, torch.nan), ids, own)
        without = weights.masked_fill(absent, 0)
        assert torch.equal(found, cuda.moe(x, without, ids, Experts(gate_up, down, reduction)))
        assert absent.any() != torch.equal(found, whole)


def test_another_tie_rule_is_found(monkeypatch):
    of = layer(torch.float16)
    logits = tied(tokens(21, torch.float16), of)
    expected = cpu.route_by(cpu.softmax(logits.float()), of.reduction, None)[1]
    assert torch.equal(cuda.route(logits, of.reduction, None)[1], expected)
    monkeypatch.setattr(triton_kernels.tl, "min", triton_kernels.tl.max)
    assert not torch.equal(cuda.route(logits, of.reduction, None)[1], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [1, 40])
def test_a_norm_that_adds_has_the_bits_of_a_sum_and_a_norm(dtype, count):
    of, x = layer(dtype), tokens(count, dtype)
    logits, residual, weight = uniform(x, of), 3 * tokens(count, dtype).flip(0), tokens(1, dtype)[0]
    found = cuda.add_and_norm(products_of(of, x, logits), residual, weight, 1e-6)
    wanted = rms_norm(made(of, x, logits), weight, 1e-6, residual, None)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    unrounded = rms_norm(made(of, x, logits).float(), weight.float(), 1e-6, residual.float(), None)[1].to(dtype)
    assert torch.equal(found[1], unrounded)


def test_sums_of_many_tokens_are_not_left_to_a_norm(monkeypatch):
    of, x = layer(torch.float16), tokens(40, torch.float16)
    assert cuda.a_norm_may_add(x, of.experts)
    assert not cuda.a_norm_may_add(x[:0], of.experts)
    assert not cuda.a_norm_may_add(torch.zeros(1, 16_385, dtype=x.dtype), of.experts)
    monkeypatch.setattr(cuda, "_BYTES_AT_ONCE", 39 * of.reduction.top_k * x.shape[1] * x.itemsize)
    assert not cuda.a_norm_may_add(x, of.experts)
    assert cuda.a_norm_may_add(x[1:], of.experts)


def test_a_residual_that_does_not_fit_is_refused():
    of, x = layer(torch.float16), tokens(3, torch.float16)
    left, weight = products_of(of, x, uniform(x, of)), tokens(1, torch.float16)[0]
    for residual in (x[:2], x.float()):
        with pytest.raises(ValueError, match="3 rows of"):
            cuda.add_and_norm(left, residual, weight, 1e-6)


@pytest.fixture(scope="module")
def right():
    """By routing: a layer, 81 tokens, their logits, and what is made of them."""
    of, x = layer(torch.float16), tokens(81, torch.float16)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Gpu, "of", lambda _: HOPPER)
        return {routing: (of, x, routing(x, of), made(of, x, routing(x, of))) for routing in (uniform, tied)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_gives_many_tokens_other_bits(fault, right):
    """As the interpreter's products follow their tiles, those of as many tokens are compared."""
    *given, expected = right[tied if fault == "another tie rule" else uniform]
    with planted(fault, in_triton=True):
        assert not torch.equal(made(*given), expected)


def test_however_the_sum_walks_its_bits_are_the_same():
    of, x = layer(torch.float16), tokens(5, torch.float16)
    given = products_of(of, x, uniform(x, of))
    expected = given.added()
    for walk in COMBINE:
        out = torch.empty_like(expected)
        combine(walk, given, out)
        assert torch.equal(out, expected)
