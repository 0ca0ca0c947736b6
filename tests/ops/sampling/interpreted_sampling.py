"""Runs the GPU's kernels for candidates, top-k and top-p in Triton's interpreter, on the CPU; a program of its own,
because Triton reads the setting when it is imported.

usage: TRITON_INTERPRET=1 python -m tests.ops.sampling.interpreted_sampling
"""

import torch

from tests.assertions import assert_same_bits
from tests.ops.interpreted_checks import run_all
from tests.ops.sampling.test_ranking import chosen_of, tied_rows
from tests.ops.sampling.test_top_k_top_p import assert_within_rounding, some_ks, some_ps
from vllm_batch_invariant.ops.ranking import cuda as ranking
from vllm_batch_invariant.ops.ranking import reference as exact_ranking
from vllm_batch_invariant.ops.top_k_top_p import cuda as filters
from vllm_batch_invariant.ops.top_k_top_p import reference as exact_filters

LENGTH = 4096 + 777


def check_candidates() -> None:
    x = tied_rows(12, LENGTH)
    chosen = chosen_of(x)
    for count in (0, 1, 5, 20, 100, ranking.LONGEST_LIST + 1):
        expected = exact_ranking.top_and_ranks(x, count, chosen)
        for ours, exact in zip(ranking.top_and_ranks(x, count, chosen), expected, strict=True):
            assert_same_bits(ours, exact, f"the first {count}")


def check_candidates_of_a_view() -> None:
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


def check_top_k() -> None:
    x = tied_rows(18, LENGTH)
    k = some_ks(18, LENGTH)
    assert_same_bits(kept_by(x, k, None), exact_filters.kept(x, k, None) | (x == -torch.inf))


def check_top_p() -> None:
    for scale in (0.0, 0.5, 3.0, 40.0):
        x = torch.randn(14, LENGTH, generator=torch.Generator().manual_seed(1)).bfloat16().float() * scale
        x[1, 7:] = -torch.inf
        p = some_ps(14)
        for k in (torch.full((14,), LENGTH), some_ks(14, LENGTH)):
            assert_within_rounding(x, kept_by(x, k, p), k, p)


def check_rows_without_a_list() -> None:
    x = torch.randn(7, LENGTH, generator=torch.Generator().manual_seed(2)).half().float()
    p, whole = some_ps(7), filters.top_k_top_p(x.clone(), None, some_ps(7))
    k = torch.full((7,), 60)
    both = filters.top_k_top_p(x.clone(), k, p)
    longest = filters.LONGEST_LIST
    filters.LONGEST_LIST = 16
    assert_same_bits(filters.top_k_top_p(x.clone(), None, p), whole, "found in the row and not in a list")
    assert_same_bits(filters.top_k_top_p(x.clone(), k, p), both, "found in the row and not in a list, with k")
    filters.LONGEST_LIST = longest


def check_neighbours() -> None:
    x = tied_rows(18, LENGTH) * 3
    k, p = some_ks(18, LENGTH), some_ps(18)
    whole = filters.top_k_top_p(x.clone(), k, p)
    for row in range(18):
        alone = slice(row, row + 1)
        only_k = k[alone] if 0 < k[row] < LENGTH else None
        assert_same_bits(filters.top_k_top_p(x[alone].clone(), only_k, p[alone])[0], whole[row], f"row {row} alone")


def check_half_precision() -> None:
    wide = torch.randn(9, 2 * LENGTH, generator=torch.Generator().manual_seed(3)).half()
    x = wide[:, :LENGTH]
    k, p = some_ks(9, LENGTH), some_ps(9)
    expected = filters.top_k_top_p(x.float(), k, p)
    assert filters.top_k_top_p(x, k, p) is x
    assert_same_bits(x.float(), expected)


CHECKS = {
    "candidates": check_candidates,
    "candidates of a view": check_candidates_of_a_view,
    "top-k": check_top_k,
    "top-p": check_top_p,
    "rows without a list": check_rows_without_a_list,
    "neighbours": check_neighbours,
    "half precision": check_half_precision,
}


if __name__ == "__main__":
    run_all(CHECKS)
