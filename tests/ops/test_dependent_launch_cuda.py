"""On a Hopper, kernels of a decoder that begin while the one before ends have the bits of kernels that wait."""

import pytest
import torch
import triton
import triton.language as tl

from tests.assertions import assert_same_bits
from tests.ops.linear.cases import draw
from vllm_batch_invariant.ops.attention import AttentionReduction, paged_attention
from vllm_batch_invariant.ops.attention.plan import Planner
from vllm_batch_invariant.ops.attention.shapes import AttentionShape
from vllm_batch_invariant.ops.common.dependent_launch import LaunchSchedule, wait_for_kernel_before
from vllm_batch_invariant.ops.common.kv_cache import CacheSlots
from vllm_batch_invariant.ops.common.launch import launch
from vllm_batch_invariant.ops.linear import LinearReduction, triton_gemm
from vllm_batch_invariant.ops.linear.schedule import GATED_TILES, NARROW_TILES
from vllm_batch_invariant.ops.linear.spec import GATED
from vllm_batch_invariant.ops.norm import rms_norm
from vllm_batch_invariant.ops.norm_rotary import norm_rotary
from vllm_batch_invariant.ops.silu import silu_and_mul

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper"
)
DTYPE, HEADS, KV_HEADS, SIZE, PAGE, LAYERS = torch.bfloat16, 16, 4, 128, 64, 6
HIDDEN = HEADS * SIZE
EPS = 1e-6


