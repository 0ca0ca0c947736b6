"""Exact attention by the GPU's kernel in Triton's interpreter: it has the bits of the definition in numpy."""

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.faults import exact as faults
from tests.ops.attention.cases import Chunk, Heads, Request, call_of, paged
from tests.ops.exact.cases import assert_same, numbers
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.attention import AttentionReduction, AttentionSpec
from vllm_batch_invariant.ops.attention.params import PagedAttention
from vllm_batch_invariant.ops.attention.shapes import AttentionShape
from vllm_batch_invariant.ops.exact import cuda, definition, triton_attention

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of infinities and NaN in numpy
HEADS = Heads(4, 2, 32, torch.bfloat16)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for an A100 of 5 multiprocessors."""
    properties = SimpleNamespace(multi_processor_count=5, major=8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for name in ("device", "device_of"):
        monkeypatch.setattr(torch.cuda, name, lambda device: nullcontext())


def newest(length: int, count: int, seed: int = 1, heads: Heads = HEADS) -> Chunk:
    return Chunk(Request(heads, length, seed), length - count, length)


def call_with(chunks: list[Chunk], window: int | None = None, soft_cap: float | None = None) -> PagedAttention:
    scale = chunks[0].request.heads.size ** -0.5
    spec = {"scale": scale, "sliding_window": window, "logits_soft_cap": soft_cap}
    return call_of(paged(chunks, 16, 0, math.nan), cuda.REDUCTION, **spec)


def attend(
    chunks: list[Chunk], window: int | None = None, int8: bool = True, soft_cap: float | None = None
) -> list[torch.Tensor]:
    call = call_with(chunks, window, soft_cap)
    out = torch.full_like(call.query, math.nan)
    tokens = len(call.query)
    planner = cuda.ExactPlanner(AttentionShape.of(call), call.query.device, len(chunks), tokens, 9000, int8)
    plan = planner.plan(call.query_start_loc, call.seq_lens, tokens, tokens)
    cuda.paged_attention(call, out, plan)
    return list(out.split([chunk.stop - chunk.start for chunk in chunks]))


def exact(chunk: Chunk, window: int | None = None, soft_cap: float | None = None) -> np.ndarray:
    request, stop = chunk.request, chunk.stop
    key, value = numbers(request.key[:stop]), numbers(request.value[:stop])
    return definition.attention(
        numbers(request.query[chunk.start : stop]), key, value, request.heads.size**-0.5, window, soft_cap
    )


def check(chunks: list[Chunk], window: int | None = None, int8: bool = True, soft_cap: float | None = None) -> None:
    for found, chunk in zip(attend(chunks, window, int8, soft_cap), chunks, strict=True):
        assert_same(found, exact(chunk, window, soft_cap), f"{chunk.stop - chunk.start} of {chunk.stop}")


def of_all_kinds(length: int, count: int, heads: Heads = HEADS) -> Chunk:
    """A request with a sink, keys and values of many magnitudes, ties, zeros and subnormal numbers."""
    chunk = newest(length, count, 4, heads)
    request, draw = chunk.request, torch.Generator().manual_seed(5)
    request.key[0] *= 6
    request.value *= 2.0 ** torch.randint(-40, 40, (length, 1, 1), generator=draw)
    request.key[3::17] = request.key[3]
    request.key[5::19] = 0
    request.value[7::23] = 0
    request.value[8::29] = 1e-39
    request.query[length - count :: 5] *= 40
    request.query[length - 1, 0] = 0
    return chunk


THREE_QUERIES_A_KEY = Heads(3, 1, 48, torch.bfloat16)
MIXED = [newest(90, 40), newest(600, 5, 2), newest(300, 1, 3)]


@pytest.mark.parametrize(
    ("chunks", "window"),
    [
        pytest.param(MIXED, None, id="mixed"),
        pytest.param(MIXED, 100, id="in a window"),
        pytest.param(
            [newest(length, 1, length, THREE_QUERIES_A_KEY) for length in (1, 64, 65, 2049)], None, id="borders"
        ),
        pytest.param([of_all_kinds(300, 20), of_all_kinds(520, 2)], None, id="of all kinds"),
        pytest.param([newest(90, 20, 6, Heads(1, 1, 256, torch.bfloat16))], None, id="large heads"),
    ],
)
def test_attention_has_the_bits_of_the_definition(chunks, window):
    check(chunks, window)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, 2.0), (100, 50.0)])
def test_attention_with_a_soft_cap_has_the_bits_of_the_definition(window, soft_cap):
    check([newest(90, 40), newest(300, 1, 3), of_all_kinds(300, 20)], window, soft_cap=soft_cap)


def test_digits_in_fp16_have_the_bits_of_the_definition():
    check([of_all_kinds(100, 20), newest(300, 1)], int8=False)


@pytest.mark.exhaustive
def test_the_newest_tokens_have_the_bits_of_a_prefill():
    [prefill] = attend([newest(330, 40)])
    for count in (1, 5):
        assert torch.equal(attend([newest(330, count)])[0], prefill[-count:])


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(name):
    for length, count in ((40, 14), (280, 14)):
        clean, chunk = attend([newest(length, count)])[0], newest(length, count)
        held = getattr(chunk.request, name)
        held[length - 10, :, 5] = torch.tensor([math.inf, math.nan]).repeat(2)[: held.shape[1]]
        [dirty] = attend([chunk])
        seen = slice(count - 10, count - 9 if name == "query" else None)
        assert dirty[seen].isnan().all()
        left = torch.ones(count, dtype=torch.bool)
        left[seen] = False
        assert torch.equal(dirty[left], clean[left])


@pytest.mark.parametrize(("name", "fault"), [("product_8", faults.of_one_digit), ("rint", faults.truncated)])
def test_an_injected_fault_is_found(name, fault, monkeypatch):
    monkeypatch.setattr(triton_attention, name, fault)
    with pytest.raises(AssertionError, match="differ"):
        check([newest(300, 3)])


def test_what_has_no_definition_is_refused():
    call = call_with([newest(20, 2)])
    out = torch.empty_like(call.query)
    for added, words in (("alibi_slopes", "ALiBi"), ("sinks", "sinks")):
        with pytest.raises(NotCovered, match=f"attention with {words} by 'exact'"):
            AttentionSpec(1.0, **{added: torch.zeros(4)}).check(cuda.SERVES, "exact")
    with pytest.raises(NotCovered, match="float32"):
        cuda.paged_attention(replace(call, query=call.query.float()), out)
    with pytest.raises(ValueError, match="splits of"):
        cuda.paged_attention(replace(call, reduction=AttentionReduction()), out)


def test_the_splits_are_those_of_the_definition():
    for keys in (1, 256, 257, 2048, 2049, 33_000, 70_000):
        last = cuda.REDUCTION.split_of(keys - 1)
        ours = [
            (cuda.REDUCTION.start_of(split), min(cuda.REDUCTION.start_of(split + 1), keys)) for split in range(last + 1)
        ]
        assert ours == [(split.start, split.stop) for split in definition.splits(keys)]
