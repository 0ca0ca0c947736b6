"""Attention of tokens that see a range around them, by the Triton kernel on a GPU."""

from itertools import pairwise

import pytest
import torch

from tests.assertions import assert_near, assert_same_bits
from tests.ops.attention.cases import Chunk, Heads, Request
from tests.ops.attention.test_attention_cuda import attend
from tests.ops.attention.test_ranges import CUTS, LENGTH, OPTIONS, definition, ranges_of

HEADS = [Heads(4, 2, 64, torch.bfloat16), Heads(4, 1, 256, torch.bfloat16), Heads(4, 4, 128, torch.float32)]
both = pytest.mark.parametrize("heads", HEADS, ids=str)
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def rows_of(chunks: list[Chunk], **more: object) -> list[torch.Tensor]:
    on_gpu = {name: one.cuda() if torch.is_tensor(one) else one for name, one in more.items()}
    return attend(chunks, ranges=torch.cat([ranges_of(one.stop)[one.start :] for one in chunks]).cuda(), **on_gpu)


@both
@options
def test_every_option_is_near_float64(heads, options):
    request = Request(heads, LENGTH, 1)
    [rows] = rows_of([Chunk(request, 0, LENGTH)], **options)
    assert_near(rows.cpu(), definition(request, **options), factor=2)


@both
@options
def test_a_row_has_the_same_bits_in_chunks_among_others_and_in_pages_of_any_size(heads, options):
    """Beside texts in prefill and in decode, whose bits are those of causal attention."""
    request, text = Request(heads, LENGTH, 1), Request(heads, 2600, 2)
    [whole] = rows_of([Chunk(request, 0, LENGTH)], **options)
    on_gpu = {name: one.cuda() if torch.is_tensor(one) else one for name, one in options.items()}
    of_text = attend([Chunk(text, 2300, 2600)], **on_gpu)[0]
    for start, stop in (pair for cuts in CUTS for pair in pairwise(cuts)):
        chunk = Chunk(request, start, stop)
        for page_size, number in ((16, 1), (64, 300), (128, 7)):
            beside = Chunk(text, 2600 - number, 2600)
            ranges = [ranges_of(chunk.stop)[chunk.start :], ranges_of(beside.stop, ())[beside.start :]]
            together = attend(
                [chunk, beside], page_size=page_size, ranges=torch.cat(ranges).cuda(), **on_gpu
            )  # fmt: skip
            assert_same_bits(together[0], whole[start:stop], f"{start} to {stop}, pages of {page_size}")
            assert_same_bits(together[1], of_text[-number:], f"{number} of a text")
