"""Ranks of an all-reduce, a process and a GPU each: what they find is written to a file."""

import functools
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed

from tests.ops.all_reduce.ranks import EPS, made_by_experts, message, plant, rows, weight
from vllm_batch_invariant.ops.all_reduce import add_ranks
from vllm_batch_invariant.ops.all_reduce.copies import CopySchedule
from vllm_batch_invariant.ops.all_reduce.cuda import SCHEDULES, TIMEOUT, AllReduce
from vllm_batch_invariant.ops.all_reduce.peers import symmetric_peers
from vllm_batch_invariant.ops.common.dependent_launch import LaunchSchedule
from vllm_batch_invariant.ops.linear import LinearReduction, linear
from vllm_batch_invariant.ops.linear.schedule import NARROW_TILES
from vllm_batch_invariant.ops.linear.triton_gemm import gemm_sm90_swap_ab
from vllm_batch_invariant.ops.norm import rms_norm

HIDDEN = 4096
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOKENS, HIDDEN_SIZES = (1, 2, 3, 64, 65, 128), (896, 4096, 5120)
_ROUNDS, _REPLAYS, _DELAY_CYCLES = 200, 500, 200_000
_PATIENCE = 15 * 10**9
"""Nanoseconds; more than one rank compiles longer than another."""


