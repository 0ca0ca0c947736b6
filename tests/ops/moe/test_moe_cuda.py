"""A mixture of experts on a GPU: a token's bits are its own, and those of dense layers."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.linear import triton_gemm
from vllm_batch_invariant.ops.moe import Experts, MoeReduction, cuda, moe, reference, route
from vllm_batch_invariant.ops.moe.routes import route_by
from vllm_batch_invariant.ops.norm import rms_norm
from vllm_batch_invariant.ops.softmax import softmax

FAMILIES: dict[str, tuple[tuple[int, int, int, int], dict[str, object], bool]] = {
    "Qwen3-30B-A3B": ((128, 8, 2048, 768), {}, False),
    "a quarter of it": ((128, 8, 2048, 192), {}, False),
    "gpt-oss": ((32, 4, 2880, 2880), {"activation": "swigluoai"}, True),
    "GLM-4.5-Air": ((128, 8, 4096, 1408), {"scoring": "sigmoid"}, True),
    "groups": ((160, 6, 1024, 512), {"scoring": "sigmoid", "groups": 8, "top_groups": 3, "scale": 2.5}, True),
    "groups by their best": ((64, 6, 512, 256), {"groups": 8, "top_groups": 3, "scale": 16.0}, False),
    "odd": ((6, 3, 200, 88), {"renormalise": False}, False),
    "odd, in turn": ((6, 3, 200, 88), {"activation": "swigluoai"}, True),
}
"""Experts, those of a token, hidden and intermediate size; of the reduction; and whether there are biases: of experts
for "swigluoai", else of scores.
"""
COUNTS = (1, 2, 3, 7, 8, 9, 16, 65, 140, 257, 600, 1000, 2049, 4096, 8193)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * shape[-1] ** -0.5).bfloat16()


class Layer:
    def __init__(self, family: str) -> None:
        (experts, top_k, hidden, intermediate), fields, biased = FAMILIES[family]
        self.reduction = MoeReduction(experts, top_k, torch.bfloat16, **fields)
        self.gate_up, self.down = draw(experts, 2 * intermediate, hidden), draw(experts, hidden, intermediate, seed=1)
        self.score_bias, biases = None, {}
        if biased and self.reduction.activation == "swigluoai":
            biases = {"gate_up_bias": 20 * draw(experts, 2 * intermediate), "down_bias": draw(experts, hidden)}
        elif biased:
            self.score_bias = draw(experts, seed=9).float()
        self.experts = Experts(self.gate_up, self.down, self.reduction, **biases)

    def route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return route(logits, self.reduction, self.score_bias)

    def products(self, x: torch.Tensor, logits: torch.Tensor, places: torch.Tensor | None = None) -> cuda.Products:
        return cuda.products(x, *self.route(logits), replace(self.experts, places=places))

    def __call__(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return moe(x, *self.route(logits), self.experts)


def mapped(experts: Experts, function: Callable[[torch.Tensor], torch.Tensor]) -> Experts:
    """With other weights and biases."""
    held = {name: getattr(experts, name) for name in ("gate_up", "down", "gate_up_bias", "down_bias")}
    return replace(experts, **{name: function(tensor) for name, tensor in held.items() if tensor is not None})


@pytest.fixture(params=FAMILIES)
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(request.param)


def routings(count: int, experts: int) -> dict[str, torch.Tensor]:
    uniform = draw(count, experts, seed=2) * experts**0.5
    one = uniform.clone()
    one[:, 5] += 20
    return {
        "uniform": uniform,
        "skewed": uniform - torch.arange(experts, device="cuda") * 0.2,
        "one expert": one,
        "tied": (uniform > 0).bfloat16(),
    }


def test_a_token_has_the_same_bits_among_any_others_in_any_order(layer: Layer) -> None:
    most, experts = max(COUNTS), layer.reduction.num_experts
    x = draw(most, layer.down.shape[1], seed=3) * 30
    for name, logits in routings(most, experts).items():
        whole = layer(x, logits)
        for count in COUNTS:
            assert torch.equal(layer(x[:count], logits[:count]), whole[:count]), (name, count)
        for row in (0, 5, most - 1):
            assert torch.equal(layer(x[row : row + 1], logits[row : row + 1]), whole[row : row + 1]), (name, row)
        order = torch.randperm(most, device="cuda")
        assert torch.equal(layer(x[order], logits[order]), whole[order]), name
        for others in (30, 5000):
            dirty = torch.cat((x[:9], torch.full_like(x[:others], torch.nan)))
            unclear = torch.cat((logits[:9], torch.full_like(logits[:others], torch.nan)))
            assert torch.equal(layer(dirty, unclear)[:9], whole[:9]), (name, others)


def splitting_k(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As a library may do it for few rows: each half of K in a GEMM of its own."""
    if len(x) > 16:
        return torch.nn.functional.linear(x, weight)
    halves = zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)
    return sum(torch.nn.functional.linear(*half).float() for half in halves).to(x.dtype)


