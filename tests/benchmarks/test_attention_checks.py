"""Inputs lie where they should; the checks see what they shall see."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks.attention_batch import Batch, batches_of
from benchmarks.attention_cases import CASES as PLAIN_CASES
from benchmarks.attention_cases import Case, cases_of
from benchmarks.attention_checks import Exact, cancel, other_bits
from tests.benchmarks.attention_fakes import CHUNK, DECODE, MIXED, PREFILL, TOWER, WINDOW, exact, lazy, row_by_row

CASES = [DECODE, PREFILL, CHUNK, MIXED]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.phase)


layers = pytest.mark.parametrize("case", [*CASES, WINDOW, TOWER], ids=lambda case: case.text(16).split()[0])


def batch_of(case: Case) -> Batch:
    [batch] = batches_of(case, 16, 1, "cpu")
    return batch


def runs(attend: Callable[[Batch, torch.Tensor], None]) -> Callable[[Batch], torch.Tensor]:
    def run(batch: Batch) -> torch.Tensor:
        out = torch.full_like(batch.query, torch.nan)
        attend(batch, out)
        return out

    return run


def anything(requests: object) -> bool:
    return True


@each_case
def test_every_page_belongs_to_one_request_and_every_copy_has_a_cache_of_its_own(case: Case) -> None:
    batches = batches_of(case, 16, 3, "cpu")
    first = batches[0]
    pages = torch.cat([first.pages(place) for place in range(len(first.requests))])
    assert sorted(pages.tolist()) == list(range(len(first.cache)))
    assert len({batch.cache.data_ptr() for batch in batches}) == 3
    assert len({batch.cache.untyped_storage().data_ptr() for batch in batches}) == 1
    assert all(batch.table is first.table for batch in batches)
    assert first.keys.shape == (len(pages), 16, 2, 16)
    assert first.keys.stride(-1) == 1


def test_a_batch_knows_its_rows_and_gives_requests_in_any_order() -> None:
    batch = batch_of(MIXED)
    assert batch.rows == (slice(0, 20), slice(20, 21), slice(21, 22))
    assert batch.query_start_loc.tolist() == [0, 20, 21, 22]
    assert (batch.most_tokens, batch.longest_context) == (20, 48)
    picked = batch.pick([2, 0])
    assert picked.seq_lens.tolist() == [33, 20]
    assert torch.equal(picked.query, torch.cat([batch.query[21:], batch.query[:20]]))
    assert torch.equal(picked.table, batch.table[[2, 0]])


@layers
def test_the_definition_is_that_of_the_operation(case: Case) -> None:
    batch = batch_of(case)
    out = runs(exact)(batch)
    assert Exact(batch).error(out) < 4e-3
    assert Exact(batch).error(1.125 * out) > 0.1
    assert math.isnan(Exact(batch).error(runs(lazy)(batch)))


@pytest.mark.parametrize("case", [DECODE, CHUNK], ids=lambda case: case.phase)
def test_all_keys_together_leave_only_rounding_errors_after_cancelling(case: Case) -> None:
    batch = batch_of(case)
    before = runs(exact)(batch)[-1].float().abs().mean()
    cancel(batch)
    left = runs(exact)(batch)[-1].float().abs().mean()
    assert 0 < left < 1e-3 * before


@each_case
def test_a_provider_that_treats_each_request_alone_has_one_answer(case: Case) -> None:
    batch = batch_of(case)
    cancel(batch)
    assert other_bits(runs(row_by_row), anything, batch) == []


@each_case
def test_other_bits_among_others_are_found(case: Case) -> None:
    def crowded(batch: Batch, out: torch.Tensor) -> None:
        row_by_row(batch, out)
        if len(batch.requests) > 1 and Counter(batch.requests) != Counter(case.requests):
            out.mul_(1.125)

    places = range(len(case.requests))
    found = other_bits(runs(crowded), anything, batch_of(case))
    assert found == [f"request {place} among others" for place in places]


def test_bits_that_follow_the_order_are_found() -> None:
    def placed(batch: Batch, out: torch.Tensor) -> None:
        exact(batch, out)
        out[0] *= 1.125

    assert other_bits(runs(placed), anything, batch_of(DECODE))[0] == "in opposite order"


def test_rows_that_are_never_written_are_found() -> None:
    assert other_bits(runs(lazy), anything, batch_of(DECODE)) != []


def test_what_is_not_covered_is_not_asked() -> None:
    asked = []

    def run(batch: Batch) -> torch.Tensor:
        asked.append(batch.most_tokens)
        return torch.zeros_like(batch.query)

    assert other_bits(run, lambda requests: len(requests) == 1 and requests[0].tokens == 1, batch_of(DECODE)) == []
    assert set(asked) == {1}


def test_a_decode_with_other_bits_than_its_prefill_is_found() -> None:
    def phased(batch: Batch, out: torch.Tensor) -> None:
        row_by_row(batch, out)
        if len(batch.requests) == 1 and batch.most_tokens == batch.longest_context:
            out.mul_(1.125)

    single = replace(DECODE, requests=DECODE.requests[:1])
    assert other_bits(runs(phased), anything, batch_of(single)) == ["request 0 by prefill"]


@pytest.mark.parametrize("case", [WINDOW, TOWER], ids=["window and sinks", "encoder"])
def test_layers_that_add_to_causal_attention_are_compared_as_others(case: Case) -> None:
    batch = batch_of(case)
    assert other_bits(runs(exact), anything, batch) == []
    assert other_bits(runs(lazy), anything, batch) != []
    without = replace(batch, layer=type(batch.layer)())
    assert Exact(batch).error(runs(exact)(without)) > 0.01


def test_keys_and_values_that_are_codes_are_cancelled_and_compared_as_others() -> None:
    batch = batch_of(replace(DECODE, in_codes=True))
    assert (batch.cache.dtype, batch.in_codes) == (torch.float8_e4m3fn, True)
    numbers = replace(batch, cache=batch.cache.to(torch.bfloat16))
    out = runs(row_by_row)(numbers)
    assert Exact(batch).error(out) == Exact(numbers).error(out) < 0.01
    for one in (batch, numbers):
        cancel(one)
    assert torch.equal(batch.cache.float(), numbers.cache.float())
    assert not any("fp8" in case.text(16) for case in cases_of(["decode"]))
    assert len(cases_of(["decode cache=fp8"])) == sum(case.phase == "decode" for case in PLAIN_CASES)