class Rank:
    """One process."""

    def __init__(self, rank: int, ranks: int, port: int) -> None:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "NCCL_NVLS_ENABLE": "0",
        }
        torch.cuda.set_device(rank)
        self.rank, self.ranks, self.device = rank, ranks, torch.device("cuda", rank)
        torch.distributed.init_process_group("nccl", rank=rank, world_size=ranks, device_id=self.device)
        self.group = torch.distributed.group.WORLD
        self.late = random.Random(f"late {rank}")

    def all_reduce(self, tree: bool = False, timeout: int = TIMEOUT, copies: CopySchedule | None = None) -> AllReduce:
        allocate = symmetric_peers(self.group, self.device)
        return AllReduce(self.ranks, allocate, timeout=timeout, tree=tree, copies=copies)

    def partial(self, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """This rank's."""
        return message(number, self.rank, self.ranks, size, dtype, str(self.device))

    def expected(self, partial: torch.Tensor, tree: bool = False) -> torch.Tensor:
        """The ranks in their order, one after the other or as a tree, of what NCCL brings from each: on the CPU, whose
        tests hold it against float64.
        """
        gathered = [torch.empty_like(partial) for _ in range(self.ranks)]
        torch.distributed.all_gather(gathered, partial)
        return add_ranks(torch.stack([one.cpu() for one in gathered]), tree).to(partial.device)

    def be_late(self) -> None:
        """Now and then this rank's GPU waits."""
        if self.late.random() < 0.3:
            torch.cuda._sleep(self.late.randrange(_DELAY_CYCLES))


def sizes(ranks: int) -> Iterator[int]:
    """Elements of 2 bytes, around every border, and of 1 to 8192 tokens."""
    yield from (1, 7, 8, 2047, 2048, 2049, 100_003)
    for schedule in SCHEDULES[ranks]:
        for size in (schedule.largest // 2, schedule.largest // 2 + 1):
            yield from (size - 8, size)
    yield from (tokens * HIDDEN for tokens in (1, 2, 3, 8, 17, 64, 100, 257, 1000, 8192))


def sums_of_every_size(rank: Rank, tree: bool = False) -> list[str]:
    """Every size and dtype, with ranks that are late."""
    add, problems = rank.all_reduce(tree), []
    for number, (size, dtype) in enumerate((size, dtype) for size in sizes(rank.ranks) for dtype in DTYPES):
        partial = rank.partial(number, size, dtype)
        wanted = rank.expected(partial, tree)
        for _ in range(3):
            rank.be_late()
            if not torch.equal(add(partial), wanted):
                problems.append(f"{size} of {dtype}")
    return problems


def trees_of_every_size(rank: Rank) -> list[str]:
    """The same, added as trees."""
    return sums_of_every_size(rank, tree=True)


def rows_of(rank: Rank, number: int, tokens: int, hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """This rank's partial result, and the residual and the weight that all ranks have."""
    made = [rows(number, one, (tokens, hidden), dtype, str(rank.device)) for one in (rank.rank, rank.ranks)]
    return [*made, weight(hidden, dtype, str(rank.device))]


def is_norm_of(
    found: tuple[torch.Tensor, ...], summed: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor
) -> bool:
    """Whether rows and sums with the residual are those of a norm alone."""
    return all(map(torch.equal, found, rms_norm(summed, scale, EPS, residual)))


def norms_of_every_size(rank: Rank, tree: bool = False) -> list[str]:
    """Sums and norms as one operation, with ranks that are late and sums alone between them; and that most were one
    launch.
    """
    add, problems, fused = rank.all_reduce(tree), [], []
    launch = add._channels[0].launch_with_norm
    add._channels[0].launch_with_norm = lambda *given: fused.append(given) or launch(*given)
    for number, (tokens, hidden, dtype) in enumerate(itertools.product(TOKENS, HIDDEN_SIZES, DTYPES)):
        partial, residual, scale = rows_of(rank, number, tokens, hidden, dtype)
        wanted = rank.expected(partial, tree)
        for _ in range(3):
            rank.be_late()
            if not is_norm_of(add.add_and_norm(partial, residual, scale, EPS), wanted, residual, scale):
                problems.append(f"{tokens} x {hidden} of {dtype}")
            rank.be_late()
            if not torch.equal(add(partial), wanted):
                problems.append(f"the sum behind {tokens} x {hidden} of {dtype}")
        experts = [made_by_experts(number, one, (tokens, hidden), dtype, str(rank.device)) for one in range(rank.ranks)]
        wanted = add_ranks(torch.stack([one.added().cpu() for one in experts]), tree).to(rank.device)
        rank.be_late()
        if not is_norm_of(add.add_and_norm(experts[rank.rank], residual, scale, EPS), wanted, residual, scale):
            problems.append(f"{tokens} x {hidden} of {dtype}, of experts")
    if len(fused) < 3 * 9 * 3:  # every dtype and hidden size at 1, 2 and 3 tokens
        problems.append(f"{len(fused)} were one launch")
    return problems


def norms_of_trees(rank: Rank) -> list[str]:
    """The same, added as trees."""
    return norms_of_every_size(rank, tree=True)


def rows_that_are_sent(rank: Rank, tree: bool = False) -> list[str]:
    """Products whose rows are sent while others are multiplied, in one part to four, back to back, with ranks that are
    late; and sums between them.
    """
    problems = []
    for parts in (1, 2, 4):
        add = rank.all_reduce(tree, copies=CopySchedule(0, parts=parts, step=64))
        add.expect(2 * 3000 * max(HIDDEN_SIZES))
        for number, (tokens, hidden) in enumerate(itertools.product((1, 129, 3000), HIDDEN_SIZES)):
            weights, residual, scale = rows_of(rank, number, tokens, hidden, torch.bfloat16)
            matrix, found = rows(number, rank.rank, (hidden, 512), torch.bfloat16, str(rank.device)), []
            xs = [rows(number + one, rank.rank, (tokens, 512), torch.bfloat16, str(rank.device)) for one in range(3)]
            for x in xs:
                rank.be_late()
                sent = add.send(functools.partial(linear, weight=matrix), x)
                rank.be_late()
                found.append(add.add_and_norm(sent, residual, scale, EPS))
                add(weights[:1])
            for x, one in zip(xs, found, strict=True):
                if not is_norm_of(one, rank.expected(linear(x, matrix), tree), residual, scale):
                    problems.append(f"{tokens} x {hidden} in {parts} parts")
    return problems


def rows_of_trees_that_are_sent(rank: Rank) -> list[str]:
    """The same, added as trees."""
    return rows_that_are_sent(rank, tree=True)


def replays_of_norms(rank: Rank) -> list[str]:
    """A graph of layers that take turns, of a message that is one launch and one that is not."""
    add, problems = rank.all_reduce(), []
    for tokens in (1, 65, 300):
        given = [rows_of(rank, number, tokens, HIDDEN, torch.bfloat16) for number in range(5)]
        add.add_and_norm(*given[0], EPS)
        torch.cuda.synchronize()
        torch.distributed.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [(add.add_and_norm(*one, EPS), add(one[0])) for one in given]
        for number in range(1, _REPLAYS // 20):
            for i, (partial, residual, _) in enumerate(given):
                new = rows_of(rank, 100 * number + i, tokens, HIDDEN, torch.bfloat16)
                partial.copy_(new[0])
                residual.copy_(new[1])
            for _ in range(20):
                rank.be_late()
                graph.replay()
            for (partial, residual, scale), (found, summed) in zip(given, outputs, strict=True):
                wanted = rank.expected(partial)
                if not (torch.equal(summed, wanted) and is_norm_of(found, wanted, residual, scale)):
                    problems.append(f"replay {number} of {tokens} tokens")
    return problems


def replays_of_layers(rank: Rank) -> list[str]:
    """A graph of matmuls behind sums and norms, on a Hopper: each begins while the kernel before ends, whose result is
    that of kernels that wait.
    """
    add, problems = rank.all_reduce(), []
    hidden, tile = 2048, NARROW_TILES[0]
    reduction = LinearReduction.of_device("cuda", hidden, hidden, torch.bfloat16)
    made = [rows(layer, rank.rank, (hidden, hidden), torch.bfloat16, str(rank.device)) for layer in range(8)]
    scale = weight(hidden, torch.bfloat16, str(rank.device))

    def layers(x: torch.Tensor, overlaps: bool) -> list[torch.Tensor]:
        found, residual = [], x
        for matrix in made:
            partial = gemm_sm90_swap_ab(x, matrix.t(), None, torch.empty_like(x), reduction, tile, overlaps)
            x, residual = add.add_and_norm(partial, residual, scale, EPS)
            found += [partial, x, residual]
        return found

    for tokens in (1, 8, 64):
        x = rows(9, 0, (tokens, hidden), torch.bfloat16, str(rank.device))
        with patch.object(LaunchSchedule, "of", classmethod(lambda cls, _: cls(False))):
            right = layers(x, overlaps=False)
        layers(x, overlaps=True)
        torch.cuda.synchronize()
        torch.distributed.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layers(x, overlaps=True)
        for number in range(_REPLAYS // 5):
            for one in captured:
                one.fill_(torch.nan)
            rank.be_late()
            graph.replay()
            if not all(map(torch.equal, captured, right)):
                problems.append(f"replay {number} of {tokens} tokens")
    return problems


def rounds_of_several_sizes(rank: Rank) -> list[str]:
    """Many calls back to back, whose sums are looked at afterwards."""
    add, chance, problems = rank.all_reduce(), random.Random(0), []
    choices = [(number, chance.choice([64, HIDDEN, 3 * HIDDEN, 300 * HIDDEN])) for number in range(20)]
    partials = {choice: rank.partial(*choice, torch.bfloat16) for choice in choices}
    wanted = {choice: rank.expected(partial) for choice, partial in partials.items()}
    for _ in range(_ROUNDS // 20):
        order = chance.sample(choices, 20)
        found = []
        for choice in order:
            rank.be_late()
            found.append(add(partials[choice]))
        problems += [
            str(choice) for choice, one in zip(order, found, strict=True) if not torch.equal(one, wanted[choice])
        ]
    return problems


def replays_of_graphs(rank: Rank) -> list[str]:
    """Two graphs, replayed in turn with other values, and calls between them."""
    add, problems = rank.all_reduce(), []
    graphs = []
    for tokens in (1, 200):
        inputs = [torch.zeros(tokens * HIDDEN, dtype=torch.bfloat16, device=rank.device) for _ in range(5)]
        add(inputs[0])
        torch.cuda.synchronize()
        torch.distributed.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [add(one) for one in inputs]
        graphs.append((graph, inputs, outputs))
    between = rank.partial(7, HIDDEN, torch.bfloat16)
    wanted_between = rank.expected(between)
    for number in range(_REPLAYS // 20):
        for graph, inputs, outputs in graphs:
            values = [rank.partial(100 * number + i, one.numel(), one.dtype) for i, one in enumerate(inputs)]
            wanted = [rank.expected(one) for one in values]
            for one, value in zip(inputs, values, strict=True):
                one.copy_(value)
            for _ in range(20):
                rank.be_late()
                graph.replay()
            if not all(torch.equal(one, other) for one, other in zip(outputs, wanted, strict=True)):
                problems.append(f"replay {number}")
        if not torch.equal(add(between), wanted_between):
            problems.append(f"between replays {number}")
    return problems


def sums_by_nccl(rank: Rank) -> list[str]:
    """What NCCL gives a token among others, the stock path of long messages."""
    rows = torch.stack([rank.partial(row, HIDDEN, torch.bfloat16) for row in range(4096)])
    whole = rows.clone()
    torch.distributed.all_reduce(whole)
    problems = []
    for count in (1, 16, 64, 1024):
        part = rows[:count].clone()
        torch.distributed.all_reduce(part)
        if not torch.equal(part, whole[:count]):
            problems.append(f"{count} rows")
    return problems


def outlive(rank: int, ranks: int, port: int, folder: str) -> None:
    """A rank's process, of which the last ends after the first sum; what the others then meet is written to a file."""
    process = Rank(rank, ranks, port)
    add = process.all_reduce(timeout=_PATIENCE)
    partial = torch.ones(HIDDEN, dtype=torch.bfloat16, device=process.device)
    add(partial)
    torch.cuda.synchronize()
    torch.distributed.barrier()
    if rank < ranks - 1:
        os.dup2(os.open(Path(folder, f"said by {rank}"), os.O_WRONLY | os.O_CREAT), 2)
        try:
            add(partial)
            torch.cuda.synchronize()
        except RuntimeError as error:
            Path(folder, f"met by {rank}").write_text(str(error))
    os._exit(rank)  # nothing of a GPU that has met an assertion can be freed


def run(rank: int, ranks: int, port: int, check: Callable[[Rank], list[str]], fault: str | None, folder: str) -> None:
    """A rank's process."""
    torch.cuda.set_device(rank)
    process = Rank(rank, ranks, port)
    plant(fault)
    found: Any = check(process)
    torch.cuda.synchronize()
    Path(folder, f"found by {rank}").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
