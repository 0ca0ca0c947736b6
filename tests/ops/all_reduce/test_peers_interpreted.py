"""Ranks that read each other's memory add as the reduction says, whoever is late."""

import multiprocessing
from pathlib import Path

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.all_reduce.ranks import add_messages, message
from vllm_batch_invariant.ops.all_reduce.cpu import add_ranks

SIZES = (1, 63, 64, 130, 512, 513, 1000, 2048, 2049, 3000)
"""Around blocks, the longest one-shot message and the longest of all, which are 512 and 2048 elements of 2 bytes."""
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.ops.all_reduce.ranks"])


def sums(
    folder: Path, ranks: int, messages: list[tuple[int, str]], fault: str | None = None, tree: bool = False
) -> list[list[torch.Tensor]]:
    """Of each rank, of each message."""
    arguments = [(rank, ranks, folder, messages, fault, tree) for rank in range(ranks)]
    started = [CONTEXT.Process(target=add_messages, args=of_rank, daemon=True) for of_rank in arguments]
    for one in started:
        one.start()
    for one in started:
        one.join(120)
    assert [one.exitcode for one in started] == [0] * ranks
    return [torch.load(folder / f"sums of {rank}") for rank in range(ranks)]


def expected(ranks: int, messages: list[tuple[int, str]], tree: bool = False) -> list[torch.Tensor]:
    return [
        add_ranks(torch.stack([message(call, rank, ranks, size, getattr(torch, dtype)) for rank in range(ranks)]), tree)
        for call, (size, dtype) in enumerate(messages)
    ]


@pytest.mark.parametrize(
    ("ranks", "dtypes"), [(2, ("bfloat16", "float32")), (4, ("float16",))], ids=["2 ranks", "4 ranks"]
)
def test_every_rank_has_the_sum_of_all_in_their_order(tmp_path: Path, ranks: int, dtypes: tuple[str, ...]) -> None:
    messages = [(size, dtype) for dtype in dtypes for size in SIZES]
    wanted = expected(ranks, messages)
    for rank, done in enumerate(sums(tmp_path, ranks, messages)):
        for (size, dtype), own, one in zip(messages, done, wanted, strict=True):
            assert_same_bits(own, one, f"{size} of {dtype} on rank {rank}")


@pytest.mark.parametrize(
    ("fault", "ranks"), [("no wait", 2), ("one half", 2), ("last rank first", 4), ("rounded each time", 4)]
)
def test_a_planted_fault_is_found(tmp_path: Path, fault: str, ranks: int) -> None:
    messages = [(size, "float32") for size in (200, 200, 600, 600)] * 2
    wanted = expected(ranks, messages)
    done = sums(tmp_path, ranks, messages, fault)
    assert any(not torch.equal(own, one) for rank in done for own, one in zip(rank, wanted, strict=True))


@pytest.mark.parametrize("fault", [None, "no tree"])
def test_as_a_tree_neighbours_are_added_and_rounded(tmp_path: Path, fault: str | None) -> None:
    messages = [(size, "float16") for size in (64, 130, 513, 3000)]  # one-shot and two-shot
    wanted = expected(4, messages, tree=True)
    for done in sums(tmp_path, 4, messages, fault, tree=True):
        for (size, _), own, one in zip(messages, done, wanted, strict=True):
            assert torch.equal(own, one) == (fault is None), size
