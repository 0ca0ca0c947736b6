"""Attention over keys whose first columns are the values, by the Triton kernel on a GPU."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.assertions import assert_near, assert_same_bits
from tests.ops.attention.cases import Chunk, Heads, Request
from tests.ops.attention.test_latent import CUTS, LENGTH, call_of, definition
from vllm_batch_invariant.ops.attention import AttentionReduction
from vllm_batch_invariant.ops.attention import attend as attend_call
from vllm_batch_invariant.ops.attention.certificate import certify
from vllm_batch_invariant.ops.attention.params import AttentionSpec
from vllm_batch_invariant.ops.attention.shapes import AttentionShape

REDUCTION = AttentionReduction.of_device("cuda")
HEADS = [
    Heads(16, 1, 576, torch.bfloat16),
    Heads(20, 1, 576, torch.bfloat16),
    Heads(128, 1, 576, torch.bfloat16),
    Heads(16, 1, 576, torch.float16),
    Heads(6, 1, 80, torch.bfloat16),
    Heads(4, 1, 80, torch.float32),
    Heads(2, 1, 576, torch.float32),
]
"""DeepSeek-V2-Lite's, GLM-4.7-Flash's and DeepSeek-V3's, and those of tests."""
every = pytest.mark.parametrize("heads", HEADS, ids=str)


def attend(chunks: list[Chunk], **more: object) -> list[torch.Tensor]:
    """The output rows of each chunk, computed together; what is not written is NaN."""
    call = call_of(chunks, reduction=REDUCTION, device="cuda", **more)
    out = call.query.new_full(call.out_shape, math.nan)
    attend_call(call, "triton", out)
    return list(out.split([chunk.stop - chunk.start for chunk in chunks]))


@every
def test_prefill_is_near_float64(heads: Heads) -> None:
    request = Request(heads, LENGTH, 1)
    [rows] = attend([Chunk(request, 0, LENGTH)])
    assert_near(rows.cpu(), definition(request), factor=2)


@pytest.mark.parametrize("heads", [one for one in HEADS if one.query < 128], ids=str)
def test_a_row_has_the_same_bits_in_chunks_among_others_and_in_pages_of_any_size(heads: Heads) -> None:
    request, other = Request(heads, LENGTH, 1), Request(heads, 1300, 2)
    [whole] = attend([Chunk(request, 0, LENGTH)], page_size=64)
    for start, stop in (pair for cuts in CUTS for pair in pairwise(cuts)):
        for page_size, number in ((16, 1), (64, 300), (128, 7)):
            chunks = [Chunk(request, start, stop), Chunk(other, 1300 - number, 1300)]
            together = attend(chunks, page_size=page_size, placement=number)
            assert_same_bits(together[0], whole[start:stop], f"{start} to {stop}, pages of {page_size}")


@pytest.mark.parametrize("heads", [replace(HEADS[2], query=64), *HEADS[:2], *HEADS[3:]], ids=str)
def test_decode_alone_and_among_others_has_the_bits_of_prefill(heads: Heads) -> None:
    """Alone, programs share its splits."""
    request = Request(heads, 2600, 1)
    [newest] = attend([Chunk(request, 2200, 2600)], page_size=64)
    others = [Chunk(Request(heads, 9 * number, number), 9 * number - 1, 9 * number) for number in range(1, 13)]
    for position in (2200, 2303, 2304, 2559, 2560, 2599):
        row, expected = Chunk(request, position, position + 1), newest[position - 2200 : position - 2199]
        assert_same_bits(attend([row], page_size=64)[0], expected, f"position {position} alone")
        assert_same_bits(attend([*others, row], page_size=64)[-1], expected, f"position {position} among others")


@pytest.mark.parametrize(("heads", "page_size"), [(HEADS[0], 64), (HEADS[1], 64), (HEADS[0], 16)], ids=str)
def test_a_certificate_is_given(heads: Heads, page_size: int) -> None:
    shape = AttentionShape(heads.query, 1, 512, heads.dtype, REDUCTION, tail=64)
    found = certify(shape, torch.device("cuda", 0), page_size, (AttentionSpec(1.0),))
    assert found.elements
    assert not found.kernels.sm90
