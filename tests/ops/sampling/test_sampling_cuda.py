"""Candidates, top-k, top-p and noise on a GPU: right, and the same for a row whatever rows are beside it."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from tests.assertions import DTYPES, assert_same_bits
from tests.ops.linear.cases import draw
from tests.ops.sampling.test_ranking import chosen_of, tied_rows
from tests.ops.sampling.test_top_k_top_p import assert_within_rounding, some_ks, some_ps
from vllm_batch_invariant.ops import ranking
from vllm_batch_invariant.ops.ranking import cuda as ranking_cuda
from vllm_batch_invariant.ops.ranking import reference as exact_ranking
from vllm_batch_invariant.ops.softmax import log_softmax, log_softmax_at
from vllm_batch_invariant.ops.top_k_top_p import cuda as filters
from vllm_batch_invariant.ops.top_k_top_p import reference as exact_filters
from vllm_batch_invariant.ops.top_k_top_p import top_k_top_p

VOCABULARY = 152_064
COUNTS = (0, 1, 2, 5, 20, 100, ranking_cuda.LONGEST_LIST, ranking_cuda.LONGEST_LIST + 1)
ROWS = (1, 2, 3, 5, 8, 16, 33, 64, 65, 128, 299, 300)


def rows_of_logits(rows: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> torch.Tensor:
    """Logits of a bf16 output head, most of which have an equal somewhere in the row."""
    return (draw(rows, VOCABULARY) * scale).bfloat16().to(dtype)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("length", [1003, 40_000, VOCABULARY])
def test_candidates_are_listed_by_value_and_equal_ones_by_index(length, count):
    x = tied_rows(12, length).cuda()
    count = min(count, length)
    chosen = chosen_of(x).cuda()
    expected = exact_ranking.top_and_ranks(x.cpu(), count, chosen.cpu())
    for ours, exact in zip(ranking.top_and_ranks(x, count, chosen), expected, strict=True):
        assert_same_bits(ours.cpu(), exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_lists_the_same_candidates_alone_and_among_others_that_list_more(dtype):
    x = rows_of_logits(300, dtype)
    chosen = torch.randint(VOCABULARY, (300,), generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    longest, ranks = ranking.top_and_ranks(x, 1000, chosen)
    for rows, count in zip(ROWS, (5, 1, 20, 0, 2, 50, 5, 20, 128, 1, 5, 1000), strict=True):
        last = slice(300 - rows, None)
        top, places = ranking.top_and_ranks(x[last], count, chosen[last])
        assert_same_bits(top, longest[last, :count], f"{rows} rows, the first {count}")
        assert_same_bits(places, ranks[last], f"{rows} rows")
    few = torch.topk(x, 5).indices
    assert any(not torch.equal(torch.topk(x, count).indices[:, :5], few) for count in (20, 100, 1000))


def test_a_view_of_a_padded_vocabulary_has_the_candidates_of_a_copy():
    x = draw(9, VOCABULARY + 64).bfloat16()[:, : VOCABULARY - 17]
    chosen = chosen_of(x).cuda()
    for ours, theirs in zip(
        ranking.top_and_ranks(x, 20, chosen), ranking.top_and_ranks(x.contiguous(), 20, chosen), strict=True
    ):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_takes_the_first_candidate(dtype):
    x = rows_of_logits(300, dtype, scale=0.3)
    first, _ = ranking.top_and_ranks(x, 1, torch.zeros(300, dtype=torch.int64, device="cuda"))
    assert ((x == x.max(-1, keepdim=True).values).sum(-1) > 1).any()
    for rows in ROWS:
        assert_same_bits(x[:rows].argmax(-1), first[:rows, 0], f"{rows} rows")
        assert_same_bits(ranking.first(x[:rows]), first[:rows, 0], f"{rows} rows")
    padded = torch.nn.functional.pad(x, (0, 64), value=torch.inf)[:, :VOCABULARY]
    assert_same_bits(ranking.first(padded), first[:, 0])
    special = tied_rows(12, VOCABULARY)
    assert_same_bits(ranking.first(special.to(dtype).cuda()).cpu(), exact_ranking.first(special.to(dtype)))


@pytest.mark.parametrize("length", [1003, 40_000, VOCABULARY])
def test_top_k_keeps_the_first_of_the_order_and_no_more(length):
    x = tied_rows(45, length).cuda()
    k = some_ks(45, length).cuda()
    kept = top_k_top_p(x.clone(), k, None) != -torch.inf
    expected = exact_filters.kept(x.cpu(), k.cpu(), None) & (x.cpu() != -torch.inf)
    assert_same_bits((kept & (x != -torch.inf)).cpu(), expected)


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 40.0])
@pytest.mark.parametrize("longest", [16, filters.LONGEST_LIST])
def test_top_p_keeps_the_fewest_first_of_the_order_that_are_probable_enough(scale, longest, monkeypatch):
    monkeypatch.setattr(filters, "LONGEST_LIST", longest)
    x = rows_of_logits(63, scale=scale)
    x[1, 7:] = -torch.inf
    k, p = some_ks(63, VOCABULARY).cuda(), some_ps(63).cuda()
    for ks in (torch.full_like(k, VOCABULARY), k):
        filtered = top_k_top_p(x.clone(), ks, p)
        kept = ~((filtered == -torch.inf) & (x != -torch.inf))
        assert_same_bits(torch.where(kept, filtered, x), x)
        assert_within_rounding(x, kept, ks, p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_a_row_keeps_the_same_whatever_others_ask_for(dtype, scale):
    x = rows_of_logits(300, dtype, scale)
    k, p = some_ks(300, VOCABULARY).cuda(), some_ps(300).cuda()
    whole = top_k_top_p(x.clone(), k, p)
    for rows in ROWS:
        last = slice(300 - rows, None)
        assert_same_bits(top_k_top_p(x[last].clone(), k[last], p[last]), whole[last], f"{rows} rows")
    for row in range(9):
        one, others = slice(row, row + 1), slice(100, 140)
        only_k = k[one] if 0 < k[row] < VOCABULARY else None
        only_p = p[one] if p[row] < 1 else None
        assert_same_bits(top_k_top_p(x[one].clone(), only_k, only_p)[0], whole[row], f"row {row} alone")
        mixed = torch.cat((x[others], x[one], x[others]))
        ks, ps = torch.full((81,), 7, device="cuda"), torch.full((81,), 0.3, device="cuda")
        ks[40], ps[40] = k[row], p[row]
        assert_same_bits(top_k_top_p(mixed, ks, ps)[40], whole[row], f"row {row} among others")


def test_a_list_and_a_whole_row_have_the_same_cut(monkeypatch):
    x = rows_of_logits(70)
    k, p = some_ks(70, VOCABULARY).cuda(), some_ps(70).cuda()
    listed = top_k_top_p(x.clone(), k, p)
    monkeypatch.setattr(filters, "LONGEST_LIST", 16)
    assert_same_bits(top_k_top_p(x.clone(), k, p), listed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [4096, 20_011, VOCABULARY])
def test_log_softmax_at_places_has_the_bits_of_the_whole_and_of_wide_logits(length, dtype):
    x = (draw(150, length) * 3).to(dtype)
    places = torch.randint(length, (150, 6), generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    whole = log_softmax_at(x, places)
    assert_same_bits(whole, log_softmax(x, dtype=torch.float32).gather(-1, places))
    assert_same_bits(whole, log_softmax_at(x.float(), places))
    for rows in (1, 7, 63, 64, 65, 149):
        assert_same_bits(log_softmax_at(x[-rows:], places[-rows:]), whole[-rows:])


def test_both_runners_list_the_same():
    pytest.importorskip("vllm")
    from vllm_batch_invariant.integration.sampling import sampler

    logits = rows_of_logits(65, torch.bfloat16)
    sampled = torch.randint(VOCABULARY, (65,), generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    first = sampler.gather_logprobs(log_softmax(logits, dtype=torch.float32), 20, sampled)
    for rows in (1, 8, 65):
        second = sampler.compute_topk_scores(logits[:rows], 5, sampled[:rows])
        assert_same_bits(second.logprobs, first.logprobs[:rows, :6])
        assert_same_bits(second.selected_token_ranks, first.selected_token_ranks[:rows])


def test_a_neighbour_that_asks_for_tokens_by_id_leaves_a_row_its_candidates():
    pytest.importorskip("vllm")
    from vllm_batch_invariant.integration.sampling import sampler

    logits, sampled = rows_of_logits(4, torch.bfloat16), torch.arange(4, device="cuda")
    tokens, numbers = torch.zeros(9, 128, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    tokens[6, :3], numbers[6] = torch.tensor([8, 7, 6]), 3
    alone = sampler.compute_topk_scores(logits, 2, sampled)
    beside = sampler.compute_topk_scores(
        logits,
        2,
        sampled,
        logprob_token_ids_state=SimpleNamespace(
            token_ids=SimpleNamespace(gpu=tokens.cuda()), num_token_ids=SimpleNamespace(gpu=numbers.cuda())
        ),
        expanded_idx_mapping=torch.tensor([5, 6, 7, 8], dtype=torch.int32, device="cuda"),
        max_per_req_token_ids=3,
    )
    others = torch.tensor([0, 2, 3], device="cuda")
    assert_same_bits(beside.logprob_token_ids[others, :3], alone.logprob_token_ids[others])
    assert_same_bits(beside.logprobs[others, :3], alone.logprobs[others])
    assert beside.logprob_token_ids[1].tolist() == [1, 8, 7, 6]
    assert (beside.logprobs[others, 3] == -torch.inf).all()


@pytest.mark.parametrize("kernel", ["noise", "temperature", "min_p"])
def test_vllms_own_kernels_give_a_row_the_same_alone_and_among_others(kernel):
    pytest.importorskip("vllm")
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
    from vllm.v1.worker.gpu.sample.min_p import apply_min_p

    x = rows_of_logits(300)
    requests = torch.arange(300, dtype=torch.int32, device="cuda")
    numbers = torch.Generator("cuda").manual_seed(4)
    temperatures = torch.rand(300, generator=numbers, device="cuda") + 0.3
    temperatures[::7] = 0.0
    seeds = torch.randint(2**60, (300,), generator=numbers, device="cuda")
    places = torch.randint(9000, (300,), generator=numbers, device="cuda")

    def compute(rows: slice) -> torch.Tensor:
        logits = x[rows].clone()
        if kernel == "noise":
            drafting = {"is_drafting": False} if "is_drafting" in inspect.signature(gumbel_sample).parameters else {}
            return gumbel_sample(
                logits, requests[rows], temperatures, seeds, places[rows], apply_temperature=False, **drafting
            )
        if kernel == "temperature":
            apply_temperature(logits, requests[rows], temperatures)
        else:
            apply_min_p(logits, requests[rows], temperatures / 10)
        return logits

    whole = compute(slice(None))
    for rows in ROWS:
        last = slice(300 - rows, None)
        assert_same_bits(compute(last), whole[last], f"{rows} rows")
    if kernel == "noise":
        first, _ = ranking.top_and_ranks(x, 1, torch.zeros(300, dtype=torch.int64, device="cuda"))
        assert_same_bits(whole[::7], first[::7, 0], "without noise")
