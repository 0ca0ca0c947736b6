"""Drafts that are accepted: the longest run, from the first, that is what was sampled."""

import random

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant.ops import acceptance
from vllm_batch_invariant.ops.acceptance import NO_TOKEN, reference

WIDTHS = (1, 2, 4, 8, 9, 129)


def steps(width: int, requests: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of requests with 0 to ``width`` - 1 drafts, of which any number are right; few tokens, so that some are by
    chance; some inputs are not to be accepted.
    """
    chance = random.Random(f"{width} {seed}")
    sampled, inputs, starts = [], [], [0]
    for _ in range(requests):
        count = chance.randint(1, width)
        mine = [chance.randrange(3) for _ in range(count)]
        right = chance.randint(0, count)
        fed = [chance.randrange(3), *mine[:-1]]
        fed[right:] = [chance.choice((NO_TOKEN, 0, 1, 2)) for _ in fed[right:]]
        sampled, inputs = sampled + mine, inputs + fed
        starts.append(len(sampled))
    return torch.tensor(sampled), torch.tensor(inputs), torch.tensor(starts, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", WIDTHS)
def test_tokens_and_counts_are_those_of_the_reference(width, dtype):
    sampled, inputs, starts = steps(width)
    ours = acceptance.accept(sampled.to(dtype), inputs.to(dtype), starts, width)
    for one, exact in zip(ours, reference.accept(sampled, inputs, starts, width), strict=True):
        assert_same_bits(one, exact)


def test_a_request_gets_its_accepted_drafts_and_one_token_more():
    sampled = torch.tensor([5, 6, 7, 8, 9, 5, 6, 7])
    inputs = torch.tensor([1, 5, 6, 0, 2, 3, 9, 6])
    tokens, counts = acceptance.accept(sampled, inputs, torch.tensor([0, 4, 5, 8], dtype=torch.int32), 4)
    assert counts.tolist() == [3, 1, 1]
    assert tokens.tolist() == [[5, 6, 7, NO_TOKEN], [9, *[NO_TOKEN] * 3], [5, *[NO_TOKEN] * 3]]


def test_another_request_moves_no_token():
    sampled, inputs, starts = steps(8)
    tokens, counts = acceptance.accept(sampled, inputs, starts, 8)
    for request in range(len(counts)):
        mine = slice(starts[request], starts[request + 1])
        alone = torch.tensor([0, mine.stop - mine.start], dtype=torch.int32)
        for one, among in zip(acceptance.accept(sampled[mine], inputs[mine], alone, 8), (tokens, counts), strict=True):
            assert_same_bits(one[0], among[request])
