"""Experts in FP8 by a library that multiplies rows in blocks of one expert; a stand-in by the definition is what can be
had here. The interpreter has no bf16, so that this is in fp32.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.moe.test_fp8_experts import interpret, layer, routed
from vllm_batch_invariant.ops.moe import Experts, moe
from vllm_batch_invariant.ops.scaled_linear import cpu

deep_gemm = pytest.importorskip("vllm_batch_invariant.ops.moe.deep_gemm")
SIZE, BLOCK_M = 4, 8


@pytest.fixture
def device(device) -> Any:
    if not device.is_interpreted:
        pytest.skip("of the interpreter")
    return device


@pytest.fixture
def computed(device, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The slots that the stand-in computes of each product; it serves four tokens, in blocks of eight pairs."""
    interpret(monkeypatch)
    monkeypatch.setattr(deep_gemm, "BLOCK_M", BLOCK_M)
    monkeypatch.setattr(device.module("moe"), "LIBRARY_BLOCK_M", BLOCK_M)
    found: list[int] = []

    of = layer(device, torch.float32)

    def run(x: Any, weight: Any, out: torch.Tensor, experts: torch.Tensor) -> None:
        assert x[1].stride() == (1, len(experts))
        assert (experts.view(-1, BLOCK_M) == experts[::BLOCK_M, None])[experts.view(-1, BLOCK_M) >= 0].all()
        out.fill_(torch.nan)
        for expert in experts[experts >= 0].unique().tolist():
            here = (experts == expert).nonzero().flatten()
            rows = (x[0].view(torch.uint8)[here].view(x[0].dtype), x[1][here])
            of_expert = (one[expert] for one in weight)
            out[here] = cpu.scaled_linear(*rows, *of_expert, None, of.reduction.products)
        found.append(int((experts >= 0).sum()))

    library = deep_gemm.GroupedDeepGemm()
    library.use(run, "1")
    library.serve(deep_gemm.ExpertsProblem.of(of), SIZE)
    monkeypatch.setattr(device.module("moe"), "grouped_deep_gemm", library)
    yield found


def without(device, of: Experts, given: Any, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    with monkeypatch.context() as patched:
        patched.setattr(device.module("moe"), "grouped_deep_gemm", deep_gemm.GroupedDeepGemm())
        return moe(*given, of)


def test_tokens_have_the_bits_of_the_tiles_in_parts_of_so_many(device, computed, monkeypatch) -> None:
    of = layer(device, torch.float32)
    given = routed(device, of, SIZE + 1)
    found = moe(*given, of)
    assert computed == [SIZE * 3] * 2  # both products of a part; the last token is left to the tiles
    assert_same_bits(found, without(device, of, given, monkeypatch))
    assert not device.module("moe").a_norm_may_add(given[0][:SIZE], of)
    assert device.module("moe").a_norm_may_add(given[0][: SIZE - 1], of)


def test_a_slot_that_is_read_for_another_is_seen(device, computed, monkeypatch) -> None:
    of, module = layer(device, torch.float32), device.module("moe")
    given, gather = routed(device, of, SIZE), module.gather

    def turned(*arguments: Any) -> Any:
        gathered, slots = gather(*arguments)
        return gathered, deep_gemm.Slots(slots.of_pair.flip(0).contiguous(), slots.expert)

    monkeypatch.setattr(module, "gather", turned)
    assert not torch.equal(moe(*given, of), without(device, of, given, monkeypatch))


class Trial:
    """What a trial says, without a GPU."""

    def __init__(self, agrees: bool, without: float, by_library: float) -> None:
        self._agrees, self._times = agrees, {"without": without, "DeepGEMM": by_library}

    def agrees(self) -> bool:
        return self._agrees

    def times(self) -> dict[str, float]:
        return self._times


TRIALS = {1024: Trial(True, 9.0, 10.0), 2048: Trial(True, 10.0, 9.0), 4096: Trial(False, 9.0, 1.0)}


def test_it_serves_the_numbers_of_tokens_at_which_it_is_equal_and_faster(device, monkeypatch) -> None:
    interpret(monkeypatch)
    of = layer(device, torch.bfloat16)
    library = deep_gemm.GroupedDeepGemm()
    library.prepare(of, 5000, lambda _: pytest.fail("there is no library"))
    monkeypatch.setattr(deep_gemm.GroupedDeepGemm, "_environment", lambda *_: {"gpu": "made up"})
    monkeypatch.setattr("vllm_batch_invariant.ops.linear.autotune_cache.load", lambda *_: {})
    monkeypatch.setattr("vllm_batch_invariant.ops.linear.autotune_cache.save", lambda *_: None)
    library = deep_gemm.GroupedDeepGemm()
    library.use(pytest.fail, "1")
    library.prepare(of, 5000, TRIALS.__getitem__)
    assert library.parts(of, 5000) == [(2048, True), (2048, True), (904, False)]
    assert library.parts(of, 2047) == [(2047, False)]
    assert library.parts(of, 0) == []
    assert library.parts(layer(device, torch.bfloat16, biased=True), 2048) == [(2048, False)]
