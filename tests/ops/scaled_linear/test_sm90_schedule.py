"""Hopper's tiles of e4m3 fit into its multiprocessors, and each is one that the kernel can compute."""

import csv
from dataclasses import replace
from statistics import geometric_mean

import pytest
import torch

from benchmarks.record import DATA
from tests.ops.conftest import HOPPER
from vllm_batch_invariant.ops.scaled_linear.reduction import E4M3, GROUP
from vllm_batch_invariant.ops.scaled_linear.sm90_schedule import (
    LONG_SIDE,
    SM90_SCHEDULES,
    STEP_K,
    Sm90Schedule,
    serves,
    sm90_schedule,
)

RESERVED = 1024
"""Bytes of a multiprocessor's shared memory that a program takes beside its own."""


@pytest.mark.parametrize("tile", SM90_SCHEDULES, ids=lambda tile: tile.about)
def test_a_tile_fits(tile: Sm90Schedule):
    assert tile.ctas_per_sm * (tile.shared + RESERVED) <= HOPPER.shared_memory + RESERVED
    accumulators = (tile.accumulators + 1) * LONG_SIDE * tile.short // 128
    assert accumulators <= 200, "of a thread, of the 232 that it has"


@pytest.mark.parametrize("tile", SM90_SCHEDULES, ids=lambda tile: tile.about)
def test_a_tile_has_one_scale_of_the_weight_in_a_step(tile: Sm90Schedule):
    assert STEP_K == GROUP
    assert GROUP % tile.block_n == 0
    assert tile.long == LONG_SIDE * tile.warpgroups or (tile.long < LONG_SIDE and tile.warpgroups == 1)


def test_few_rows_are_on_the_short_side_and_many_on_the_long_one():
    for n, k in ((6144, 4096), (4096, 12_288), (24_576, 4096), (512, 2048)):
        assert all(sm90_schedule(m, n, k, HOPPER).swapped for m in (1, 8, 16, 32))
        assert not any(sm90_schedule(m, n, k, HOPPER).swapped for m in (4096, 8192))
        assert sm90_schedule(1, n, k, HOPPER).block_m <= 16


def test_the_tiles_that_are_chosen_take_little_more_than_the_best_that_were_timed():
    times: dict[tuple[int, ...], dict[str, float]] = {}
    for row in csv.DictReader((DATA / "fp8_tiles.csv").open()):
        if row["what"] == "time" and row["name"].startswith("Gluon"):
            of = times.setdefault(tuple(int(row[name]) for name in "MNK"), {})
            of[row["name"].removeprefix("Gluon ")] = float(row["p50_us"])
    assert len(times) == 40
    lost = [of[sm90_schedule(*key, HOPPER).about] / min(of.values()) for key, of in times.items()]
    assert geometric_mean(lost) < 1.015
    assert max(lost) < 1.08


def test_operands_that_are_not_aligned_are_left_to_triton():
    codes, weight = (torch.zeros(rows, 256, dtype=torch.uint8).view(E4M3) for rows in (3, 128))
    scales = torch.ones(1, 2)
    assert serves(codes, weight, scales, HOPPER)
    assert serves(codes[:, :100], weight[:, :100], scales, HOPPER), "K may be any where rows are aligned"
    assert not serves(codes[:, 8:], weight[:, 8:], scales, HOPPER)
    assert not serves(codes[:, :100].clone(), weight[:, :100], scales, HOPPER)
    assert not serves(codes[:0], weight, scales, HOPPER)
    assert not serves(codes, weight, scales.expand(2, 1, 2).transpose(0, 2)[:, 0], HOPPER)
    assert not serves(codes, weight, scales, replace(HOPPER, has_wgmma=False))
