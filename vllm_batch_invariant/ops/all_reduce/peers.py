"""Memory of the GPUs of one host that all of them read and write."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from .reduction import AllReduceReduction

_ALIGNMENT = 256
"""Bytes."""


@dataclass(frozen=True)
class Peers:
    """Memory of every rank that all ranks read and write.

    Attributes:
        rank: this process's.
        memories: of every rank [bytes] uint8, as this process sees it.
        addresses: [ranks] int64 on the device, of ``memories``.
        handle: kept as long as the memory is used.
    """

    rank: int
    memories: Sequence[torch.Tensor]
    addresses: torch.Tensor
    handle: Any = None


def symmetric_peers(group: torch.distributed.ProcessGroup, device: torch.device) -> Callable[[int], Peers]:
    """Allocates, together with the other ranks of a group, memory of so many bytes; by PyTorch's symmetric memory,
    without multicast.

    Args:
        group: of processes with a GPU each, on one host.
        device: this process's GPU.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    def allocate(size: int) -> Peers:
        memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        memory.zero_()
        handle = symmetric_memory.rendezvous(memory, group.group_name)
        memories = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(handle.world_size)]
        addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)
        torch.distributed.barrier(group)  # no rank signals before every rank's flags are 0
        return Peers(handle.rank, memories, addresses, (memory, handle))

    return allocate


def aligned_bytes(size: int) -> int:
    """So many bytes or a few more, behind which memory is aligned."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def in_triton(accumulate: torch.dtype) -> tl.dtype:
    """The accumulator's dtype."""
    return tl.float64 if accumulate == torch.float64 else tl.float32


def launch_options(reduction: AllReduceReduction, timeout: int) -> dict[str, Any]:
    """Of any kernel that waits for other ranks.

    Args:
        timeout: nanoseconds; 0: for ever.
    """
    return {
        "RANKS": reduction.ranks,
        "TREE": reduction.tree,
        "ACCUMULATE": in_triton(reduction.accumulate),
        "TIMEOUT": timeout,
        "debug": True,  # its assertion is there, which ends a rank that waits for one that has ended
        "sanitize_overflow": False,
    }


def write_behind(memory: torch.Tensor, place: int, number: int) -> None:
    """Write 32 bits behind all that the current stream has written to that memory. A GPU's stream does it itself: a
    kernel might wait for a multiprocessor on which another one waits.

    Args:
        memory: [bytes] uint8, of any rank.
        place: of the number, in units of its size.
    """
    if memory.is_cuda:
        torch._C._distributed_c10d._SymmetricMemory.stream_write_value32(memory.view(torch.uint32), place, number)
    else:
        memory.view(torch.int32)[place] = number
