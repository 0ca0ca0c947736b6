"""Attention over keys whose first columns are the values, as multi-head latent attention reads its cache."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.assertions import assert_near, assert_same_bits
from tests.ops.attention.cases import Chunk, Heads, Request, paged
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.attention import AttentionReduction, AttentionSpec, PagedAttention, PagedCache
from vllm_batch_invariant.ops.attention import attend as attend_call

pytestmark = pytest.mark.usefixtures("one_thread")

TAILS = {80: 16, 576: 64, 288: 32}
"""By the elements of a key, those that are not its value: of tests, of DeepSeek and of MiniCPM3."""
SMALL = Heads(query=6, kv=1, size=80)
FULL = Heads(query=16, kv=1, size=576, dtype=torch.bfloat16)
LENGTH = 600
CUTS = ((0, 600), (0, 1, 2, 600), (0, 255, 256, 257, 600), (0, 31, 300, 599, 600))
both = pytest.mark.parametrize("implementation", ["numba", "reference"])


def call_of(
    chunks: list[Chunk],
    page_size: int = 16,
    placement: int = 0,
    filler: float = math.nan,
    reduction: AttentionReduction | None = None,
    device: str = "cpu",
) -> PagedAttention:
    """Of chunks whose values nobody reads."""
    heads = chunks[0].request.heads
    query, keys, _, table, lengths, starts = (one.to(device) for one in paged(chunks, page_size, placement, filler))
    cache = PagedCache.latent(keys, heads.size - TAILS[heads.size], table)
    spec = AttentionSpec(heads.size**-0.5)
    return PagedAttention(query, cache, lengths, starts, spec, reduction or AttentionReduction())


def attend(chunks: list[Chunk], implementation: str = "numba", **more: Any) -> list[torch.Tensor]:
    """The output rows of each chunk, computed together."""
    out = attend_call(call_of(chunks, **more), implementation)
    return list(out.split([chunk.stop - chunk.start for chunk in chunks]))


def definition(request: Request) -> torch.Tensor:
    """In float64, of the whole matrix of scores: [length, heads, the values' size]."""
    size = request.heads.size
    q, k = (one.double().cpu().transpose(0, 1) for one in (request.query, request.key))
    scores = q @ k.transpose(1, 2) / math.sqrt(size)
    position = torch.arange(request.length)
    weights = scores.masked_fill(position[:, None] < position[None, :], -math.inf).softmax(-1)
    return (weights @ k[..., : size - TAILS[size]]).transpose(0, 1)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", TAILS)
def test_every_size_and_dtype_is_near_float64(implementation: str, dtype: torch.dtype, size: int) -> None:
    request = Request(Heads(5, 1, size, dtype), 300, 1)
    [rows] = attend([Chunk(request, 0, 300)], implementation)
    assert rows.shape == (300, 5, size - TAILS[size])
    assert_near(rows, definition(request), factor=2)


def test_a_row_has_the_same_bits_in_chunks_among_others_and_in_pages_of_any_size() -> None:
    """What nobody wrote is NaN."""
    request, other = Request(SMALL, LENGTH, 1), Request(SMALL, 700, 2)
    [whole] = attend([Chunk(request, 0, LENGTH)])
    for start, stop in (pair for cuts in CUTS for pair in pairwise(cuts)):
        for page_size, number in ((16, 1), (7, 300), (128, 2)):
            chunks = [Chunk(other, 700 - number, 700), Chunk(request, start, stop)]
            together = attend(chunks, page_size=page_size, placement=number)
            assert_same_bits(together[1], whole[start:stop], f"{start} to {stop}, pages of {page_size}")


@pytest.mark.parametrize("heads", [FULL, replace(FULL, query=128), replace(FULL, query=1)], ids=str)
def test_decode_has_the_bits_of_prefill_at_published_sizes(heads: Heads) -> None:
    request = Request(heads, 270, 3)
    [whole] = attend([Chunk(request, 0, 270)])
    for position in (0, 1, 255, 256, 269):
        [row] = attend([Chunk(request, position, position + 1)])
        assert_same_bits(row, whole[position : position + 1], f"position {position}")


def test_the_first_columns_have_the_bits_of_values_of_their_own() -> None:
    """Of attention with values as wide as keys: their first columns, when they are those of the keys."""
    request = Request(SMALL, LENGTH, 1)
    chunk = Chunk(request, 0, LENGTH)
    call = call_of([chunk])
    wide = attend_call(replace(call, cache=PagedCache(call.cache.keys, call.cache.keys, call.cache.block_table)))
    assert_same_bits(attend([chunk])[0], wide[..., :64].contiguous())


@both
def test_the_tail_counts(implementation: str) -> None:
    """The negative control of what compares values alone."""
    request = Request(SMALL, 40, 1)
    [known] = attend([Chunk(request, 0, 40)], implementation)
    request.key[3, :, -1] += 1.0
    [other] = attend([Chunk(request, 0, 40)], implementation)
    assert torch.equal(known[:3], other[:3])
    assert not torch.equal(known[3:], other[3:])


def test_other_values_than_the_first_columns_of_keys_in_pages_are_refused() -> None:
    call = call_of([Chunk(Request(SMALL, 4, 1), 0, 4)])
    keys, table = call.cache.keys, call.cache.block_table
    for values in (keys[..., :64].clone(), keys[..., 16:], keys[..., :40], keys[..., :0], keys[:, :, :8, :64]):
        with pytest.raises(ValueError, match="the first columns of keys"):
            attend_call(replace(call, cache=PagedCache(keys, values, table)))


@pytest.mark.parametrize("implementation", ["flex", "exact"])
def test_an_implementation_without_such_values_refuses_them(implementation: str) -> None:
    call = call_of([Chunk(Request(SMALL, 4, 1), 0, 4)])
    with pytest.raises(NotCovered, match="multi-head latent attention by"):
        attend_call(call, implementation)
