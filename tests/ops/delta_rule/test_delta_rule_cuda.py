"""The kernels of the gated delta rule and of Mamba-2's state space as an NVIDIA GPU runs them, with heads of published
models.
"""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.delta_rule.cases import KINDS, Layer
from vllm_batch_invariant.ops.delta_rule import DeltaRuleReduction, DeltaStates, certificate, cuda

LENGTH = 150


def layer_of(dtype: torch.dtype, kind: dict[str, Any], drafts: int = 3) -> Layer:
    return Layer("cuda", dtype, 2, 4, 128, 128 if kind.get("solve", True) else 64, drafts=drafts, **kind)


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def layer(request: pytest.FixtureRequest, kind: dict[str, Any]) -> Layer:
    return layer_of(request.param, kind)


SCHEDULES = [(16, 1), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (128, 4), (128, 8)]


def assert_a_schedule_moves_no_bit(layer: Layer, monkeypatch: pytest.MonkeyPatch, block: int, num_warps: int) -> None:
    x = layer.tokens(LENGTH, 3)
    expected = layer.whole(x)
    kept = layer.states[1].clone()
    with monkeypatch.context() as patch:
        of_schedules = {name: cuda.DeltaSchedule(block, num_warps) for name in ("prefill", "decode")}
        patch.setattr(cuda, "delta_rule", partial(cuda.delta_rule, **of_schedules))
        layer.states.fill_(255)
        assert_same_bits(layer.whole(x), expected, "prefill")
        assert_same_bits(layer.states[1], kept, "what prefill leaves")
        assert_same_bits(layer.cut(x, 14, *(LENGTH - 14) * [1]), expected, "decode")


@pytest.mark.parametrize(("block", "num_warps"), SCHEDULES)
def test_schedules_move_no_bit(layer, monkeypatch, block, num_warps):
    assert_a_schedule_moves_no_bit(layer, monkeypatch, block, num_warps)


@pytest.mark.parametrize(
    ("gates", "schedule"), [(gates, one) for gates, of in cuda.SCHEDULES.items() for one in of.every], ids=str
)
def test_schedules_in_use_move_no_bit_of_fp32(monkeypatch, gates, schedule, kind):
    layer = layer_of(torch.float32, kind)
    if layer.reduction.gates != gates:
        pytest.skip("schedules of other gates")
    assert_a_schedule_moves_no_bit(layer, monkeypatch, schedule.block, schedule.num_warps)


@pytest.mark.parametrize("requests", [1, 7, 8, 40])
def test_a_request_has_the_same_bits_in_a_step_of_any_number(requests, kind):
    """Decode has another schedule for many."""
    layer = layer_of(torch.bfloat16, kind, drafts=0)
    x, other = layer.tokens(40, 3), layer.tokens(40, 4)
    expected = layer.whole(x)
    layer.states.fill_(255)
    for first, end in ((0, 20), *((place, place + 1) for place in range(20, 40))):
        others = [(page, first, other.part(first, end)) for page in range(1, requests)]
        rows = layer.step([*others, (0, first, x.part(first, end))])
        assert_same_bits(rows[-1], expected[first:end], f"{requests} requests, tokens {first} to {end}")


def test_products_that_cancel_are_the_same_in_prefill_and_decode(layer):
    """The same token again and again, whose value is what the state has for it: what is left is rounding."""
    x = layer.tokens(LENGTH, 3)
    x = type(x)(*(one[:1].expand_as(one).contiguous() for one in x))
    x.beta.fill_(0.97)
    x.g.zero_()
    expected = layer.whole(x)
    for lengths in (LENGTH * [1], (LENGTH // 4) * [4] + [2], (17, 30, LENGTH - 47)):
        assert_same_bits(layer.cut(x, *lengths), expected, f"steps of {lengths[0]}")


def test_long_requests_are_as_near_the_definition_as_short_ones(kind):
    layer = layer_of(torch.bfloat16, kind, drafts=0)
    x = layer.tokens(8192, 3, gate=0.001)
    difference = layer.whole(x).double() - (expected := layer.definition(x))
    for part in (slice(0, 1024), slice(7168, 8192)):
        bound = 4.4e-3 if layer.reduction.has_channels else 4e-3
        assert float(difference[part].square().mean().sqrt() / expected[part].square().mean().sqrt()) < bound


def test_a_graph_gives_the_bits_of_a_call(layer):
    x = layer.tokens(40, 3)
    expected = layer.whole(x)
    layer.step([(1, 0, x.part(0, 20))])
    integers = {"dtype": torch.int32, "device": "cuda"}
    token, context = x.part(20, 21), torch.full((1,), 20, **integers)
    states = DeltaStates(
        layer.states, torch.ones(1, **integers), torch.arange(2, **integers), context, 1, layer.rows
    )  # fmt: skip
    call = partial(cuda.delta_rule, *token, states, layer.reduction, layer.skip)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for position in range(20, 40):
        context.fill_(position)
        for kept, new in zip(token, x, strict=True):
            kept.copy_(new[position : position + 1])
        graph.replay()
        assert_same_bits(out[0], expected[position], f"token {position}")


def test_another_chunk_is_seen(layer):
    x = layer.tokens(LENGTH, 3)
    expected = layer.whole(x)
    other = replace(layer.reduction, chunk=32)
    layer.reduction, layer.rows = other, 32
    layer.states = torch.full((3, other.page_bytes(2, 4, 32)), 255, dtype=torch.uint8, device="cuda")
    out = layer.whole(x)
    assert not torch.equal(out, expected)
    assert_same_bits(layer.cut(x, 40, *(LENGTH - 40) * [1]), out, "decode in chunks of 32")


@pytest.mark.parametrize("drafts", [0, 1, 5])
@pytest.mark.parametrize(
    ("heads", "sizes", "gates"),
    [
        ((16, 32), (128, 128), "head"),
        ((16, 64), (128, 128), "head"),
        ((8, 128), (128, 64), "head"),
        ((1, 32), (256, 64), "head"),
        ((32, 32), (128, 128), "channel"),
    ],
    ids=["Qwen3.5-9B", "Qwen3.5-27B", "Nemotron-H-8B", "Falcon-H1", "Kimi-Linear-48B"],
)
def test_the_certificate_of_a_published_shape_passes_below_a_second(heads, sizes, gates, drafts):
    reduction = DeltaRuleReduction.of(*sizes, torch.bfloat16, solve=sizes[1] == 128, gates=gates)
    certify = partial(certificate.certify, *heads, reduction, drafts, torch.device("cuda", 0))
    assert certify() > 1_000_000  # and kernels are compiled
    start = time.perf_counter()
    certify()
    assert time.perf_counter() - start < 1
