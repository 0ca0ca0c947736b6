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

from vllm_batch_invariant.ops.all_reduce import cuda, triton_kernels
from vllm_batch_invariant.ops.all_reduce.cuda import AllReduce, AllReduceSchedule, Peers

SCHEDULES = (
    AllReduceSchedule(two_shot=False, largest=1024, ctas=2, block=64),
    AllReduceSchedule(two_shot=True, largest=4096, ctas=3, block=64),
)


def message(call: int, rank: int, size: int, dtype: str) -> torch.Tensor:
    """What a rank adds; ranks nearly cancel, so that another order gives other bits."""
    made = torch.randn(size, generator=torch.Generator().manual_seed(100 * call + rank))
    return (made + (-1) ** rank * 3000).to(getattr(torch, dtype))


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
        return Peers(rank, mapped[rank], torch.tensor([one.data_ptr() for one in mapped]), mapped)

    return allocate


class _OneHalf:
    """The kernel, every message of which lies at the same place."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            triton_kernels.all_reduce_kernel[grid](*args, **named | {"CAPACITY": 0})

        return launch


def plant(fault: str | None, rank: int) -> None:
    """Put a fault into the kernel."""
    theirs = triton_kernels._add

    def own_rank_first(partials, offs, mask, *constexprs):
        return theirs((*partials[rank:], *partials[:rank]), offs, mask, *constexprs)

    def late(*args: Any) -> Any:
        time.sleep(0.05)
        return theirs(*args)

    if fault == "no wait":
        triton_kernels._wait = lambda *args: None
    elif fault == "own rank first":
        triton_kernels._add = own_rank_first
    elif fault == "one half":
        cuda.all_reduce_kernel = _OneHalf()
        if rank == 0:
            triton_kernels._add = late


def add_messages(rank: int, ranks: int, folder: Path, messages: list[tuple[int, str]], fault: str | None) -> None:
    """A rank's process: writes the sums, with a rank late now and then."""
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    timeout = timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=ranks, timeout=timeout)
    plant(fault, rank)
    schedules = SCHEDULES
    if fault == "one half":  # the interpreter runs one CTA after the other, each of which would wait for a late rank
        schedules = [replace(one, ctas=1) for one in SCHEDULES]
    add = AllReduce(ranks, through_files(folder, rank, ranks), schedules, timeout=0)
    chance, sums = random.Random(rank), []
    for call, (size, dtype) in enumerate(messages):
        if chance.random() < 0.3:
            time.sleep(0.01)
        sums.append(add(message(call, rank, size, dtype)))
    torch.save(sums, folder / f"sums of {rank}")
    torch.distributed.barrier()
