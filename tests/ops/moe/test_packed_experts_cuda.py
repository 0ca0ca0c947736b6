"""Experts in four bits on a GPU: the bits of the matrices that they stand for, and the memory of what is stored."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.ops.moe.packed import every_product
from tests.ops.moe.test_moe_cuda import draw, routings
from vllm_batch_invariant.ops.formats import MXFP4, NVFP4, Format, integers
from vllm_batch_invariant.ops.formats.fp4 import NVFP4_STEPS
from vllm_batch_invariant.ops.moe import Experts, MoeReduction, StoredExperts, cuda, moe, route

FORMATS = {"mxfp4": MXFP4, "int4 by 32": integers(4, 32), "int4 by 128 with zeros": integers(4, 128, zeros=True)}
LAYERS: dict[str, tuple[Format, tuple[int, int, int, int], str]] = {
    "gpt-oss": (MXFP4, (32, 4, 2880, 2880), "swigluoai"),
    "Qwen3-30B-A3B": (FORMATS["int4 by 128 with zeros"], (128, 8, 2048, 768), "silu"),
    "Qwen3-30B-A3B in NVFP4": (NVFP4_STEPS, (128, 8, 2048, 768), "silu"),
    "odd": (FORMATS["int4 by 32"], (6, 3, 224, 96), "silu"),
    "odd in NVFP4": (NVFP4_STEPS, (6, 3, 208, 80), "silu"),
}
"""Experts, those of a token, hidden and intermediate size; and the activation."""
COUNTS = (1, 2, 8, 65, 257, 1000, 2049)


def stored(form: Format, experts: int, n: int, k: int) -> StoredExperts:
    """Random codes, of which no two groups are alike."""
    generator = torch.Generator("cuda").manual_seed(n)
    like = form.stored(torch.ones(2, k, dtype=torch.bfloat16, device="cuda"))
    shapes = [(experts, n, *tensor.shape[1:]) for tensor in like]
    if form is MXFP4:
        codes = torch.randint(0, 256, shapes[0], generator=generator, dtype=torch.uint8, device="cuda")
        scales = torch.randint(118, 123, shapes[1], generator=generator, dtype=torch.uint8, device="cuda")
        scales[0, ::3] += 20  # larger than any of a checkpoint, which tiles of Hopper decode otherwise
        return StoredExperts(form, (codes, scales), torch.bfloat16)
    if form is NVFP4_STEPS:
        codes = torch.randint(0, 256, shapes[0], generator=generator, dtype=torch.uint8, device="cuda")
        scales = torch.randint(1, 120, (experts, n, k // 16), generator=generator, device="cuda")
        of_matrices = torch.rand(experts, 2, 1, generator=generator, device="cuda") / 2**14
        stored = StoredExperts(NVFP4, (codes, scales.to(torch.float8_e4m3fn), of_matrices), torch.bfloat16)
        return cuda.as_read(stored)
    words = torch.randint(-(2**31), 2**31, shapes[0], generator=generator, dtype=torch.int32, device="cuda")
    scales = (torch.rand(shapes[1], generator=generator, device="cuda") / 64).bfloat16()
    zeros = torch.randint(0, 16, shapes[1], generator=generator, dtype=torch.uint8, device="cuda")
    return StoredExperts(form, (words, scales, zeros)[: len(like)], torch.bfloat16)


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Iterator[Experts]:
    form, (experts, top_k, hidden, intermediate), activation = LAYERS[request.param]
    reduction = MoeReduction(experts, top_k, torch.bfloat16, activation=activation)
    biases = (draw(experts, 2 * intermediate), draw(experts, hidden)) if activation == "swigluoai" else ()
    products = stored(form, experts, 2 * intermediate, hidden), stored(form, experts, hidden, intermediate)
    yield Experts(*products, reduction, *biases)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", [MXFP4, NVFP4_STEPS, integers(4, 32, zeros=True)], ids=lambda form: form.name)
def test_every_code_times_every_scale_is_the_definitions(form: Format, dtype: torch.dtype) -> None:
    if not cuda.reads(form, dtype):
        pytest.skip("no kernel reads it")
    every_product(form, dtype, torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_matrices_of_mxfp4_are_those_of_the_definition(dtype: torch.dtype) -> None:
    """Every pair of codes times every scale."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(255, 1)
    scales = torch.arange(255, dtype=torch.uint8, device="cuda")[:, None].repeat(1, 16)
    wanted = torch.empty(255, 512, dtype=dtype, device="cuda")
    MXFP4.decode((codes, scales), wanted)
    found = StoredExperts(MXFP4, (codes.view(3, 85, 256), scales.view(3, 85, 16)), dtype).matrices()
    assert torch.equal(found.view(255, 512), wanted)


