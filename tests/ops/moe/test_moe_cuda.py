"""A mixture of experts on a GPU: a token's bits are its own, and those of dense layers."""

import pytest
import torch

from vllm_batch_invariant.ops.linear import schedule as of_linear
from vllm_batch_invariant.ops.linear import triton_gemm
from vllm_batch_invariant.ops.moe import MoeReduction, cuda, moe, reference, route
from vllm_batch_invariant.ops.moe.routes import route_by
from vllm_batch_invariant.ops.softmax import softmax

SHAPES = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "gpt-oss": (32, 4, 2880, 2880), "odd": (6, 3, 200, 88)}
"""Experts, those of a token, hidden and intermediate size."""
COUNTS = (1, 2, 7, 8, 9, 16, 65, 140, 257, 600, 1000, 2049, 4096)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * shape[-1] ** -0.5).bfloat16()


class Layer:
    def __init__(self, shape: str) -> None:
        experts, top_k, hidden, intermediate = SHAPES[shape]
        self.reduction = MoeReduction(experts, top_k, torch.bfloat16)
        self.gate_up, self.down = draw(experts, 2 * intermediate, hidden), draw(experts, hidden, intermediate, seed=1)

    def __call__(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return moe(x, *route(logits, self.reduction), self.gate_up, self.down, self.reduction)


@pytest.fixture(params=SHAPES)
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
        dirty = torch.cat((x[:9], torch.full_like(x[:30], torch.nan)))
        unclear = torch.cat((logits[:9], torch.full_like(logits[:30], torch.nan)))
        assert torch.equal(layer(dirty, unclear)[:9], whole[:9]), name


def test_every_tile_has_the_bits_of_a_dense_layer(layer: Layer) -> None:
    for weight in (layer.gate_up, layer.down):
        assert cuda.certify(*weight.shape[1:], torch.bfloat16, weight.device) > 0
    experts, top_k = layer.reduction.num_experts, layer.reduction.top_k
    x = draw(300, layer.down.shape[1], seed=4)
    _, ids = route(routings(300, experts)["skewed"], layer.reduction)
    for schedule in cuda.layer_schedules(torch.bfloat16, of_linear.gpu(0)):
        for count in (2, schedule.few_pairs // top_k) if schedule.few_pairs else (2, 300):
            own, rows = ids[:count].contiguous(), x[:count]
            groups, tile = cuda.group(own, experts, schedule), schedule.gate_up
            plain = cuda.grouped_gemm(rows, layer.gate_up, None, groups, own.numel(), torch.bfloat16, tile)
            gated = cuda.grouped_gemm(rows, layer.gate_up, None, groups, own.numel(), torch.bfloat16, tile, gated=True)
            for expert in own.unique().tolist():
                pairs = (own.flatten() == expert).nonzero().squeeze(1)
                dense = triton_gemm.mm(rows[pairs // top_k], layer.gate_up[expert].t())
                assert torch.equal(plain[pairs], dense), schedule
                assert torch.equal(gated[pairs], cuda._activated(dense, "silu")), schedule


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


def test_pairs_are_grouped_by_one_program_or_several() -> None:
    """Of any number, at the edges of the blocks in which they are counted and placed, evenly or all to one expert."""
    schedule = cuda.layer_schedules(torch.bfloat16, of_linear.gpu(0))[-1]
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
    layer = Layer("odd")
    x, logits = draw(20, 200, seed=5) * 14, routings(20, 6)["uniform"]
    weights, ids = route(logits, layer.reduction)
    exact = reference.moe(*(one.cpu() for one in (x, weights, ids, layer.gate_up, layer.down)), layer.reduction)
    error = layer(x, logits).cpu().double() - exact
    assert float(error.abs().max()) < 0.02 * float(exact.abs().max())


def test_a_step_is_a_cuda_graph(layer: Layer) -> None:
    x, logits = draw(20, layer.down.shape[1], seed=6), routings(20, layer.reduction.num_experts)["uniform"]
    expected = layer(x, logits)
    graph = torch.cuda.CUDAGraph()
    held, of_logits = torch.zeros_like(x), torch.zeros_like(logits)
    with torch.cuda.graph(graph):
        out = layer(held, of_logits)
    held.copy_(x), of_logits.copy_(logits)
    graph.replay()
    assert torch.equal(out, expected)