def by_library(of: Layer, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The same layer with a GEMM on the tokens of each expert."""
    weights, ids = of.route(logits)
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in ids.unique().tolist():
        row, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = splitting_k(x[row], of.gate_up[expert]).chunk(2, dim=1)
        made = splitting_k(torch.nn.functional.silu(gate) * up, of.down[expert])
        out[row] += made.float() * weights[row, slot, None]
    return out.to(x.dtype)


def test_gemms_that_split_k_for_few_rows_fail_the_same_comparison() -> None:
    layer, x = Layer("Qwen3-30B-A3B"), draw(4096, 2048, seed=3) * 30
    logits = routings(4096, 128)["uniform"]
    whole = by_library(layer, x, logits)
    assert any(not torch.equal(by_library(layer, x[:count], logits[:count]), whole[:count]) for count in (1, 7, 65))


def test_every_tile_has_the_bits_of_a_dense_layer(layer: Layer) -> None:
    activation = layer.reduction.activation
    for weight in (layer.gate_up, layer.down):
        assert cuda.certify(*weight.shape[1:], torch.bfloat16, weight.device, activation) > 0
    experts, top_k = layer.reduction.num_experts, layer.reduction.top_k
    x = draw(300, layer.down.shape[1], seed=4)
    _, ids = layer.route(routings(300, experts)["skewed"])
    for schedule in cuda.layer_schedules(torch.bfloat16, Gpu.of(0)):
        for count in (2, schedule.few_pairs // top_k) if schedule.few_pairs else (2, 300):
            own, rows = ids[:count].contiguous(), x[:count]
            groups, asked = cuda.group(own, experts, schedule), (own.numel(), torch.bfloat16, schedule.gate_up)
            bias = layer.experts.gate_up_bias
            plain = cuda.grouped_gemm(rows, layer.gate_up, bias, groups, *asked)
            gated = cuda.grouped_gemm(rows, layer.gate_up, bias, groups, *asked, activation=activation)
            for expert in own.unique().tolist():
                pairs = (own.flatten() == expert).nonzero().squeeze(1)
                used = rows[pairs // top_k], layer.gate_up[expert].t()
                dense = triton_gemm.mm(*used, None if bias is None else bias[expert])
                assert torch.equal(plain[pairs], dense), schedule
                assert torch.equal(gated[pairs], cuda._activated(dense, activation)), schedule


@pytest.mark.parametrize("family", ["Qwen3-30B-A3B", "gpt-oss", "odd"])
def test_experts_that_are_not_here_are_left_out(family: str) -> None:
    """As if their weights were 0; what two workers give is added afterwards."""
    layer, experts = Layer(family), FAMILIES[family][0][0]
    x, logits = draw(600, layer.down.shape[1], seed=3) * 30, routings(600, experts)["skewed"]
    weights, ids = layer.route(logits)
    for here in (torch.arange(experts // 2), torch.arange(experts // 2, experts), torch.arange(0, experts, 3)):
        places = torch.full((experts,), -1, dtype=torch.int32)
        places[here] = torch.arange(len(here), dtype=torch.int32)
        places, here = places.cuda(), here.cuda()
        own = replace(mapped(layer.experts, lambda tensor, here=here: tensor[here]), places=places)
        for count in (1, 2, 8, 65, 600):
            chosen = weights[:count], ids[:count]
            found = moe(x[:count], *chosen, own)
            without = chosen[0].masked_fill(~torch.isin(chosen[1], here), 0)
            whole = moe(x[:count], without, chosen[1], layer.experts)
            assert torch.equal(found, whole), count


@pytest.mark.parametrize("family", ["Qwen3-30B-A3B", "gpt-oss", "odd"])
def test_workers_that_exchange_rows_have_the_bits_of_one(family: str) -> None:
    layer, experts = Layer(family), FAMILIES[family][0][0]
    x, logits = draw(600, layer.down.shape[1], seed=3) * 30, routings(600, experts)["skewed"]
    weights, ids = layer.route(logits)
    workers = []
    for here in (torch.arange(experts // 3), torch.arange(experts // 3, experts)):
        places = torch.full((experts,), -1, dtype=torch.int32)
        places[here] = torch.arange(len(here), dtype=torch.int32)
        here = here.cuda()
        own = replace(mapped(layer.experts, lambda tensor, here=here: tensor[here]), places=places.cuda())
        workers.append(own)
    for count in (1, 2, 8, 65, 600):
        given, sent = (x[:count], weights[:count], ids[:count]), []
        for own in workers:
            moe(*given, replace(own, exchange=lambda rows, sent=sent: sent.append(rows.clone()) or rows))
        one, other = sent
        assert not (one.bool() & other.bool()).any()
        whole = moe(*given, layer.experts)
        for own in workers:
            assert torch.equal(moe(*given, replace(own, exchange=lambda _, rows=one + other: rows)), whole), count


def scored(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """A sigmoid is that of a layer of one expert for each logit."""
    if scoring == "softmax":
        return softmax(logits.float(), -1)
    alone = MoeReduction(1, 1, torch.bfloat16, scoring=scoring, renormalise=False)
    return route(logits.reshape(-1, 1), alone)[0].view(logits.shape)


@pytest.mark.parametrize("family", ["GLM-4.5-Air", "groups", "groups by their best"])
def test_experts_are_chosen_as_by_stable_sorts(family: str) -> None:
    """Also where logits are tied, infinite or NaN."""
    layer = Layer(family)
    reduction, bias = layer.reduction, layer.score_bias
    for name, logits in routings(2000, reduction.num_experts).items():
        logits = logits.clone()
        logits[3], logits[4, 2], logits[5], logits[6, 1:4] = torch.nan, torch.nan, -torch.inf, torch.inf
        scores = scored(logits, reduction.scoring)
        for biased in (bias, -torch.zeros_like(scores[0])):
            weights, ids = route(logits, reduction, biased)
            expected, chosen = route_by(scores, reduction, biased)
            assert torch.equal(ids, chosen), name
            assert torch.equal(weights.nan_to_num(7), expected.nan_to_num(7)), name


@pytest.mark.parametrize("experts", [8, 32, 60, 64, 128, 256, 512, 2048])
def test_scores_are_those_of_the_operation_softmax(experts: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = (draw(300, experts, seed=7).float() * 3 * experts**0.5).to(dtype)
        logits[3], logits[4, 2], logits[5] = torch.nan, torch.nan, -torch.inf
        for renormalise in (False, True):
            reduction = MoeReduction(experts, min(8, experts), torch.bfloat16, renormalise=renormalise)
            weights, ids = route(logits, reduction)
            expected_weights, expected_ids = route_by(softmax(logits.float(), -1), reduction, None)
            assert torch.equal(weights.nan_to_num(7), expected_weights.nan_to_num(7)), dtype
            clear = ~logits.isnan().any(1)
            assert torch.equal(ids[clear], expected_ids[clear]), dtype


def test_pairs_are_grouped_whether_every_program_or_a_kernel_before_counts_them() -> None:
    """Of any number, at the edges of the blocks in which they are counted and placed, evenly or all to one expert."""
    schedule = cuda.layer_schedules(torch.bfloat16, Gpu.of(0))[-1]
    block_m = schedule.gate_up.block_m
    generator = torch.Generator("cuda").manual_seed(8)
    for pairs in (65, 511, 512, 513, 2048, 2049, 4096, 4097, 32_768):
        for experts in (1, 6, 128):
            ids = torch.randint(0, experts, (pairs, 1), generator=generator, device="cuda")
            groups = cuda.group(ids, 128, schedule)
            owner = groups.expert_of_block.long().repeat_interleave(block_m)
            slots = torch.arange(len(owner), device="cuda")
            used = (owner >= 0) & (slots < groups.stop.long()[owner.clamp(min=0)])
            found = groups.pairs[used].long()
            assert torch.equal(found.sort().values, torch.arange(pairs, device="cuda")), (pairs, experts)
            assert torch.equal(ids.flatten()[found], owner[used]), (pairs, experts)


def test_results_are_near_the_exact_ones() -> None:
    for family in ("odd", "odd, in turn"):
        layer = Layer(family)
        x, logits = draw(20, 200, seed=5) * 14, routings(20, 6)["uniform"]
        operands = (one.cpu() for one in (x, *layer.route(logits)))
        exact = reference.moe(*operands, mapped(layer.experts, torch.Tensor.cpu))
        error = layer(x, logits).cpu().double() - exact
        assert float(error.abs().max()) < 0.02 * float(exact.abs().max()), family


@pytest.mark.parametrize("count", [20, 5000])
def test_a_step_is_a_cuda_graph(layer: Layer, count: int) -> None:
    x, logits = draw(count, layer.down.shape[1], seed=6), routings(count, layer.reduction.num_experts)["uniform"]
    expected = layer(x, logits)
    graph = torch.cuda.CUDAGraph()
    held, of_logits = torch.zeros_like(x), torch.zeros_like(logits)
    with torch.cuda.graph(graph):
        out = layer(held, of_logits)
    held.copy_(x), of_logits.copy_(logits)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


def test_a_norm_that_adds_has_the_bits_of_a_sum_and_a_norm(layer: Layer) -> None:
    hidden = layer.down.shape[1]
    weight = 1 + draw(1, hidden, seed=7)[0]
    for count in (1, 3, 17, 300, 4096):
        x, residual = draw(count, hidden, seed=3) * 30, draw(count, hidden, seed=8) * 30
        for name, logits in routings(count, layer.reduction.num_experts).items():
            found = cuda.add_and_norm(layer.products(x, logits), residual, weight, 1e-6)
            wanted = rms_norm(layer(x, logits), weight, 1e-6, residual)
            assert all(map(torch.equal, found, wanted)), (name, count)


def test_a_norm_that_adds_is_in_a_cuda_graph(layer: Layer) -> None:
    hidden, experts = layer.down.shape[1], layer.reduction.num_experts
    x, residual, weight = draw(20, hidden, seed=6), draw(20, hidden, seed=8), 1 + draw(1, hidden, seed=7)[0]
    logits = routings(20, experts)["uniform"]
    wanted = rms_norm(layer(x, logits), weight, 1e-6, residual)
    held = [torch.zeros_like(one) for one in (x, logits, residual)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cuda.add_and_norm(layer.products(*held[:2]), held[2], weight, 1e-6)
    for one, value in zip(held, (x, logits, residual), strict=True):
        one.copy_(value)
    for _ in range(3):
        for one in found:
            one.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, found, wanted))
