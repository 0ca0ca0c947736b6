"""Ranks that read each other's memory add as the reduction says, whoever is late."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.all_reduce.ranks import (
    COPIES,
    EPS,
    add_messages,
    added_and_normalised,
    made_by_experts,
    message,
    normalise_messages,
    rows,
)
from vllm_batch_invariant.ops.all_reduce import cuda
from vllm_batch_invariant.ops.all_reduce.cpu import add_ranks
from vllm_batch_invariant.ops.all_reduce.cuda import AllReduce
from vllm_batch_invariant.ops.all_reduce.peers import Peers

SIZES = (1, 63, 64, 130, 512, 513, 1000, 2048, 2049, 3000)
"""Around blocks, the longest one-shot message and the longest of all, which are 512 and 2048 elements of 2 bytes."""
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.ops.all_reduce.ranks"])


def start(target: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Runs a process for each rank."""
    started = [CONTEXT.Process(target=target, args=(rank, ranks, *arguments), daemon=True) for rank in range(ranks)]
    for one in started:
        one.start()
    for one in started:
        one.join(120)
    assert [one.exitcode for one in started] == [0] * ranks


def sums(
    folder: Path, ranks: int, messages: list[tuple[int, str]], fault: str | None = None, tree: bool = False
) -> list[list[torch.Tensor]]:
    """Of each rank, of each message."""
    start(add_messages, ranks, folder, messages, fault, tree)
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


ROWS = ((1, 1000), (2, 1000), (3, 1000), (8, 1000), (1, 100), (17, 100), (40, 128), (1, 4096))
"""Tokens and hidden sizes: one tile, several of a CTA, the last one not full, heads. All are one launch."""


