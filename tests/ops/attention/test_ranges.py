"""Attention of tokens that see a range around them, as those of an image do, beside the keys of causal attention."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.assertions import assert_near, assert_same_bits
from tests.ops.attention.cases import Chunk, Heads, Request, attend, call_of, paged
from tests.ops.attention.test_both_directions import OPTIONS
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.attention import NO_RANGE, AttentionReduction
from vllm_batch_invariant.ops.attention import attend as attend_call

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = Heads(query=4, kv=2, size=32)
LENGTH = 600
IMAGES = ((3, 3), (10, 73), (200, 300), (301, 310), (500, 560))
"""First and last positions: of one token, over borders of tiles and splits, and one directly behind another."""
CUTS = ((0, 600), (0, 10, 200, 600), (0, 74, 75, 311, 600), (0, 180, 301, 560 + 1, 600))
"""Chunks that cut no image."""
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
both = pytest.mark.parametrize("implementation", ["numba", "reference"])


def ranges_of(length: int, images: Sequence[tuple[int, int]] = IMAGES) -> torch.Tensor:
    """[length, 2] int32."""
    found = torch.arange(length, dtype=torch.int32)[:, None].repeat(1, 2)
    for first, last in images:
        if last < length:
            found[first : last + 1] = torch.tensor([first, last], dtype=torch.int32)
    return found


def rows_of(chunks: list[Chunk], images: Sequence[tuple[int, int]] = IMAGES, **more: Any) -> list[torch.Tensor]:
    """The output rows of each chunk, computed together."""
    ranges = torch.cat([ranges_of(chunk.stop, images)[chunk.start :] for chunk in chunks])
    return attend(chunks, ranges=ranges.to(chunks[0].request.query.device), **more)


def definition(request: Request, **options: Any) -> torch.Tensor:
    """In float64, of the whole matrix of scores: [length, heads, head_size]."""
    group, length = request.heads.query // request.heads.kv, request.length
    q, k, v = (one.double().cpu().transpose(0, 1) for one in (request.query, request.key, request.value))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) / math.sqrt(request.heads.size)
    position = torch.arange(length)
    distance = position[:, None] - position[None, :]
    if cap := options.get("logits_soft_cap"):
        scores = cap * torch.tanh(scores / cap)
    if (slopes := options.get("alibi_slopes")) is not None:
        scores = scores - slopes.double()[:, None, None] * distance
    visible = (distance >= 0) & (distance < options.get("sliding_window", length))
    first, last = ranges_of(length).unbind(1)
    visible |= (position >= first[:, None]) & (position <= last[:, None])
    scores = scores.masked_fill(~visible, -math.inf)
    if (sinks := options.get("sinks")) is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, length, 1)], -1)
    return (scores.softmax(-1)[..., :length] @ v).transpose(0, 1)


@both
@options
def test_every_option_is_near_float64(implementation, options):
    request = Request(SMALL, LENGTH, 1)
    [rows] = rows_of([Chunk(request, 0, LENGTH)], implementation=implementation, **options)
    assert_near(rows, definition(request, **options), factor=2)


@options
def test_a_row_has_the_same_bits_in_chunks_among_others_and_in_pages_of_any_size(options):
    request, others = Request(SMALL, LENGTH, 1), [Request(SMALL, 320, 2), Request(SMALL, 5, 3)]
    [whole] = rows_of([Chunk(request, 0, LENGTH)], **options)
    for cuts in CUTS:
        for start, stop in pairwise(cuts):
            chunk = Chunk(request, start, stop)
            beside = [Chunk(others[0], 310, 320), chunk, Chunk(others[1], 0, 5)]
            for page_size, chunks in ((16, [chunk]), (32, beside), (16, beside[::-1])):
                rows = rows_of(chunks, page_size=page_size, **options)[chunks.index(chunk)]
                assert_same_bits(rows, whole[start:stop], f"{start} to {stop} of {len(chunks)}, pages of {page_size}")


@both
@options
def test_without_images_the_bits_are_those_of_causal_attention(implementation, options):
    chunk = Chunk(Request(SMALL, 300, 1), 20, 300)
    found = rows_of([chunk], images=(), implementation=implementation, **options)
    assert_same_bits(found[0], attend([chunk], implementation, **options)[0])


@both
@options
def test_a_row_without_a_range_has_its_own_position_or_none(implementation, options):
    chunks = [Chunk(Request(SMALL, 320, 1), 190, 320), Chunk(Request(SMALL, 9, 2), 0, 9)]
    own = torch.cat([ranges_of(chunk.stop)[chunk.start :] for chunk in chunks])
    without = torch.where(own.diff(dim=1) > 0, own, torch.tensor(NO_RANGE, dtype=torch.int32))
    assert (without == torch.tensor(NO_RANGE)).any()
    found = [attend(chunks, implementation, ranges=ranges, **options) for ranges in (own, without)]
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("window", [None, 37])
def test_a_row_sees_its_image_and_no_key_more(window):
    """What is not finite reaches those that see it, none at either end more."""
    for bad in (9, 10, 73, 74, 250, 599):
        request = Request(SMALL, LENGTH, 1)
        options = {} if window is None else {"sliding_window": window}
        [clean] = rows_of([Chunk(request, 0, LENGTH)], **options)
        request.key[bad], request.value[bad] = math.nan, math.nan
        [dirty] = rows_of([Chunk(request, 0, LENGTH)], **options)
        position = torch.arange(LENGTH)
        first, last = ranges_of(LENGTH).unbind(1)
        sees = (position >= bad) & (position - bad < (window or LENGTH)) | (first <= bad) & (bad <= last)
        assert dirty[sees].isnan().all()
        assert_same_bits(dirty[~sees], clean[~sees])


def test_an_image_that_is_cut_has_other_bits_and_is_refused():
    """Its first part does not see its second: what a scheduler must not do."""
    request = Request(SMALL, LENGTH, 1)
    [whole] = rows_of([Chunk(request, 0, LENGTH)])
    cut = rows_of([Chunk(request, 0, 250)], images=((3, 3), (10, 73), (200, 249)))[0]
    assert_same_bits(cut[:200], whole[:200])
    assert not torch.equal(cut[200:], whole[200:250])
    with pytest.raises(ValueError, match=r"position 200 of request 0 is \[200, 300\]: it must .* end before 250"):
        attend([Chunk(request, 0, 250)], ranges=ranges_of(LENGTH)[:250])
    with pytest.raises(ValueError, match=r"ranges must be int32 \[250, 2\]"):
        attend([Chunk(request, 0, 250)], ranges=ranges_of(249))


@pytest.mark.parametrize("implementation", ["flex", "exact"])
def test_an_implementation_without_them_refuses_ranges(implementation):
    request = Request(Heads(4, 2, 64, torch.bfloat16), 30, 1)
    call = call_of(paged([Chunk(request, 0, 30)]), AttentionReduction(), scale=1.0)
    with pytest.raises(NotCovered, match=f"ranges of keys after a token by '{implementation}'"):
        attend_call(replace(call, ranges=ranges_of(30)), implementation)
