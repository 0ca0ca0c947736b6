"""Attention over keys whose first columns are the values, by the Triton kernel in its interpreter, on the CPU."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.attention.cases import Chunk, Heads, Request
from tests.ops.attention.test_attention_interpreted import ATOL, REDUCTION
from tests.ops.attention.test_attention_interpreted import gpu as gpu
from tests.ops.attention.test_latent import call_of, definition
from vllm_batch_invariant.ops.attention import attend as attend_call

LENGTH = 300


def attend(chunks: list[Chunk], **more: object) -> list[torch.Tensor]:
    """The output rows of each chunk, computed together; what is not written is NaN."""
    call = call_of(chunks, reduction=REDUCTION, **more)
    out = call.query.new_full(call.out_shape, math.nan)
    attend_call(call, "triton", out)
    return list(out.split([chunk.stop - chunk.start for chunk in chunks]))


@pytest.mark.parametrize("heads", [Heads(2, 1, 80, torch.float16), Heads(20, 1, 80, torch.float16)], ids=str)
def test_prefill_and_decode_are_near_float64(heads: Heads) -> None:
    """Of so many heads that a token is a block of few rows, and of more."""
    request = Request(heads, LENGTH, 1)
    [whole] = attend([Chunk(request, 0, LENGTH)])
    torch.testing.assert_close(whole.double(), definition(request), rtol=0, atol=ATOL)
    for position in (0, 255, 256, LENGTH - 1):
        [row] = attend([Chunk(request, position, position + 1)], page_size=64)
        torch.testing.assert_close(row.double(), definition(request)[position : position + 1], rtol=0, atol=ATOL)


def test_a_size_as_published_is_near_float64(gpu: SimpleNamespace) -> None:
    gpu.shared_memory_per_block_optin = 166_912
    request = Request(Heads(2, 1, 576, torch.float16), 70, 1)
    [rows] = attend([Chunk(request, 60, 70)])
    torch.testing.assert_close(rows.double(), definition(request)[60:], rtol=0, atol=ATOL)


def test_a_row_has_the_same_bits_among_others_and_in_pages_of_any_size() -> None:
    request, other = (Request(Heads(2, 1, 80, torch.float16), LENGTH, seed) for seed in (1, 2))
    [alone] = attend([Chunk(request, 280, LENGTH)])
    beside = [Chunk(other, 100, 101), Chunk(request, 280, LENGTH), Chunk(other, 200, 264)]
    for page_size in (16, 7, 128):
        assert_same_bits(attend(beside, page_size=page_size, placement=page_size)[1], alone, f"pages of {page_size}")
