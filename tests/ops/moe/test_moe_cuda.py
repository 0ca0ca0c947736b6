"""A mixture of experts on a GPU: a token's bits are its own, and those of dense layers."""

import pytest
import torch

from vllm_batch_invariant.ops.linear import triton_gemm
from vllm_batch_invariant.ops.moe import MoeReduction, cuda, moe, reference, route

SHAPES = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "gpt-oss": (32, 4, 2880, 2880), "odd": (6, 3, 200, 88)}
"""Experts, those of a token, hidden and intermediate size."""
COUNTS = (1, 2, 7, 16, 65, 257, 1000, 4096)


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
    for schedule in cuda._SCHEDULES[2]:
        groups = cuda.group(ids, experts, schedule.block_m)
        found = cuda.grouped_gemm(x, layer.gate_up, None, groups, ids.numel(), torch.bfloat16, schedule)
        for expert in range(experts):
            pairs = (ids.flatten() == expert).nonzero().squeeze(1)
            assert torch.equal(found[pairs], triton_gemm.mm(x[pairs // top_k], layer.gate_up[expert].t())), schedule


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