class Decoder:
    """Layers with weights, and a cache each, of requests that have a token more in each step.

    Args:
        requests: of a step.
        context: keys of the first request; the others have fewer.
    """

    def __init__(self, requests: int, context: int) -> None:
        shapes = ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN), (HIDDEN, HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 2 * HIDDEN)
        self.weights = [
            [draw(*shape, dtype=DTYPE, seed=10 * layer + i) for i, shape in enumerate(shapes)]
            for layer in range(LAYERS)
        ]
        self.ones, self.of_heads = draw(HIDDEN, dtype=DTYPE, seed=1), draw(SIZE, dtype=DTYPE, seed=2)
        self.angles = draw(context + 1, SIZE, dtype=DTYPE, seed=3)
        pages = -(-(context + 1) // PAGE)
        lengths = torch.tensor([max(1, context + 1 - 7 * i) for i in range(requests)], device="cuda", dtype=torch.int32)
        self.table = torch.arange(requests * pages, device="cuda", dtype=torch.int32).view(requests, pages)
        self.lengths, self.positions = lengths, lengths.long() - 1
        self.starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32)
        self.slots = self.table.gather(1, (self.positions // PAGE)[:, None])[:, 0] * PAGE + self.positions % PAGE
        shape = (requests * pages, KV_HEADS, PAGE, 2 * SIZE)
        self.first_caches = [draw(*shape, dtype=DTYPE, seed=100 + layer) for layer in range(LAYERS)]
        self.caches = [cache.clone() for cache in self.first_caches]
        self.reduction = AttentionReduction.of_device("cuda")
        attention = AttentionShape(HEADS, KV_HEADS, SIZE, DTYPE, self.reduction)
        self.planner = Planner(attention, torch.device("cuda"), requests, requests, requests * pages * PAGE, True)
        self.plan = self.planner.plan(self.starts, lengths, requests, 1)
        self.x = draw(requests, HIDDEN, dtype=DTYPE, seed=4)

    def forget(self) -> None:
        """Caches as before any step."""
        for cache, first in zip(self.caches, self.first_caches, strict=True):
            cache.copy_(first)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, overlaps: bool) -> torch.Tensor:
        reduction = LinearReduction.of_device("cuda", *weight.shape, DTYPE)
        out = torch.empty(len(x), len(weight), dtype=DTYPE, device="cuda")
        tile = NARROW_TILES[len(x) % len(NARROW_TILES)]
        return triton_gemm.gemm_sm90_swap_ab(x, weight.t(), None, out, reduction, tile, overlaps)

    def _gated(self, x: torch.Tensor, weight: torch.Tensor, overlaps: bool) -> torch.Tensor:
        if not overlaps:
            return silu_and_mul(self._linear(x, weight, False))
        reduction = LinearReduction.of_device("cuda", *weight.shape, DTYPE)
        out = torch.empty(len(x), len(weight) // 2, dtype=DTYPE, device="cuda")
        tile = GATED_TILES[len(x) % len(GATED_TILES)]
        return triton_gemm.gemm_sm90_swap_ab(x, weight.t(), None, out, reduction, tile, True, GATED)

    def step(self, overlaps: bool) -> list[torch.Tensor]:
        """What every layer gives its rows."""
        made, x, residual = [], rms_norm(self.x, self.ones, EPS), self.x
        for (qkv_weight, o_weight, up_weight, down_weight), cache in zip(self.weights, self.caches, strict=True):
            qkv = self._linear(x, qkv_weight, overlaps)
            key_cache, value_cache = cache.chunk(2, dim=-1)
            query, _ = norm_rotary(
                qkv, self.positions, self.of_heads, self.of_heads, self.angles, EPS, HEADS, KV_HEADS,
                CacheSlots(key_cache, value_cache, self.slots),
            )  # fmt: skip
            attended = torch.empty_like(query)
            paged_attention(
                query.unflatten(1, (HEADS, SIZE)), key_cache, value_cache, self.table, self.lengths, self.starts,
                scale=SIZE**-0.5, reduction=self.reduction, out=attended.unflatten(1, (HEADS, SIZE)), plan=self.plan,
            )  # fmt: skip
            x, residual = rms_norm(self._linear(attended, o_weight, overlaps), self.ones, EPS, residual)
            x = self._gated(x, up_weight, overlaps)
            x, residual = rms_norm(self._linear(x, down_weight, overlaps), self.ones, EPS, residual)
            made += [attended, x, residual]
        return made


@pytest.mark.parametrize(("requests", "context"), [(1, 40), (1, 3000), (5, 1000), (64, 700)])
def test_layers_whose_kernels_overlap_have_the_bits_of_those_whose_kernels_wait(requests, context, monkeypatch):
    decoder = Decoder(requests, context)
    with monkeypatch.context() as waiting:
        waiting.setattr(LaunchSchedule, "of", classmethod(lambda cls, _: cls(False)))
        right = decoder.step(False)
    caches = [cache.clone() for cache in decoder.caches]
    assert not any(map(torch.equal, caches, decoder.first_caches))
    decoder.forget()
    for number, (one, other) in enumerate(zip(decoder.step(True), right, strict=True)):
        assert_same_bits(one, other, f"result {number}")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decoder.step(True)
    for number in range(50):
        decoder.forget()
        for one in captured:
            one.fill_(torch.nan)
        graph.replay()
        for one, other in zip(captured, right, strict=True):
            assert_same_bits(one, other, f"replay {number}")
        for one, other in zip(decoder.caches, caches, strict=True):
            assert_same_bits(one, other, f"cache after replay {number}")


@triton.jit
def _copy_kernel(x_ptr, out_ptr, LENGTH: tl.constexpr, WAITS: tl.constexpr, OVERLAPS: tl.constexpr):  # noqa: N803
    """out = x [LENGTH], read behind the kernels before, or without WAITS as soon as the kernel begins."""
    if WAITS:
        wait_for_kernel_before(OVERLAPS)
    x = tl.load(x_ptr + tl.arange(0, LENGTH))
    if not WAITS:
        wait_for_kernel_before(OVERLAPS)
    tl.store(out_ptr + tl.arange(0, LENGTH), x)


@pytest.mark.parametrize("waits", [True, False])
def test_a_kernel_begins_while_two_before_it_run_and_sees_what_the_first_wrote_if_it_waits(waits):
    x, weight, other = (draw(*shape, dtype=DTYPE, seed=1) for shape in ((1, 4096), (24_576, 4096), (1, 512)))
    reduction = LinearReduction.of_device("cuda", *weight.shape, DTYPE)
    products = [torch.empty(1, len(weight), dtype=DTYPE, device="cuda") for _ in range(2)]
    seen = torch.empty(512, dtype=DTYPE, device="cuda")

    def multiply(out: torch.Tensor) -> None:
        triton_gemm.gemm_sm90_swap_ab(x, weight.t(), None, out, reduction, NARROW_TILES[2], True)

    def kernels() -> None:
        multiply(products[0])
        rms_norm(other, other[0], EPS)
        launch(_copy_kernel, 1, (products[0][0, -512:], seen), on=seen, waits=True, LENGTH=512, WAITS=waits)

    multiply(products[1])
    kernels()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels()
    found = []
    for _ in range(50):
        products[0].fill_(torch.nan)
        graph.replay()
        found.append(torch.equal(seen, products[1][0, -512:]))
        assert_same_bits(products[0], products[1], "what is multiplied")
    assert all(found) == waits, f"{sum(found)} of {len(found)} saw what was written"
