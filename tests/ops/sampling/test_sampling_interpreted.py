"""The GPU's kernels for candidates, top-k, top-p and accepted drafts in Triton's interpreter, on the CPU."""

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.sampling.test_acceptance import WIDTHS, steps
from tests.ops.sampling.test_ranking import chosen_of, tied_rows
from tests.ops.sampling.test_top_k_top_p import assert_within_rounding, some_ks, some_ps
from vllm_batch_invariant.ops.acceptance import cuda as acceptance
from vllm_batch_invariant.ops.acceptance import reference as exact_acceptance
from vllm_batch_invariant.ops.ranking import cuda as ranking
from vllm_batch_invariant.ops.ranking import reference as exact_ranking
from vllm_batch_invariant.ops.top_k_top_p import cuda as filters
from vllm_batch_invariant.ops.top_k_top_p import reference as exact_filters

LENGTH = 4096 + 777


@pytest.mark.parametrize("count", [0, 1, 5, 20, 100, ranking.LONGEST_LIST + 1])
def test_candidates_and_ranks_are_those_of_the_reference(count):
    x = tied_rows(12, LENGTH)
    chosen = chosen_of(x)
    expected = exact_ranking.top_and_ranks(x, count, chosen)
    for ours, exact in zip(ranking.top_and_ranks(x, count, chosen), expected, strict=True):
        assert_same_bits(ours, exact)


def test_the_first_candidate_is_that_of_the_reference():
    for length in (1, 4096, 2 * 8192 + 777):
        x = tied_rows(12, length) if length > 1 else torch.zeros(12, 1)
        assert_same_bits(ranking.first(x), exact_ranking.first(x))
    x = tied_rows(12, LENGTH + 8)[:, 3 : LENGTH + 3]
    assert_same_bits(ranking.first(x), exact_ranking.first(x))


def test_candidates_of_a_view_are_those_of_the_reference():
    x = tied_rows(3, LENGTH + 8)[:, :LENGTH]
    for ours, exact in zip(
        ranking.top_and_ranks(x, 7, chosen_of(x)), exact_ranking.top_and_ranks(x, 7, chosen_of(x)), strict=True
    ):
        assert_same_bits(ours, exact)


def kept_by(x: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    filtered = filters.top_k_top_p(x.clone(), k, p)
    kept = ~((filtered == -torch.inf) & (x != -torch.inf))
    assert_same_bits(torch.where(kept, filtered, x), x)
    return kept


def test_top_k_keeps_what_the_reference_keeps():
    x = tied_rows(18, LENGTH)
    k = some_ks(18, LENGTH)
    assert_same_bits(kept_by(x, k, None), exact_filters.kept(x, k, None) | (x == -torch.inf))


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 40.0])
def test_top_p_keeps_what_the_reference_keeps_within_rounding(scale):
    x = torch.randn(14, LENGTH, generator=torch.Generator().manual_seed(1)).bfloat16().float() * scale
    x[1, 7:] = -torch.inf
    for rows, k in ((7, torch.full((7,), LENGTH)), (9, some_ks(9, LENGTH))):
        p = some_ps(rows)
        assert_within_rounding(x[:rows], kept_by(x[:rows], k, p), k, p)


def test_what_is_found_in_the_row_has_the_bits_of_what_is_found_in_a_list(monkeypatch):
    x = torch.randn(7, LENGTH, generator=torch.Generator().manual_seed(2)).half().float()
    p, whole = some_ps(7), filters.top_k_top_p(x.clone(), None, some_ps(7))
    k = torch.full((7,), 60)
    both = filters.top_k_top_p(x.clone(), k, p)
    monkeypatch.setattr(filters, "LONGEST_LIST", 16)
    assert_same_bits(filters.top_k_top_p(x.clone(), None, p), whole, "found in the row and not in a list")
    assert_same_bits(filters.top_k_top_p(x.clone(), k, p), both, "found in the row and not in a list, with k")


def test_a_row_has_the_same_bits_alone():
    x = tied_rows(18, LENGTH) * 3
    k, p = some_ks(18, LENGTH), some_ps(18)
    whole = filters.top_k_top_p(x.clone(), k, p)
    for row in range(18):
        alone = slice(row, row + 1)
        only_k = k[alone] if 0 < k[row] < LENGTH else None
        assert_same_bits(filters.top_k_top_p(x[alone].clone(), only_k, p[alone])[0], whole[row], f"row {row} alone")


def test_fp16_is_filtered_in_place_as_fp32_is():
    wide = torch.randn(9, 2 * LENGTH, generator=torch.Generator().manual_seed(3)).half()
    x = wide[:, :LENGTH]
    k, p = some_ks(9, LENGTH), some_ps(9)
    expected = filters.top_k_top_p(x.float(), k, p)
    assert filters.top_k_top_p(x, k, p) is x
    assert_same_bits(x.float(), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", WIDTHS)
def test_accepted_drafts_are_those_of_the_reference(width, dtype):
    sampled, inputs, starts = steps(width, requests=12)
    ours = acceptance.accept(sampled.to(dtype), inputs.to(dtype), starts, width)
    for one, exact in zip(ours, exact_acceptance.accept(sampled, inputs, starts, width), strict=True):
        assert_same_bits(one, exact)
