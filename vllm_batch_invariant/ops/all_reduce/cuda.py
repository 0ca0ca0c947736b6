"""The sum over ranks on NVIDIA GPUs of one host: which kernel adds a message, and through which memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..common.launch import launch, on_device_of
from ..common.triton_rows import aligned
from ..moe.cuda import Products
from ..norm import rms_norm
from ..norm.cuda import DTYPES as NORM_DTYPES
from ..norm.reduction import NormReduction
from .copies import COPY_SCHEDULES, Copies, CopySchedule, SentRows
from .peers import Peers, aligned_bytes, in_triton, launch_options
from .reduction import AllReduceReduction
from .triton_kernels import add_ranks_kernel, all_reduce_kernel, all_reduce_norm_kernel

TIMEOUT = 600 * 10**9
"""Nanoseconds that a rank waits for another, which may be compiling, before it ends with an error. vLLM's executor ends
its workers within seconds when one has ended, and gives up on a step after 300 s
(``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS``).
"""
_UNIT_BYTES = 16
_BLOCK, _NUM_WARPS = 1024, 4
"""Elements that a CTA adds of partial results that lie on one GPU."""
_ITEM_SIZES = (2, 4, 8)
"""Bytes of the elements of a message."""
_ROW_BYTES = 1 << 14
"""By which a region of a one-shot message is larger than the blocks of a CTA: rows that are normalised stay whole."""


@dataclass(frozen=True)
class AllReduceSchedule:
    """How messages are added: speed only.

    Attributes:
        two_shot: whether each rank adds the blocks that it owns, and the others get their sums; else each adds all.
        largest: bytes of a message. A longer one is added in parts by the last schedule.
        ctas: the most of each rank. All must run at the same time.
        block: elements that a CTA reads of a rank at once.
        num_warps: of a CTA.
    """

    two_shot: bool
    largest: int
    ctas: int
    block: int = 2048
    num_warps: int = 8

    def owners(self, ranks: int) -> int:
        """Ranks that share the blocks of a message."""
        return ranks if self.two_shot else 1

    def region_bytes(self, ranks: int) -> int:
        """What a rank writes for one CTA of another, at most, whatever the dtype."""
        of_block = [itemsize * self.block for itemsize in _ITEM_SIZES]
        blocks = max(size * -(-self.largest // (size * self.owners(ranks) * self.ctas)) for size in of_block)
        return blocks if self.two_shot else blocks + _ROW_BYTES


_TWO_SHOT = AllReduceSchedule(True, 1 << 24, 128, 4096, 16)
SCHEDULES = {
    2: (AllReduceSchedule(False, 1 << 22, 128), _TWO_SHOT),
    4: (
        AllReduceSchedule(False, 1 << 19, 128),
        AllReduceSchedule(True, 1 << 24, 128),
        AllReduceSchedule(True, 1 << 26, 128, 4096, 16),
    ),
    8: (AllReduceSchedule(False, 1 << 18, 64), _TWO_SHOT),
}
"""By the number of ranks; the first whose messages are long enough serves. Of two ranks each sends a whole message by
one shot as by two. Those of 8 have not been measured.
"""


def add_ranks(partials: torch.Tensor, tree: bool = False, out: torch.Tensor | None = None) -> torch.Tensor:
    """See the operation's package.

    Args:
        partials: [ranks, ...]
        tree: whether it is one.
        out: [...] of their dtype, packed and aligned, to be written instead of a new tensor.
    """
    reduction = AllReduceReduction.of_ranks(len(partials), partials.dtype, tree)
    partials = aligned(partials)
    out = torch.empty_like(partials[0]) if out is None else out
    if out.numel() == 0:
        return out
    unit = _unit(out)
    launch(
        add_ranks_kernel,
        -(-out.numel() // _BLOCK),
        (partials, out, out.numel() // unit),
        on=partials,
        UNIT=unit,
        RANKS=reduction.ranks,
        TREE=reduction.tree,
        BLOCK=_BLOCK,
        ACCUMULATE=in_triton(reduction.accumulate),
        num_warps=_NUM_WARPS,
    )
    return out


def _unit(message: torch.Tensor) -> int:
    """Elements of a message that are loaded at once."""
    unit = _UNIT_BYTES // message.itemsize
    return unit if message.numel() % unit == 0 else 1


class AllReduce:
    """Adds what the ranks of a group have computed. All ranks call it alike, on one stream or in the order of streams;
    a call may be captured in a CUDA graph, which keeps this object's memory in use.

    Args:
        ranks: of the group: 2, 4 or 8.
        allocate: of :func:`.peers.symmetric_peers`, called once for each schedule, and once by :meth:`expect`.
        schedules: in ascending order of ``largest``; by default those of :data:`SCHEDULES`.
        copies: of rows that are sent while others are multiplied; by default of :data:`.copies.COPY_SCHEDULES`.
        timeout: nanoseconds that a rank waits for another; 0: for ever.
        tree: whether partial results are added as a tree.
    """

    def __init__(
        self,
        ranks: int,
        allocate: Callable[[int], Peers],
        schedules: Sequence[AllReduceSchedule] | None = None,
        timeout: int = TIMEOUT,
        tree: bool = False,
        copies: CopySchedule | None = None,
    ) -> None:
        self._ranks, self._timeout, self._tree, self._allocate = ranks, timeout, tree, allocate
        self._copy_schedule, self._copies = copies or COPY_SCHEDULES.get(ranks), None
        self._channels = [_Channel(schedule, ranks, allocate) for schedule in schedules or SCHEDULES[ranks]]

    def __call__(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, as :func:`.add_ranks` defines it.

        Args:
            partial: [...] fp32, bf16, fp16 or fp64, this rank's; the same shape and dtype on every rank.

        Returns:
            a new tensor of that shape and dtype; on every rank the same bits.

        Raises:
            NotCovered: another dtype.
        """
        reduction = AllReduceReduction.of_ranks(self._ranks, partial.dtype, self._tree)
        partial = aligned(partial)
        out = torch.empty_like(partial)
        size = partial.numel() * partial.itemsize
        channel = next((one for one in self._channels if size <= one.schedule.largest), self._channels[-1])
        longest = channel.schedule.largest // partial.itemsize
        parts = zip(partial.view(-1).split(longest), out.view(-1).split(longest), strict=True)
        for part, sums in parts if size else ():
            channel.launch(part, sums, reduction, self._timeout)
        return out

    def expect(self, size: int) -> bool:
        """Allocate, together with the other ranks, memory for rows that are sent while others are multiplied.

        Args:
            size: bytes of the longest message.

        Returns:
            whether it is long enough that there are any.
        """
        schedule, held = self._copy_schedule, self._copies.size if self._copies else 0
        if schedule and size >= schedule.smallest and schedule.fitted(size) > held:
            self._copies = Copies(schedule, self._ranks, size, self._allocate)
        return self._copies is not None

    def sends(self, rows: int, length: int, dtype: torch.dtype) -> bool:
        """Whether :meth:`send` serves a message [rows, length] now."""
        return self._copies is not None and self._copies.hold(rows, length, dtype)

    def send(self, multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> SentRows:
        """Multiply rows, and send the other ranks what that gives while the next are multiplied, if :meth:`sends` says
        so.

        Args:
            multiply: [rows, K] -> [rows, N] of the partial result's dtype, of any rows the same bits.
            x: [M, K]

        Returns:
            what :meth:`add_and_norm` adds, before the next call of this one.
        """
        with on_device_of(x):
            return self._copies.send(multiply, x)

    def add_and_norm(
        self, partial: torch.Tensor | Products | SentRows, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum over ranks, and RMSNorm of it and a residual: the bits of this object's call and of
        :func:`~..norm.rms_norm`, in one launch where the message is short enough.

        Args:
            partial: [..., N] fp32, bf16 or fp16, this rank's; the same shape and dtype on every rank. Or what its
                experts have made of tokens, which is added first. Or what was sent.
            residual: [..., N] of its dtype.
            weight: [N]

        Returns:
            the normalised rows, and the sum with the residual, rounded: new tensors like ``partial``; on every rank the
            same bits.

        Raises:
            ValueError: shapes that do not fit.
            NotCovered: another dtype.
        """
        if isinstance(partial, SentRows):
            reduction = AllReduceReduction.of_ranks(self._ranks, residual.dtype, self._tree)
            with on_device_of(residual):
                return self._copies.add_and_norm(partial, residual, weight, eps, reduction, self._timeout)
        dtype = partial.expert_out.dtype if isinstance(partial, Products) else partial.dtype
        channel, norm = self._channels[0], NormReduction.of_device("cuda", partial.shape[-1], dtype)
        of_rows = dtype in NORM_DTYPES and dtype == residual.dtype and weight.dtype in NORM_DTYPES
        if not (of_rows and partial.shape == residual.shape and channel.holds_rows(residual, norm)):
            whole = partial.added() if isinstance(partial, Products) else partial
            return rms_norm(self(whole), weight, eps, residual)
        reduction = AllReduceReduction.of_ranks(self._ranks, dtype, self._tree)
        partial = partial if isinstance(partial, Products) else aligned(partial)
        residual, weight = aligned(residual), aligned(weight)
        out, residual_out = torch.empty_like(residual), torch.empty_like(residual)
        channel.launch_with_norm(partial, residual, weight, eps, out, residual_out, reduction, norm, self._timeout)
        return out, residual_out


class _Channel:
    """The memory of one schedule."""

    def __init__(self, schedule: AllReduceSchedule, ranks: int, allocate: Callable[[int], Peers]) -> None:
        self.schedule, self._ranks = schedule, ranks
        self._flag_bytes = aligned_bytes(schedule.ctas * ranks * 4)
        self._region_bytes = schedule.region_bytes(ranks)
        self._half_bytes = (2 if schedule.two_shot else 1) * ranks * schedule.ctas * self._region_bytes
        self._peers = allocate(self._flag_bytes + 2 * self._half_bytes)
        self._epochs = torch.zeros(schedule.ctas, dtype=torch.int32, device=self._peers.addresses.device)

    def launch(self, partial: torch.Tensor, out: torch.Tensor, reduction: AllReduceReduction, timeout: int) -> None:
        """Add one message, [elements], of at most ``schedule.largest`` bytes."""
        unit = _unit(partial)
        turns = -(-partial.numel() // (self.schedule.block * self.schedule.owners(self._ranks)))
        launch(
            all_reduce_kernel,
            min(turns, self.schedule.ctas),
            (partial, out, self._peers.addresses, self._epochs, self._peers.rank, partial.numel() // unit),
            on=partial,
            UNIT=unit,
            TWO_SHOT=self.schedule.two_shot,
            BLOCK=self.schedule.block,
            num_warps=self.schedule.num_warps,
            **self._options(reduction, timeout),
        )

    def holds_rows(self, message: torch.Tensor, norm: NormReduction) -> bool:
        """Whether a message like this, [..., N], is added and normalised in one launch: it is short enough for one
        shot, rows lie in a norm's tile, and a region holds those of a CTA.
        """
        size, rows = message.numel() * message.itemsize, message.numel() // norm.length
        tile = norm.rows_per_program * norm.length * message.itemsize
        turns = -(-rows // (norm.rows_per_program * self.schedule.ctas))
        is_short = not self.schedule.two_shot and 0 < size <= self.schedule.largest
        return is_short and norm.length <= norm.block and turns * tile <= self._region_bytes

    def launch_with_norm(
        self,
        partial: torch.Tensor | Products,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        residual_out: torch.Tensor,
        reduction: AllReduceReduction,
        norm: NormReduction,
        timeout: int,
    ) -> None:
        """Add one message, [..., N], add the residual, and normalise rows, if :meth:`holds_rows`."""
        rows = residual.numel() // norm.length
        if isinstance(partial, Products):
            operands, constants = partial.operands, partial.constants
        else:
            operands, constants = (partial, None, None, None), {"TOP_K": 0, "IS_PART": False}
        launch(
            all_reduce_norm_kernel,
            min(-(-rows // norm.rows_per_program), self.schedule.ctas),
            (
                *operands,
                residual,
                weight,
                out,
                residual_out,
                self._peers.addresses,
                self._epochs,
                self._peers.rank,
                rows,
                norm.length // norm.stride_unit,
                eps,
            ),
            on=residual,
            waits=True,
            **constants,
            **norm.options,
            **self._options(reduction, timeout),
        )

    def _options(self, reduction: AllReduceReduction, timeout: int) -> dict[str, Any]:
        """Of either kernel."""
        return {
            "FLAG_BYTES": self._flag_bytes,
            "HALF_BYTES": self._half_bytes,
            "REGION_BYTES": self._region_bytes,
            "REGIONS": self.schedule.ctas,
            **launch_options(reduction, timeout),
        }
