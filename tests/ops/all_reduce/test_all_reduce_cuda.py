"""Ranks on several GPUs of one host add as the reduction says, in messages of every size and in graphs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from tests.ops.all_reduce import on_gpus
from vllm_batch_invariant.verify.harness.server import free_port

RANKS = [ranks for ranks in (2, 4, 8) if ranks <= torch.cuda.device_count()]
IS_HOPPER = bool(RANKS) and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not RANKS, reason="needs two GPUs")


def found(tmp_path: Path, ranks: int, check: Callable[..., list[str]], fault: str | None = None) -> list[list[str]]:
    """By each rank."""
    arguments = (ranks, free_port(), check, fault, str(tmp_path))
    torch.multiprocessing.spawn(on_gpus.run, arguments, nprocs=ranks)
    return [json.loads((tmp_path / f"found by {rank}").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    "check",
    [
        on_gpus.sums_of_every_size,
        on_gpus.trees_of_every_size,
        on_gpus.rounds_of_several_sizes,
        on_gpus.replays_of_graphs,
    ],
)
def test_every_rank_has_the_sum_of_all_in_their_order(tmp_path: Path, ranks: int, check: Callable) -> None:
    assert found(tmp_path, ranks, check) == [[]] * ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("check", [on_gpus.norms_of_every_size, on_gpus.norms_of_trees, on_gpus.replays_of_norms])
def test_a_norm_behind_it_has_the_bits_of_a_norm_alone(tmp_path: Path, ranks: int, check: Callable) -> None:
    assert found(tmp_path, ranks, check) == [[]] * ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("check", [on_gpus.rows_that_are_sent, on_gpus.rows_of_trees_that_are_sent])
def test_rows_that_are_sent_while_others_are_multiplied_have_the_bits_of_a_sum_and_a_norm(
    tmp_path: Path, ranks: int, check: Callable
) -> None:
    assert found(tmp_path, ranks, check) == [[]] * ranks


@pytest.mark.parametrize("fault", ["no wait", "unrounded"])
def test_a_fault_in_what_is_sent_is_found(tmp_path: Path, fault: str) -> None:
    assert any(found(tmp_path, max(RANKS), on_gpus.rows_that_are_sent, fault))


@pytest.mark.skipif(not IS_HOPPER, reason="no other GPU has the narrow matmul")
@pytest.mark.parametrize("ranks", RANKS)
def test_matmuls_that_begin_while_ranks_are_waited_for_have_the_bits_of_those_that_wait(
    tmp_path: Path, ranks: int
) -> None:
    assert found(tmp_path, ranks, on_gpus.replays_of_layers) == [[]] * ranks


@pytest.mark.parametrize("fault", ["no wait", "unrounded"])
def test_a_fault_before_a_norm_is_found(tmp_path: Path, fault: str) -> None:
    assert any(found(tmp_path, max(RANKS), on_gpus.norms_of_every_size, fault))


@pytest.mark.parametrize("ranks", [ranks for ranks in RANKS if ranks > 2])
def test_nccl_fails_the_same_comparison(tmp_path: Path, ranks: int) -> None:
    """Of two ranks it has the same bits: an addition of two numbers has one order."""
    assert any(found(tmp_path, ranks, on_gpus.sums_by_nccl))


@pytest.mark.parametrize("fault", ["no wait", "rounded each time"])
def test_a_planted_fault_is_found(tmp_path: Path, fault: str) -> None:
    ranks = max(RANKS)
    if fault == "rounded each time" and ranks == 2:
        pytest.skip("a sum of two numbers is rounded once")
    assert any(found(tmp_path, ranks, on_gpus.sums_of_every_size, fault))


def test_a_rank_that_ends_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    ranks, port, context = 2, free_port(), torch.multiprocessing.get_context("spawn")
    started = [
        context.Process(target=on_gpus.outlive, args=(rank, ranks, port, str(tmp_path))) for rank in range(ranks)
    ]
    for one in started:
        one.start()
    try:
        for one in started:
            one.join(90)
        assert [one.exitcode for one in started] == list(range(ranks))
    finally:
        for one in started:
            one.kill()
    assert "device-side assert" in (tmp_path / "met by 0").read_text()
    assert "a tensor-parallel rank has ended, or does not come" in (tmp_path / "said by 0").read_text()
