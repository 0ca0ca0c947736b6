"""The listed candidates of a row and the place of one of them: one order, which follows from the row alone."""

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant.ops import ranking
from vllm_batch_invariant.ops.ranking import cpu, reference

COUNTS = (0, 1, 2, 5, 20, cpu.LONGEST_LIST, cpu.LONGEST_LIST + 1)


def tied_rows(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Logprobs of logits in bf16, many of which are equal; and rows of nothing but ties, -inf, both zeros and NaN."""
    x = torch.randn(rows, length, generator=torch.Generator().manual_seed(seed)).bfloat16().float() * 2
    x = x.log_softmax(-1)
    special = x[:: max(rows // 6, 1)]
    if len(special) >= 6:
        special[0] = -torch.inf
        special[0, [length - 1, 3, length // 2]] = torch.tensor([-1.0, -2.0, -1.0])
        special[1] = 0.25
        special[2] = torch.where(torch.arange(length) % 2 == 0, -0.0, 0.0)
        special[3, [5, 7]] = torch.nan
        special[4, length // 3] = torch.inf
        special[5] = torch.arange(length)
    return x


def chosen_of(x: torch.Tensor) -> torch.Tensor:
    return torch.randint(x.shape[1], (len(x),), generator=torch.Generator().manual_seed(len(x)))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("length", [300, 1003, 40_000])
def test_candidates_are_listed_by_value_and_equal_ones_by_index(length, count):
    x = tied_rows(12, length)
    chosen = chosen_of(x)
    expected = reference.top_and_ranks(x, count, chosen)
    for ours, exact in zip(ranking.top_and_ranks(x, count, chosen), expected, strict=True):
        assert_same_bits(ours, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 300, 40_000])
def test_the_first_is_the_first_of_the_list(length, dtype):
    x = tied_rows(12, length).to(dtype) if length > 10 else torch.full((12, 1), torch.nan)
    expected = reference.top_and_ranks(x, 1, torch.zeros(12, dtype=torch.int64))[0][:, 0]
    assert_same_bits(reference.first(x), expected)
    assert_same_bits(ranking.first(x), expected)
    assert ranking.first(x[:0]).shape == (0,)


def test_a_longer_list_begins_with_the_shorter_one_and_neighbours_change_neither():
    x = tied_rows(64, 5000)
    chosen = chosen_of(x)
    longest, ranks = ranking.top_and_ranks(x, 5000, chosen)
    for count in COUNTS:
        for row in range(0, 64, 9):
            alone, rank = ranking.top_and_ranks(x[row : row + 1], count, chosen[row : row + 1])
            assert_same_bits(alone[0], longest[row, :count])
            assert_same_bits(rank[0], ranks[row])


def test_torch_topk_fails_the_same_check():
    x = tied_rows(64, 5000)
    few = torch.topk(x, 5).indices
    assert any(not torch.equal(torch.topk(x, count).indices[:, :5], few) for count in COUNTS if count > 5)


def test_the_rank_of_a_candidate_is_its_place_in_the_list():
    x = tied_rows(64, 700)
    top, _ = ranking.top_and_ranks(x, 20, chosen_of(x))
    for place in range(20):
        _, ranks = ranking.top_and_ranks(x, 0, top[:, place])
        assert (ranks == place + 1).all()


def test_no_rows_have_no_candidates():
    top, ranks = ranking.top_and_ranks(torch.empty(0, 50), 5, torch.empty(0, dtype=torch.int64))
    assert top.shape == (0, 5)
    assert ranks.shape == (0,)


def test_an_index_outside_the_row_is_refused():
    with pytest.raises(IndexError, match="outside a row of 50"):
        ranking.top_and_ranks(torch.zeros(1, 50), 5, torch.tensor([50]))
    with pytest.raises(ValueError, match="no first 51"):
        ranking.top_and_ranks(torch.zeros(1, 50), 51, torch.tensor([0]))
