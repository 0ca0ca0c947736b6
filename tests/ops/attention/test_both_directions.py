"""Attention to keys on both sides, over pages and over the keys of the step's own tokens."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.assertions import assert_near, assert_same_bits
from tests.ops.attention.cases import Chunk, Heads, Request, attend, packed
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.attention import AttentionReduction

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = Heads(query=4, kv=2, size=32)
LENGTHS = (1, 63, 300, 2, 65, 257, 520, 1)
"""Around the borders of tiles and splits."""
OPTIONS: dict[str, dict[str, Any]] = {
    "all keys": {},
    "window": {"sliding_window": 37},
    "a window of itself": {"sliding_window": 1},
    "a window beyond every end": {"sliding_window": 1000},
    "all options": {
        "sliding_window": 100,
        "logits_soft_cap": 2.0,
        "alibi_slopes": torch.tensor([0.5, 0.0, 0.125, -0.25]),
        "sinks": torch.tensor([-0.5, 0.0, 2.0, 4.0]),
    },
}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
both = pytest.mark.parametrize("implementation", ["numba", "reference"])


def requests(lengths: Sequence[int] = LENGTHS, heads: Heads = SMALL) -> list[Request]:
    return [Request(heads, length, length + 1000 * number) for number, length in enumerate(lengths)]


def definition(request: Request, **options: Any) -> torch.Tensor:
    """In float64, of the whole matrix of scores: [length, heads, head_size]."""
    group = request.heads.query // request.heads.kv
    q, k, v = (one.double().transpose(0, 1) for one in (request.query, request.key, request.value))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) / math.sqrt(request.heads.size)
    position = torch.arange(request.length)
    distance = position[:, None] - position[None, :]
    if cap := options.get("logits_soft_cap"):
        scores = cap * torch.tanh(scores / cap)
    if (slopes := options.get("alibi_slopes")) is not None:
        scores = scores - slopes.double()[:, None, None] * distance
    if window := options.get("sliding_window"):
        scores = scores.masked_fill(distance.abs() >= window, -math.inf)
    if (sinks := options.get("sinks")) is not None:
        without_value = sinks.double()[:, None, None].expand(-1, request.length, 1)
        weights = torch.cat([scores, without_value], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v).transpose(0, 1)


@both
@options
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_length_and_option_is_near_float64(implementation, options, dtype):
    asked = requests(heads=Heads(4, 2, 32, dtype))
    got = packed(asked, implementation, **options)
    for request, rows in zip(asked, got, strict=True):
        assert_near(rows, definition(request, **options), factor=2)


@pytest.mark.parametrize(("query", "kv", "size"), [(12, 12, 64), (6, 2, 80), (3, 1, 256), (4, 4, 16), (8, 8, 96)])
def test_every_head_shape_is_near_float64(query, kv, size):
    asked = requests((40, 270), Heads(query, kv, size, torch.bfloat16))
    for request, rows in zip(asked, packed(asked), strict=True):
        assert_near(rows, definition(request), factor=2)


@both
@options
def test_a_sequence_has_the_same_bits_alone_among_others_and_in_any_order(implementation, options):
    asked = requests()
    alone = [packed([request], implementation, **options)[0] for request in asked]
    orders = [list(range(len(asked))), list(reversed(range(len(asked)))), [4, 2, 7, 2], [6, 0]]
    for order in orders:
        together = packed([asked[i] for i in order], implementation, **options)
        for number, rows in zip(order, together, strict=True):
            assert_same_bits(rows, alone[number], f"number {number} of {order}")


def test_sequences_without_tokens_and_rows_behind_the_last_are_left_alone():
    asked = requests((0, 45, 0, 1, 0))
    got = packed(asked, padding=5)
    assert_same_bits(got[1], packed([asked[1]])[0])
    assert_same_bits(got[3], packed([asked[3]])[0])
    assert not got[-1].any()


@pytest.mark.parametrize("threads", [2])
def test_threads_move_no_bit(threads):
    asked = requests((300, 700))
    one = packed(asked)
    torch.set_num_threads(threads)
    try:
        for rows, expected in zip(packed(asked), one, strict=True):
            assert_same_bits(rows, expected)
    finally:
        torch.set_num_threads(1)


@both
@options
def test_keys_without_pages_have_the_bits_of_those_in_pages(implementation, options):
    """Parts of one matrix of queries, keys and values, as layers give them, among these."""
    asked = requests((65, 300, 1))
    in_pages = attend([Chunk(request, 0, request.length) for request in asked], implementation, causal=False, **options)
    for strided in (False, True):
        for rows, expected in zip(packed(asked, implementation, strided=strided, **options), in_pages, strict=True):
            assert_same_bits(rows, expected)


@both
def test_causal_attention_over_keys_without_pages_has_the_bits_of_those_in_pages(implementation):
    asked = requests((65, 300, 1))
    in_pages = attend([Chunk(request, 0, request.length) for request in asked], implementation)
    for rows, expected in zip(packed(asked, implementation, causal=True), in_pages, strict=True):
        assert_same_bits(rows, expected)


def test_newest_tokens_over_pages_see_the_keys_after_them():
    """The rows of a chunk have the bits that they have among all of their sequence."""
    [request] = requests((530,))
    for options in ({}, {"sliding_window": 37}):
        whole = attend([Chunk(request, 0, 530)], causal=False, **options)[0]
        for count in (1, 7, 300):
            newest = attend([Chunk(request, 530 - count, 530)], causal=False, **options)[0]
            assert_same_bits(newest, whole[-count:], f"{count}, {options}")


@pytest.mark.parametrize("window", [1, 2, 37, 256, 257])
def test_a_row_sees_its_interval_and_nothing_else(window):
    """What is not finite reaches those that see it, none at either end more."""
    for bad in (0, 100, 255, 256, 299):
        [request] = requests((300,))
        clean = packed([request], sliding_window=window)[0]
        request.key[bad], request.value[bad] = math.nan, math.nan
        dirty = packed([request], sliding_window=window)[0]
        sees = (torch.arange(300) - bad).abs() < window
        assert dirty[sees].isnan().all()
        assert_same_bits(dirty[~sees], clean[~sees])


def test_a_neighbours_keys_never_leak():
    asked = requests((45, 64, 1, 200))
    clean = packed(asked)
    asked[1].key[:], asked[1].value[:] = math.nan, math.inf
    for number, (rows, expected) in enumerate(zip(packed(asked), clean, strict=True)):
        if number != 1:
            assert_same_bits(rows, expected)


def test_splits_that_begin_with_the_batch_fail_that_comparison():
    """What these tests look for exists: the same keys of a sequence, added up from another border on."""
    [request] = requests((300,))
    whole = packed([request])[0]
    other = packed([request], split_size=128)[0]
    torch.testing.assert_close(other, whole, rtol=1e-4, atol=1e-5)
    assert not torch.equal(other, whole)


def test_keys_without_pages_that_are_not_those_of_the_queries_are_refused():
    asked = requests((3, 5))
    with pytest.raises(ValueError, match="must be those of the queries"):
        packed(asked, seq_lens=torch.tensor([3, 6]))
    with pytest.raises(ValueError, match="must begin where the queries"):
        packed(asked, first_rows=torch.tensor([0, 2, 8]))


@pytest.mark.parametrize("implementation", ["flex", "exact"])
def test_an_implementation_without_them_refuses_keys_without_pages(implementation):
    with pytest.raises(NotCovered, match=f"keys without pages by '{implementation}'"):
        packed(requests((3,), Heads(4, 2, 64, torch.bfloat16)), implementation, causal=True)


def test_a_reduction_of_several_sizes_is_the_reference_of_a_gpus():
    """The splits of a GPU, by the reference: near the definition, and the same alone."""
    asked = requests((700, 1, 300))
    reduction = AttentionReduction.of_device("cuda")
    together = packed(asked, "reference", reduction=reduction)
    for request, rows in zip(asked, together, strict=True):
        assert_near(rows, definition(request), factor=2)
        assert_same_bits(rows, packed([request], "reference", reduction=reduction)[0])