def test_tokens_have_the_bits_of_the_matrices_alone_and_among_others(layer: Experts) -> None:
    """Also of a part of the experts."""
    most, experts, hidden = max(COUNTS), layer.reduction.num_experts, layer.down.shape[1]
    x, matrices = (
        draw(most, hidden, seed=3),
        replace(layer, gate_up=layer.gate_up.matrices(), down=layer.down.matrices()),
    )
    for name in ("uniform", "skewed"):
        chosen = route(routings(most, experts)[name], layer.reduction)
        whole = moe(x, *chosen, matrices)
        assert whole.isfinite().all()
        for count in COUNTS:
            found = moe(x[:count], *(one[:count] for one in chosen), layer)
            assert torch.equal(found, whole[:count]), (name, count)
        last = moe(x[-1:], *(one[-1:] for one in chosen), layer)
        assert torch.equal(last, whole[-1:]), name
    many = -(-cuda._MANY * experts // layer.reduction.top_k)
    chosen = route(routings(many, experts)["skewed"], layer.reduction)
    x = draw(many, hidden, seed=4)
    assert torch.equal(moe(x, *chosen, layer), moe(x, *chosen, matrices)), "as a layer of matrices"
    fewer = [one[:-1] for one in chosen]
    assert torch.equal(moe(x[:-1], *fewer, layer), moe(x, *chosen, matrices)[:-1]), "with one less as a packed one"
    places = torch.arange(experts, dtype=torch.int32, device="cuda").masked_fill_(
        torch.arange(experts).cuda() % 3 == 0, -1
    )
    for count in (3, 300):
        chosen = [one[:count] for one in route(routings(count, experts)["uniform"], layer.reduction)]
        given = x[:count], *chosen
        assert torch.equal(moe(*given, replace(layer, places=places)), moe(*given, replace(matrices, places=places)))


def test_every_expert_may_have_all_tokens_or_none(layer: Experts) -> None:
    """Of numbers of tokens that fill no tile."""
    (experts, top_k), hidden = (layer.reduction.num_experts, layer.reduction.top_k), layer.down.shape[1]
    matrices = replace(layer, gate_up=layer.gate_up.matrices(), down=layer.down.matrices())
    for count in (1, 7, 9, 33, 130):
        x = draw(count, hidden, seed=count)
        weights = torch.rand(count, top_k, device="cuda")
        for first in (0, experts - top_k):
            ids = (first + torch.arange(top_k, device="cuda")).expand(count, -1).contiguous()
            assert torch.equal(moe(x, weights, ids, layer), moe(x, weights, ids, matrices)), (count, first)


def test_every_tile_has_the_bits_of_a_dense_layer_of_the_matrix(layer: Experts) -> None:
    for weight in (layer.gate_up, layer.down):
        shape, device, activation = weight.shape[1:], weight.device, layer.reduction.activation
        assert cuda.certify(*shape, torch.bfloat16, device, activation, weight.format) > 0


def test_a_step_is_a_cuda_graph_and_writes_no_matrix(layer: Experts) -> None:
    hidden, experts = layer.down.shape[1], layer.reduction.num_experts
    x, chosen = draw(20, hidden, seed=6), route(routings(20, experts)["uniform"], layer.reduction)
    expected = moe(x, *chosen, layer)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(x, *chosen, layer)
    assert torch.cuda.max_memory_allocated() - before < layer.down.shape.numel() // 2, "less than a matrix"
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)
