"""Ranks of an all-reduce, a process each, that add through memory they share, in Triton's interpreter."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import triton
import triton.language as tl

from tests import interpreted_calls
from vllm_batch_invariant.ops.all_reduce import cuda, triton_kernels
from vllm_batch_invariant.ops.all_reduce.copies import Copies, CopySchedule
from vllm_batch_invariant.ops.all_reduce.cuda import AllReduce, AllReduceSchedule
from vllm_batch_invariant.ops.all_reduce.peers import Peers
from vllm_batch_invariant.ops.moe.cuda import Products
from vllm_batch_invariant.ops.norm.cuda import rms_norm

SCHEDULES = (
    AllReduceSchedule(two_shot=False, largest=1024, ctas=2, block=64),
    AllReduceSchedule(two_shot=True, largest=4096, ctas=3, block=64),
)

ROWS_SCHEDULES = (AllReduceSchedule(two_shot=False, largest=1 << 15, ctas=2, block=64), SCHEDULES[1])
"""For rows that are normalised, of which a CTA has several tiles."""
COPIES = CopySchedule(smallest=0, largest=1 << 18, parts=3, step=4)
"""Of rows that are sent while others are multiplied."""
EPS = 1e-6


def message(call: int, rank: int, ranks: int, size: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """What a rank adds, [size]. The first and the last rank's nearly cancel, so that another order gives other bits."""
    generator = torch.Generator(device).manual_seed(100 * call + rank)
    large = 30_000 if dtype == torch.float16 else 2.0**24
    sign = {0: 1, ranks - 1: -1}.get(rank, 0)
    return (torch.randn(size, generator=generator, device=device) + sign * large).to(dtype)


