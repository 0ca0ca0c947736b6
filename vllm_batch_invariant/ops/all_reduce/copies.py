"""The sum over ranks of long messages, which copy engines bring to other GPUs while the matmul runs that makes them.

A rank multiplies some of the rows, and they are on their way while it multiplies the next: rows have the same bits in
any batch. Copies take no multiprocessor from the matmul, as a kernel that sends would. A stream of their own orders
them, and writes behind each part that it is there. A norm waits for the others' rows, adds, and normalises, in one
launch for each part.

A message lies in one of two halves of the memory, in turn, as in :mod:`.triton_kernels`: when a rank's copies reach a
half again, every rank has multiplied rows of the message between, and so has added those of the one before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..common.launch import launch, on_device_of
from ..common.triton_rows import aligned
from ..norm.cuda import DTYPES
from ..norm.reduction import NormReduction
from .peers import Peers, aligned_bytes, launch_options, write_behind
from .reduction import AllReduceReduction
from .triton_kernels import add_copies_norm_kernel

_EPOCHS = 1 << 32
"""Messages are counted in 32 bits."""


@dataclass(frozen=True)
class CopySchedule:
    """How long messages are sent: speed only.

    Attributes:
        smallest: bytes of a message; shorter ones keep the CPU, which launches each part, busier than the GPU.
        largest: bytes of a message; twice as many are allocated for each other rank.
        parts: that rows are sent in.
        step: rows of which all parts but the last have a multiple: whole tiles of a matmul.
    """

    smallest: int = 1 << 26
    largest: int = 1 << 28
    parts: int = 2
    step: int = 256

    def fitted(self, size: int) -> int:
        """Bytes that a message of so many, or else the longest, is given."""
        return aligned_bytes(min(size, self.largest))


COPY_SCHEDULES = {2: CopySchedule()}
"""By the number of ranks. Of more, where each would be sent all rows of all others, nothing has been measured."""


@dataclass(frozen=True)
class SentRows:
    """A rank's partial result, whose rows the other ranks are being given.

    Attributes:
        parts: of it, [rows, N] each.
        copied: of each part, the event behind its copies.
        number: of the message, from 1 on.
    """

    parts: tuple[torch.Tensor, ...]
    copied: tuple[Any, ...]
    number: int

    @property
    def shape(self) -> torch.Size:
        """Of all rows."""
        return torch.Size((sum(map(len, self.parts)), self.parts[0].shape[1]))


class Copies:
    """The memory and the stream of such messages. All ranks call it alike, on one stream.

    Args:
        schedule: of the messages.
        ranks: that there are.
        size: bytes of the longest message.
        allocate: of :func:`.peers.symmetric_peers`, called once.
    """

    def __init__(self, schedule: CopySchedule, ranks: int, size: int, allocate: Callable[[int], Peers]) -> None:
        self.size = schedule.fitted(size)
        self._schedule, self._ranks, self._number = schedule, ranks, 0
        self._flag_bytes = aligned_bytes(schedule.parts * ranks * 4)
        self._peers = allocate(self._flag_bytes + 2 * (ranks - 1) * self.size)
        self._streams = torch.get_device_module(self._peers.addresses.device)
        with on_device_of(self._peers.addresses):
            self._stream = self._streams.Stream(priority=-1)

    def hold(self, rows: int, length: int, dtype: torch.dtype) -> bool:
        """Whether a message [rows, length] is sent this way: it is long, and a norm has its rows in a tile. In a CUDA
        graph none is, for which the numbers of messages would be constants.
        """
        size = rows * length * dtype.itemsize
        if not self._schedule.smallest <= size <= self.size or dtype not in DTYPES:
            return False
        captures = self._peers.addresses.is_cuda and torch.cuda.is_current_stream_capturing()
        return not captures and length <= NormReduction.of_device("cuda", length, dtype).block

    def send(self, multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> SentRows:
        """Multiply rows, and send what that gives.

        Args:
            multiply: [rows, K] -> [rows, N], this rank's partial result of some rows.
            x: [M, K]
        """
        self._number += 1
        step = self._schedule.step
        rows = -(-len(x) // (self._schedule.parts * step)) * step
        parts, copied, place = [], [], 0
        for number, some in enumerate(x.split(rows)):
            part = multiply(some).contiguous()
            parts.append(part)
            self._stream.wait_stream(self._streams.current_stream())
            with self._streams.stream(self._stream):
                self._copy(part, place, number)
                copied.append(self._stream.record_event())
            place += part.numel() * part.itemsize
        return SentRows(tuple(parts), tuple(copied), self._number)

    def _copy(self, part: torch.Tensor, place: int, number: int) -> None:
        """Give the other ranks a part that lies so many bytes behind the first."""
        rank, numbers = self._peers.rank, part.view(torch.uint8).view(-1)
        for peer, memory in enumerate(self._peers.memories):
            if peer != rank:
                start = self._start(rank - (rank > peer)) + place
                memory[start : start + len(numbers)].copy_(numbers, non_blocking=True)
                write_behind(memory[: self._flag_bytes], number * self._ranks + rank, self._number % _EPOCHS)

    def _start(self, inbox: int) -> int:
        """Bytes to the inbox of that number in the current half: a rank has one for each other, in their order."""
        return self._flag_bytes + ((self._number & 1) * (self._ranks - 1) + inbox) * self.size

    def add_and_norm(
        self,
        sent: SentRows,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        reduction: AllReduceReduction,
        timeout: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`.cuda.AllReduce.add_and_norm`, of the message that was sent last.

        Raises:
            ValueError: shapes or dtypes that do not fit, or another message.
        """
        dtype, length = sent.parts[0].dtype, sent.shape[1]
        fits = residual.shape == sent.shape and residual.dtype == dtype and weight.shape == (length,)
        if not fits or sent.number != self._number:
            raise ValueError("rows that were sent are added once, to a residual like them")
        norm, residual, weight = NormReduction.of_device("cuda", length, dtype), aligned(residual), aligned(weight)
        out, residual_out = torch.empty_like(residual), torch.empty_like(residual)
        row = 0
        for number, (part, copied) in enumerate(zip(sent.parts, sent.copied, strict=True)):
            # The others' copies come when this rank's go: programs that wait long slow them down.
            self._streams.current_stream().wait_event(copied)
            own = slice(row, row + len(part))
            launch(
                add_copies_norm_kernel,
                -(-len(part) // norm.rows_per_program),
                (
                    part,
                    residual[own],
                    weight,
                    out[own],
                    residual_out[own],
                    self._peers.addresses,
                    self._peers.rank,
                    number,
                    (self._number + _EPOCHS // 2) % _EPOCHS - _EPOCHS // 2,
                    self._start(0) + row * length * dtype.itemsize,
                    self.size,
                    len(part),
                    length // norm.stride_unit,
                    eps,
                ),
                on=residual,
                **norm.options,
                **launch_options(reduction, timeout),
            )
            row += len(part)
        return out, residual_out
