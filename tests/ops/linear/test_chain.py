"""How a model's products are timed in a row: what is chosen then, and that it is one of those that agree."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from vllm_batch_invariant.ops.linear import autotune_cache, chain, cuda
from vllm_batch_invariant.ops.linear.autotune import CHAINED, M_BUCKETS, TunedSchedule
from vllm_batch_invariant.ops.linear.problem import GemmProblem
from vllm_batch_invariant.ops.linear.schedule import GATED_TILES, NARROW_TILES
from vllm_batch_invariant.ops.linear.spec import GATED, PRODUCT

UP = GemmProblem(256, 64, torch.bfloat16, GATED, device=0)
DOWN = GemmProblem(64, 128, torch.bfloat16, PRODUCT, device=0)
WIDE, SMALL = GATED_TILES[2], GATED_TILES[0]
TILE, OTHER = NARROW_TILES[2], NARROW_TILES[3]


class Told:
    """Takes as long as it is told for a pair of schedules, and says for which rows it was asked."""

    def __init__(self, microseconds: dict[tuple[Any, Any], float]) -> None:
        self.microseconds, self.asked = microseconds, []

    def times(self, bucket: int, choices: Sequence[chain.Choice]) -> list[float]:
        self.asked.append(bucket)
        return [self.microseconds[choice[UP], choice[DOWN]] for choice in choices]


def tuned(schedule: Any, *near: Any) -> TunedSchedule:
    made = TunedSchedule(None, (1, 8), (), {"triton": 9.0}).served_with(schedule)
    return replace(made, near=near)


@pytest.fixture
def of_one_range() -> dict[GemmProblem, dict[int, TunedSchedule]]:
    return {UP: {8: tuned(WIDE, SMALL)}, DOWN: {8: tuned(TILE, None)}}


def test_what_is_fastest_alone_is_left_where_a_neighbour_makes_it_slow(of_one_range) -> None:
    told = Told({(WIDE, TILE): 106.0, (SMALL, TILE): 107.0, (WIDE, None): 105.0, (SMALL, None): 103.0})
    found = chain.settled([UP, DOWN], of_one_range, told)
    assert {problem: one[8].schedule for problem, one in found.items()} == {UP: SMALL, DOWN: None}
    assert all(one[8].checked == (1, 8) and one[8].microseconds == {"triton": 9.0} for one in found.values())
    assert all(one[8].near == () for one in found.values())


def test_a_gain_within_noise_changes_nothing(of_one_range) -> None:
    told = Told({(WIDE, TILE): 100.0, (SMALL, TILE): 99.9, (WIDE, None): 99.8, (SMALL, None): 99.75})
    assert chain.settled([UP, DOWN], of_one_range, told) == {}
    assert told.asked == [8] * 4


def test_many_rows_and_what_has_no_choice_are_not_timed() -> None:
    many = {bucket: tuned(WIDE, SMALL) for bucket in M_BUCKETS if bucket > CHAINED}
    told = Told({})
    assert chain.settled([UP, DOWN], {UP: many | {8: tuned(WIDE)}, DOWN: many | {8: tuned(TILE)}}, told) == {}
    assert chain.settled([UP, DOWN], {UP: {8: tuned(WIDE, SMALL)}, DOWN: {}}, told) == {}
    assert not told.asked


def test_a_range_that_one_has_not_is_settled_of_the_others(of_one_range) -> None:
    told = Told({(WIDE, TILE): 106.0, (SMALL, TILE): 107.0, (WIDE, None): 105.0, (SMALL, None): 103.0})
    other = GemmProblem(512, 64, torch.bfloat16, PRODUCT, device=0)
    found = chain.settled([other, UP, DOWN], of_one_range | {other: {}}, told)
    assert {problem: one[8].schedule for problem, one in found.items()} == {UP: SMALL, DOWN: None}


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> cuda.MatmulDispatcher:
    """One that keeps what it stores, and whose GPU is made up."""
    monkeypatch.setattr(autotune_cache, "save", lambda of, gemms: saved.update(gemms))
    monkeypatch.setattr(cuda, "_environment", lambda device: {})
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    saved: dict[str, Any] = {}
    made = cuda.MatmulDispatcher()
    made.saved = saved
    return made


def test_layers_that_repeat_are_settled_once_and_kept(dispatcher, monkeypatch, of_one_range) -> None:
    rows = {(WIDE, TILE): 106.0, (SMALL, TILE): 107.0, (WIDE, None): 105.0, (SMALL, None): 103.0}
    asked = []
    monkeypatch.setattr(chain, "Chain", lambda problems, matmul_of: asked.append(problems) or Told(rows))
    head = GemmProblem(512, 64, torch.bfloat16, PRODUCT, device=0)
    dispatcher._tuned = of_one_range | {head: {8: tuned(TILE, OTHER)}}
    dispatcher._prepared.update({UP: 36, DOWN: 36, head: 0})
    dispatcher.settle()
    assert asked == [[UP, DOWN]], "embeddings are no layers"
    assert [dispatcher._tuned[problem][8].schedule for problem in (UP, DOWN, head)] == [SMALL, None, TILE]
    assert {
        name: {bucket: one["tile"] and one["tile"]["block_n"] for bucket, one in kept.items()}
        for name, kept in dispatcher.saved.items()
    } == {str(UP): {"8": SMALL.block_n}, str(DOWN): {"8": None}}
    dispatcher._prepared.update({UP: 36, DOWN: 36})
    dispatcher.settle()
    assert len(asked) == 1, "what has been chosen in a row has nothing near"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("CUDA error: out of memory")])
def test_where_a_row_cannot_be_timed_schedules_stay_as_they_were(
    error, dispatcher, monkeypatch, of_one_range, log
) -> None:
    def full(problems, matmul_of) -> None:
        raise error

    monkeypatch.setattr(chain, "Chain", full)
    dispatcher._tuned = of_one_range
    dispatcher._prepared.update({UP: 2, DOWN: 2})
    dispatcher.settle()
    assert [dispatcher._tuned[problem][8].schedule for problem in (UP, DOWN)] == [WIDE, TILE]
    assert f"left as they were chosen alone: {error}" in log.text


def test_one_product_alone_and_none_are_left(dispatcher) -> None:
    dispatcher._prepared.update({UP: 36, DOWN: 1})
    dispatcher._tuned = {UP: {8: tuned(WIDE, SMALL)}}
    dispatcher.settle()
    assert dispatcher._tuned[UP][8].near == (SMALL,)
    dispatcher.settle()
