"""Attention to keys on both sides, over keys without pages, by the Triton kernel on a GPU."""

import pytest
import torch

from tests.assertions import assert_near, assert_same_bits
from tests.ops.attention.cases import Heads, Request, packed
from tests.ops.attention.test_both_directions import LENGTHS, OPTIONS, definition
from vllm_batch_invariant.ops.attention import AttentionReduction

REDUCTION = AttentionReduction.of_device("cuda")
HEADS = [Heads(12, 12, 32), Heads(4, 2, 48), Heads(12, 12, 64), Heads(16, 16, 80), Heads(4, 1, 256)]


def of(heads: Heads, dtype: torch.dtype, lengths: tuple[int, ...]) -> list[Request]:
    made = [Request(Heads(heads.query, heads.kv, heads.size, dtype), length, length) for length in lengths]
    for request in made:
        request.query, request.key, request.value = (one.cuda() for one in (request.query, request.key, request.value))
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 65, 1000])
def test_a_sequence_has_the_same_bits_alone_among_others_and_in_any_order(heads, dtype, window):
    asked = of(heads, dtype, (*LENGTHS, 4096))
    together = packed(asked, "triton", reduction=REDUCTION, sliding_window=window)
    backwards = packed(asked[::-1], "triton", reduction=REDUCTION, sliding_window=window)[::-1]
    for number, request in enumerate(asked):
        alone = packed([request], "triton", reduction=REDUCTION, sliding_window=window)[0]
        assert_same_bits(together[number], alone, f"{request.length} tokens among others")
        assert_same_bits(backwards[number], alone, f"{request.length} tokens in the other order")


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_near_float64(name):
    options = {key: one.cuda() if torch.is_tensor(one) else one for key, one in OPTIONS[name].items()}
    asked = of(Heads(4, 2, 64), torch.bfloat16, LENGTHS)
    for request, rows in zip(asked, packed(asked, "triton", reduction=REDUCTION, **options), strict=True):
        request.query, request.key, request.value = (one.cpu() for one in (request.query, request.key, request.value))
        assert_near(rows.cpu(), definition(request, **OPTIONS[name]), factor=2)