def normalised(
    folder: Path,
    ranks: int,
    messages: list[tuple[int, int, str]],
    fault: str | None = None,
    tree: bool = False,
    given: str = "a partial result",
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Of each rank, of each message."""
    start(normalise_messages, ranks, folder, messages, fault, tree, given)
    return [torch.load(folder / f"rows of {rank}") for rank in range(ranks)]


def expected_rows(
    ranks: int, messages: list[tuple[int, int, str]], tree: bool = False, is_rounded: bool = True
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of a norm alone, of the sum."""
    found = []
    for call, (count, hidden, dtype) in enumerate(messages):
        *partials, residual = (rows(call, one, (count, hidden), getattr(torch, dtype)) for one in range(ranks + 1))
        found.append(added_and_normalised(torch.stack(partials), residual, tree, is_rounded))
    return found


def assert_same_rows(
    of_ranks: list[list[tuple[torch.Tensor, torch.Tensor]]],
    wanted: list[tuple[torch.Tensor, torch.Tensor]],
    messages: list[tuple[int, int, str]],
) -> None:
    """Every rank has those of every message."""
    for rank, done in enumerate(of_ranks):
        for message_, own, one in zip(messages, done, wanted, strict=True):
            for found, right in zip(own, one, strict=True):
                assert_same_bits(found, right, f"{message_} on rank {rank}")


@pytest.mark.parametrize(
    ("ranks", "tree", "dtype"),
    [
        (2, False, "bfloat16"),
        pytest.param(2, False, "float32", marks=pytest.mark.exhaustive),
        pytest.param(4, False, "float16", marks=pytest.mark.exhaustive),
        (4, True, "float16"),
    ],
)
def test_a_norm_behind_it_has_the_bits_of_a_norm_alone(tmp_path: Path, ranks: int, tree: bool, dtype: str) -> None:
    messages = [(*shape, dtype) for shape in ROWS]
    done = normalised(tmp_path, ranks, messages, tree=tree)
    assert_same_rows(done, expected_rows(ranks, messages, tree), messages)


def test_what_experts_have_made_is_added_first(tmp_path: Path) -> None:
    messages = [(*shape, "float16") for shape in ((1, 1000), (3, 1000), (17, 100), (8, 1000))]
    wanted, dtype = [], torch.float16
    for call, (*shape, _) in enumerate(messages):
        partials = [made_by_experts(call, one, shape, dtype).added() for one in range(2)]
        wanted.append(added_and_normalised(torch.stack(partials), rows(call, 2, shape, dtype)))
    assert_same_rows(normalised(tmp_path, 2, messages, given="what experts made"), wanted, messages)


@pytest.mark.parametrize("fault", ["no wait", "unrounded"])
def test_a_fault_before_a_norm_is_found(tmp_path: Path, fault: str) -> None:
    messages = [(*shape, "bfloat16") for shape in ROWS]
    done = normalised(tmp_path, 2, messages, fault)
    wanted, unrounded = (expected_rows(2, messages, is_rounded=is_rounded) for is_rounded in (True, False))
    assert not all(torch.equal(own[0], one[0]) for rank in done for own, one in zip(rank, wanted, strict=True))
    assert not all(torch.equal(own[0], one[0]) for own, one in zip(wanted, unrounded, strict=True))


SENT = ((1, 1000), (3, 1000), (8, 1000), (12, 1000), (13, 1000), (40, 100), (1, 4096), (9, 128))
"""Tokens and hidden sizes: one part, two, three, a last one that is shorter."""


@pytest.mark.parametrize(
    ("ranks", "tree", "dtype"), [(2, False, "bfloat16"), (4, False, "float32"), (4, True, "float16")]
)
def test_rows_that_are_sent_while_others_are_multiplied_have_the_bits_of_a_sum_and_a_norm(
    tmp_path: Path, ranks: int, tree: bool, dtype: str
) -> None:
    messages = [(*shape, dtype) for shape in SENT]
    done = normalised(tmp_path, ranks, messages, tree=tree, given="what was sent")
    assert_same_rows(done, expected_rows(ranks, messages, tree), messages)


@pytest.mark.parametrize("fault", ["no wait", "one half", "last rank first"])
def test_a_fault_in_what_is_sent_is_found(tmp_path: Path, fault: str) -> None:
    ranks = 4 if fault == "last rank first" else 2
    messages = [(*shape, "float32") for shape in 2 * SENT[3:]]
    wanted = expected_rows(ranks, messages)
    done = normalised(tmp_path, ranks, messages, fault, given="what was sent")
    assert not all(torch.equal(own[0], one[0]) for rank in done for own, one in zip(rank, wanted, strict=True))


def test_long_rows_are_sent_that_a_norm_has_in_a_tile_and_that_memory_was_allocated_for() -> None:
    allocated = []

    def allocate(size: int) -> Peers:
        allocated.append(size)
        memory = torch.zeros(1, dtype=torch.uint8)
        return Peers(0, [memory, memory], torch.zeros(2, dtype=torch.int64))

    add = AllReduce(2, allocate)
    del allocated[:]
    assert not add.sends(8192, 4096, torch.bfloat16), "nobody has said that there are any"
    assert not add.expect(8191 * 4096 * 2)
    assert not allocated, "none is long enough"
    assert add.expect(8192 * 5120 * 2)
    assert add.expect(8192 * 5120 * 2)
    assert allocated == [2 * 8192 * 5120 * 2 + 256]
    assert add.sends(8192, 4096, torch.bfloat16)
    assert not add.sends(8191, 4096, torch.bfloat16)
    assert not add.sends(8193, 5120, torch.bfloat16)
    assert not add.sends(2048, 16_385, torch.bfloat16)
    assert not add.sends(4096, 4096, torch.float64)
    of_four = AllReduce(4, allocate)
    assert not of_four.expect(8192 * 5120 * 2)
    assert not of_four.sends(8192, 5120, torch.bfloat16), "nobody has measured them"


def test_what_was_sent_is_added_once_and_to_a_residual_like_it() -> None:
    memories = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(2)]
    addresses = torch.tensor([one.data_ptr() for one in memories])
    add = AllReduce(2, lambda _: Peers(0, memories, addresses), copies=COPIES)
    add.expect(1 << 12)
    x = torch.randn(4, 64)
    first, second = (add.send(lambda rows: rows, x) for _ in range(2))
    for message_, residual in ((first, x), (second, x[:3]), (second, x.to(torch.bfloat16))):
        with pytest.raises(ValueError, match="are added once"):
            add.add_and_norm(message_, residual, x[0], EPS)


def test_what_one_launch_cannot_normalise_is_added_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """By shapes and dtypes, which are those of every rank."""
    memory, addresses = torch.zeros(1, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    add, calls = AllReduce(2, lambda size: Peers(0, [memory, memory], addresses)), []
    monkeypatch.setattr(cuda._Channel, "launch", lambda *_: calls.append("sum"))
    monkeypatch.setattr(cuda._Channel, "launch_with_norm", lambda *_: calls.append("sum and norm"))
    cases = {
        (1, 4096, "bfloat16"): "sum and norm",
        (512, 4096, "bfloat16"): "sum and norm",
        (513, 4096, "bfloat16"): "sum",
        (409, 5120, "bfloat16"): "sum and norm",
        (410, 5120, "bfloat16"): "sum",
        (1, 16_384, "bfloat16"): "sum and norm",
        (1, 16_385, "bfloat16"): "sum",
        (1, 16_384, "float32"): "sum",
        (64, 4096, "float32"): "sum and norm",
    }
    for (count, hidden, dtype), wanted in cases.items():
        calls.clear()
        x = torch.zeros(count, hidden, dtype=getattr(torch, dtype))
        add.add_and_norm(x, x, x[0], EPS)
        assert calls == [wanted], (count, hidden, dtype)
    calls.clear()
    add.add_and_norm(torch.zeros(0, 64), torch.zeros(0, 64), torch.zeros(64), EPS)
    assert not calls
    with pytest.raises(ValueError, match="a residual like x"):
        add.add_and_norm(torch.zeros(2, 64), torch.zeros(1, 64), torch.zeros(64), EPS)