def rows(call: int, rank: int, shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Rows of random numbers that a rank adds, or of one rank more the residual."""
    generator = torch.Generator(device).manual_seed(100 * call + rank)
    return ((1 + 3 * rank) * torch.randn(shape, generator=generator, device=device)).to(dtype)


def weight(hidden: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """[hidden], of a norm."""
    return rows(0, 0, (1, hidden), dtype, device)[0]


def made_by_experts(call: int, rank: int, shape: tuple[int, int], dtype: torch.dtype, device: str = "cpu") -> Products:
    """What a rank's experts have made of tokens: of three an expert is on another rank now and then."""
    generator = torch.Generator(device).manual_seed(100 * call + rank)
    count, hidden = shape
    made = torch.randn(3 * count, hidden, generator=generator, device=device).to(dtype)
    weights = torch.rand(count, 3, generator=generator, device=device)
    ids = torch.randint(0, 8, (count, 3), generator=generator, device=device)
    return Products(made, weights, ids, torch.tensor([0, -1, 1, 2, 3, -1, 4, 5], device=device))


def added_and_normalised(
    partials: torch.Tensor, residual: torch.Tensor, tree: bool = False, is_rounded: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results, [ranks, M, N], added, and normalised with a residual: a kernel each. (The interpreter cuts off
    what PyTorch rounds to bf16.)

    Args:
        is_rounded: whether the sum is rounded before the residual is added, as it is.
    """
    norms_weight = weight(residual.shape[-1], residual.dtype, str(residual.device))
    if is_rounded:
        return rms_norm(cuda.add_ranks(partials, tree), norms_weight, EPS, residual, None)
    x, x_and_residual = rms_norm(partials.float().sum(0), norms_weight, EPS, residual.float(), None)
    return x.to(residual.dtype), x_and_residual.to(residual.dtype)


def through_files(folder: Path, rank: int, ranks: int) -> Callable[[int], Peers]:
    """Allocates memory that all processes map from files."""
    allocated = 0

    def allocate(size: int) -> Peers:
        nonlocal allocated
        paths = [folder / f"{allocated} of {one}" for one in range(ranks)]
        allocated += 1
        paths[rank].write_bytes(bytes(size))
        torch.distributed.barrier()
        mapped = [torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8) for path in paths]
        return Peers(rank, mapped, torch.tensor([one.data_ptr() for one in mapped]))

    return allocate


@triton.jit
def _no_wait(own_flags_ptr, rank, epoch, RANKS: tl.constexpr, TIMEOUT: tl.constexpr):  # noqa: N803
    pass


@triton.jit
def _last_rank_first(partials, offs, mask, RANKS: tl.constexpr, ACCUMULATE: tl.constexpr, TREE: tl.constexpr):  # noqa: N803
    acc = tl.load(partials[RANKS - 1] + offs, mask=mask, other=0.0).to(ACCUMULATE)
    for peer in tl.static_range(1, RANKS):
        acc += tl.load(partials[RANKS - 1 - peer] + offs, mask=mask, other=0.0).to(ACCUMULATE)
    return acc.to(partials[0].dtype.element_ty)


@triton.jit
def _unrounded(partials, offs, mask, RANKS: tl.constexpr, ACCUMULATE: tl.constexpr, TREE: tl.constexpr):  # noqa: N803
    acc = tl.load(partials[0] + offs, mask=mask, other=0.0).to(ACCUMULATE)
    for peer in tl.static_range(1, RANKS):
        acc += tl.load(partials[peer] + offs, mask=mask, other=0.0).to(ACCUMULATE)
    return acc


class _Kernel:
    """The kernel, with other arguments."""

    def __init__(self, **others: Any) -> None:
        self.others = others

    def run(self, *args: object, **named: Any) -> None:
        triton_kernels.all_reduce_kernel.run(*args, **named | self.others)


def plant(fault: str | None) -> None:
    """Put a fault into the kernel: what it calls, or its arguments."""
    if fault == "no wait":
        triton_kernels._wait = _no_wait
    elif fault == "last rank first":
        triton_kernels._add = _last_rank_first
    elif fault == "unrounded":
        triton_kernels._add = _unrounded
    elif fault == "rounded each time":
        cuda.all_reduce_kernel = _Kernel(ACCUMULATE=tl.float16)
    elif fault == "no tree":
        cuda.all_reduce_kernel = _Kernel(TREE=False)
    elif fault == "one half":
        cuda.all_reduce_kernel = _Kernel(HALF_BYTES=0)
        theirs = Copies._start
        Copies._start = lambda self, inbox: theirs(self, inbox) % (self.size * (self._ranks - 1))


def be_late_to_read() -> None:
    """In the interpreter: this rank reads when the others are done."""
    theirs = triton_kernels._add

    def late(*args: Any) -> Any:
        time.sleep(0.05)
        return theirs(*args)

    triton_kernels._add = late


def join(rank: int, ranks: int, folder: Path) -> None:
    """Makes a process a rank."""
    torch.set_num_threads(1)
    interpreted_calls.install()
    store = f"file://{folder / 'store'}"
    timeout = timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=ranks, timeout=timeout)


def normalise_messages(
    rank: int,
    ranks: int,
    folder: Path,
    messages: list[tuple[int, int, str]],
    fault: str | None,
    tree: bool,
    given: str,
) -> None:
    """A rank's process: writes the normalised rows and the sums with the residual, with a rank late now and then.

    Args:
        given: to the norm: "a partial result", "what experts made" or "what was sent", of which rows are sent while
            others are multiplied.
    """
    join(rank, ranks, folder)
    plant(fault)
    if fault == "one half" and rank == 0:
        be_late_to_read()
    add = AllReduce(ranks, through_files(folder, rank, ranks), ROWS_SCHEDULES, timeout=0, tree=tree, copies=COPIES)
    add.expect(COPIES.largest)
    chance, found = random.Random(rank), []

    def late(x: torch.Tensor) -> torch.Tensor:
        if chance.random() < 0.3:
            time.sleep(0.1)
        return x.clone()

    for call, (count, hidden, name) in enumerate(messages):
        dtype = getattr(torch, name)
        partial, residual = (rows(call, one, (count, hidden), dtype) for one in (rank, ranks))
        if given == "what was sent":
            assert add.sends(count, hidden, dtype)
            summand = add.send(late, partial)
        else:
            summand = late(partial)
            if given == "what experts made":
                summand = made_by_experts(call, rank, (count, hidden), dtype)
        found.append(add.add_and_norm(summand, residual, weight(hidden, dtype), EPS))
        if given != "what was sent":  # no rank would be late behind it
            add(partial[:1])  # in the same memory
    torch.save(found, folder / f"rows of {rank}")
    torch.distributed.barrier()


def add_messages(
    rank: int, ranks: int, folder: Path, messages: list[tuple[int, str]], fault: str | None, tree: bool
) -> None:
    """A rank's process: writes the sums, with a rank late now and then."""
    join(rank, ranks, folder)
    plant(fault)
    schedules = SCHEDULES
    if fault == "one half":  # the interpreter runs one CTA after the other, each of which would wait for a late rank
        schedules = [replace(one, ctas=1) for one in SCHEDULES]
        if rank == 0:
            be_late_to_read()
    add = AllReduce(ranks, through_files(folder, rank, ranks), schedules, timeout=0, tree=tree)
    chance, sums = random.Random(rank), []
    for call, (size, dtype) in enumerate(messages):
        if chance.random() < 0.3:
            time.sleep(0.01)
        sums.append(add(message(call, rank, ranks, size, getattr(torch, dtype))))
    torch.save(sums, folder / f"sums of {rank}")
    torch.distributed.barrier()
