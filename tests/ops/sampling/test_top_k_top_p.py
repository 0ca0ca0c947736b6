"""top-k and top-p keep the first candidates of one order, and what a row keeps follows from the row alone."""

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.sampling.test_ranking import tied_rows
from vllm_batch_invariant.ops.top_k_top_p import reference, top_k_top_p

LENGTHS = (300, 1003, 40_000)


def some_ks(rows: int, length: int) -> torch.Tensor:
    return torch.tensor([1, 2, 5, 20, 50, length - 1, length, length, 0])[torch.arange(rows) % 9].int()


def some_ps(rows: int) -> torch.Tensor:
    return torch.tensor([1.0, 0.9, 0.5, 0.99, 0.1, 0.0, 1e-6])[torch.arange(rows) % 7]


def kept_by(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """Which candidates stay; fails where one that stays has another logit, or one that goes is not -inf."""
    filtered = top_k_top_p(logits.clone(), k, p)
    kept = ~((filtered == -torch.inf) & (logits != -torch.inf))
    assert_same_bits(torch.where(kept, filtered, logits), logits)
    return kept


def assert_within_rounding(logits: torch.Tensor, kept: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> None:
    """Fail unless what is kept begins the order, is probable enough, and needs its last candidate for that."""
    slack = 2e-6
    assert not (kept & ~reference.kept(logits, k, p + slack) & (logits > -torch.inf)).any()
    least = reference.kept(logits, k, (p - slack).clamp(min=0))
    assert not (least & ~kept & (logits > -torch.inf)).any()


@pytest.mark.parametrize("length", LENGTHS)
def test_top_k_keeps_the_first_of_the_order_and_no_more(length):
    x = tied_rows(45, length)
    k = some_ks(45, length)
    assert_same_bits(kept_by(x, k, None), reference.kept(x, k, None) | (x == -torch.inf))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 40.0])
def test_top_p_keeps_the_fewest_first_of_the_order_that_are_probable_enough(length, scale):
    x = torch.randn(63, length, generator=torch.Generator().manual_seed(length)).bfloat16().float() * scale
    x[1, 7:] = -torch.inf
    k, p = some_ks(63, length), some_ps(63)
    for ks in (torch.full_like(k, length), k):
        assert_within_rounding(x, kept_by(x, ks, p), ks, p)


def test_of_equal_logits_at_the_cut_those_with_lower_indices_stay():
    x = torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0, -3.0]])
    assert kept_by(x, torch.tensor([3]), None).tolist() == [[False, True, True, True, False, False]]
    assert kept_by(x, None, torch.tensor([0.4])).tolist() == [[False, True, True, False, False, False]]
    assert kept_by(x, torch.tensor([2]), torch.tensor([0.5])).tolist() == [[False, True, False, False, False, False]]


def test_neighbours_and_what_they_ask_for_change_no_row():
    x = tied_rows(70, 5003) * 3
    k, p = some_ks(70, 5003), some_ps(70)
    whole = top_k_top_p(x.clone(), k, p)
    for row in range(70):
        alone = slice(row, row + 1)
        only_k = k[alone] if 0 < k[row] < 5003 else None
        only_p = p[alone] if p[row] < 1 else None
        assert_same_bits(top_k_top_p(x[alone].clone(), only_k, only_p)[0], whole[row])


def test_a_row_without_finite_logits_and_one_with_infinity_are_filtered():
    x = torch.full((4, 100), -torch.inf)
    x[1, 50] = torch.inf
    x[2, 50] = torch.nan
    x[3, 3] = -1.0
    k, p = torch.tensor([5, 5, 5, 5]), torch.tensor([0.5, 0.5, 0.5, 0.5])
    filtered = top_k_top_p(x.clone(), k, p)
    assert_same_bits(filtered, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_precision_are_filtered_in_place_like_wide_ones(dtype):
    x = torch.randn(9, 777, generator=torch.Generator().manual_seed(1)).to(dtype)
    k, p = some_ks(9, 777), some_ps(9)
    wide = top_k_top_p(x.float(), k, p)
    narrow = x.clone()
    assert top_k_top_p(narrow, k, p) is narrow
    assert_same_bits(narrow.float(), wide)


def test_no_filter_leaves_the_logits_as_they_are():
    x = tied_rows(3, 50)
    assert top_k_top_p(x, None, None) is x
    assert top_k_top_p(x[:0], torch.zeros(0), None).shape == (0, 50)
