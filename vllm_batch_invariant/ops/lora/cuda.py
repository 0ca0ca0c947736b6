"""Adapters of low rank on a GPU, in two launches: rows are grouped by slot on the GPU, and each block of them has the
products of its adapter. Nothing waits for the host, so a step may be a CUDA graph.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

import torch
import torch.nn.functional as F
import triton

from ...errors import NotCovered
from ..common.cancelling import cancelling
from ..common.gpu import Gpu
from ..common.launch import launch
from ..linear import triton_gemm
from ..linear.reduction import LinearReduction
from ..linear.schedule import ptr_tiles
from ..moe.cuda import Groups, numbers_of_pairs, place
from .reduction import LoraReduction
from .triton_kernels import expand_kernel, shrink_kernel

MOST_ROWS_OF_A_TILE = 32
"""With 64 rows and more a tile would have wgmma or tcgen05.mma, where smaller ones have mma.sync."""
_MOST_IN_REGISTERS = 128
"""Elements of A, and of x, of a leaf that a thread holds."""
_ROOM = 1 << 28
"""Bytes of the sums of leaves, beyond which a program adds all leaves of its columns itself."""


@dataclass(frozen=True)
class ShrinkSchedule:
    """A tile of x A^T; no bits follow it.

    Attributes:
        block_r: columns of one slice, of which a program has so many.
        block_k: elements of K in one step of the loop.
        num_warps: of a program.
        num_stages: of the loop.
        by_leaf: whether each leaf is a program's, whose sums are added by the second launch; else a program has all.
        in_registers: whether a program with a leaf of its own has it in one step, where there are registers for that: A
            is then loaded while the kernel before ends, which writes x.
    """

    block_r: int
    block_k: int
    num_warps: int
    num_stages: int
    by_leaf: bool = True
    in_registers: bool = False


@dataclass(frozen=True)
class ExpandSchedule:
    """A tile of y; no bits follow it.

    Attributes:
        block_n: columns of one slice.
        tiles_n: such tiles of a program, one after the other.
        num_warps: of a program.
        most_r: of the rank, that are multiplied at once; a power of two.
    """

    block_n: int
    tiles_n: int
    num_warps: int
    most_r: int = 128


@dataclass(frozen=True)
class LoraSchedule:
    """How both launches are cut into tiles; no bits follow it.

    Attributes:
        block_m: rows of one slot.
        shrink: of the first launch.
        expand: of the second.
        few_rows: for no more rows than this, a power of two; every program looks for those of its block. 0: they are
            grouped before.
        most: rows up to which it serves.
    """

    block_m: int
    shrink: ShrinkSchedule
    expand: ExpandSchedule
    few_rows: int = 0
    most: float = inf

    def __post_init__(self) -> None:
        if self.block_m > MOST_ROWS_OF_A_TILE:
            raise ValueError(f"tiles of {self.block_m} rows would have another instruction than smaller ones")

    def serves(self, rows: int) -> bool:
        """Whether it is for so many rows."""
        return rows <= (self.few_rows or self.most)


_HALVES = (
    LoraSchedule(16, ShrinkSchedule(16, 256, 4, 3, in_registers=True), ExpandSchedule(64, 1, 4), few_rows=16),
    LoraSchedule(16, ShrinkSchedule(16, 256, 4, 3, in_registers=True), ExpandSchedule(128, 1, 4), few_rows=64),
    LoraSchedule(32, ShrinkSchedule(32, 128, 4, 4), ExpandSchedule(128, 2, 8, 64), most=512),
    LoraSchedule(32, ShrinkSchedule(64, 128, 4, 3), ExpandSchedule(128, 4, 8, 64)),
)
_SINGLES = (
    LoraSchedule(16, ShrinkSchedule(16, 32, 4, 2), ExpandSchedule(32, 1, 4, 32), few_rows=64),
    LoraSchedule(32, ShrinkSchedule(32, 32, 4, 2), ExpandSchedule(64, 4, 4, 32)),
)
"""The first that serves is taken."""


def lora_schedules(dtype: torch.dtype) -> tuple[LoraSchedule, ...]:
    """Those that may serve rows of a dtype, before :func:`lora_schedule` chooses whether leaves are programs' own."""
    return _SINGLES if dtype == torch.float32 else _HALVES


@cache
def lora_schedule(rows: int, slots: int, slices: int, rank: int, reduction: LoraReduction, gpu: Gpu) -> LoraSchedule:
    """The schedule for so many rows and slots of adapters with so many slices of a rank: one program for all leaves of
    its columns where there are programs for every multiprocessor even so, or where their sums want too much memory.
    """
    found = next(one for one in lora_schedules(reduction.dtype) if one.serves(rows))
    programs = most_blocks(rows, slots, found.block_m) * slices * triton.cdiv(rank, found.shrink.block_r)
    room = reduction.leaves * rows * slices * rank * reduction.accumulate.itemsize
    whole = not found.few_rows and (programs >= gpu.num_sms or room > _ROOM)
    return replace(found, shrink=replace(found.shrink, by_leaf=not whole))


def most_blocks(rows: int, slots: int, block_m: int) -> int:
    """How many blocks of rows of one slot there may be."""
    used = min(rows, slots)
    return used + (rows - used) // block_m


@dataclass(frozen=True)
class RowGroups:
    """Rows of a step grouped by slot, for all layers of a model: where they are stays, for CUDA graphs.

    Attributes:
        slots: [rows + 1] int32, -1 for a row without an adapter, and behind the rows of a step.
        groups: by rows of a block, those of every schedule.
    """

    slots: torch.Tensor
    groups: dict[int, Groups]

    @classmethod
    def empty(cls, rows: int, slots: int, dtype: torch.dtype, device: torch.device) -> "RowGroups":
        """For steps of no more than so many rows, of which none has an adapter yet.

        Args:
            rows: of a step at most.
            slots: of adapters.
            dtype: of the rows.
            device: a GPU.
        """
        of_rows = torch.full((rows + 1,), -1, dtype=torch.int32, device=device)
        sizes = {one.block_m for one in lora_schedules(dtype)}
        found = cls(
            of_rows, {size: Groups.empty(most_blocks(rows, slots, size), slots, size, device) for size in sizes}
        )
        for count in numbers_of_pairs(rows):
            found.set(of_rows[:count])  # compiled before there are requests
        return found

    def set(self, slots: torch.Tensor) -> None:
        """Take the slots [rows] of another step's rows, integers; those behind them have none. Adapters are in their
        slots before, unless another kernel follows.
        """
        here = self.slots[: len(slots)].copy_(slots)
        for block_m, groups in self.groups.items():
            place(here, groups, block_m)
        self.slots[len(slots) :].fill_(-1)  # last, because a kernel behind may read groups before it waits

    def of(self, rows: int, slots: int, schedule: LoraSchedule) -> Groups:
        """The groups of the first rows: of a step that has no more."""
        return replace(self.groups[schedule.block_m], num_blocks=most_blocks(rows, slots, schedule.block_m))


def grouped(slots: torch.Tensor, count: int, schedule: LoraSchedule) -> Groups:
    """Rows of slots [rows] of ``count``, grouped for a schedule."""
    blocks, slots = most_blocks(len(slots), count, schedule.block_m), slots.contiguous()
    if schedule.few_rows:
        return Groups(blocks, slots, few_pairs=schedule.few_rows)
    groups = Groups.empty(blocks, count, schedule.block_m, slots.device)
    place(slots, groups, schedule.block_m)
    return groups


def add_adapters(
    y: torch.Tensor,
    x: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    slots: torch.Tensor | RowGroups,
    reduction: LoraReduction,
    schedule: LoraSchedule | None = None,
) -> None:
    """See the operation's package; rows may be grouped already, for all layers of a step."""
    rows, count, slices, rank = len(y), len(a[0]), len(a), a[0].shape[2]
    if not rows or not count:
        return
    schedule = schedule or lora_schedule(rows, count, slices, rank, reduction, Gpu.of(y.device.index))
    ahead = isinstance(slots, RowGroups)
    groups = slots.of(rows, count, schedule) if isinstance(slots, RowGroups) else grouped(slots, count, schedule)
    expand(y, shrink(x, a, groups, reduction, schedule, ahead), b, groups, reduction, schedule, ahead=True)


def add_expanded(
    y: torch.Tensor,
    u: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor | RowGroups,
    reduction: LoraReduction,
    schedule: LoraSchedule | None = None,
) -> None:
    """The second product alone, of rows whose first one is a row of A.

    Args:
        y: [M, N] of the reduction's dtype, changed in place; rows any stride apart.
        u: [M, R] of the same dtype.
        b: [slots, 1, N, R], packed.
        slots: see :func:`add_adapters`.
        reduction: of an adapter of any K.
    """
    rows, count, rank = len(y), len(b), b.shape[3]
    if not rows or not count:
        return
    schedule = schedule or lora_schedule(rows, count, 1, rank, reduction, Gpu.of(y.device.index))
    groups = slots.of(rows, count, schedule) if isinstance(slots, RowGroups) else grouped(slots, count, schedule)
    expand(y, u.contiguous()[None], (b,), groups, reduction, schedule)


def shrink(
    x: torch.Tensor,
    a: Sequence[torch.Tensor],
    groups: Groups,
    reduction: LoraReduction,
    schedule: LoraSchedule,
    ahead: bool = False,
) -> torch.Tensor:
    """Of rows x [M, K] with adapters the sums of leaves [leaves, M, slices * R] fp32, or their sum, as one leaf; others
    are not written. With ``ahead`` kernels that may still run write neither ``a`` nor ``groups``.
    """
    (rows, k), rank, how, k_leaf = x.shape, a[0].shape[2], schedule.shrink, min(reduction.k_leaf, x.shape[1])
    by_leaf = how.by_leaf and reduction.leaves > 1
    leaves = reduction.leaves if by_leaf else 1
    whole_k = triton.next_power_of_2(k_leaf)
    held = max(how.block_r, schedule.block_m) * whole_k
    in_registers = how.in_registers and (by_leaf or reduction.leaves == 1)
    in_registers = in_registers and held <= _MOST_IN_REGISTERS * 32 * how.num_warps
    block_k = whole_k if in_registers else how.block_k
    sums = torch.empty(leaves, rows, len(a) * rank, dtype=reduction.accumulate, device=x.device)
    launch(
        shrink_kernel,
        groups.num_blocks * leaves * len(a) * triton.cdiv(rank, how.block_r),
        (x, tuple(a), sums, groups.pairs, groups.stop, groups.expert_of_block, rows, x.stride(0), k),
        on=x,
        waits=True,
        RANK=rank,
        K_LEAF=k_leaf,
        LEAVES=reduction.leaves,
        BY_LEAF=by_leaf or reduction.leaves == 1,
        AHEAD=ahead,
        IN_REGISTERS=in_registers,
        EVEN_K=k % k_leaf == 0 and k_leaf % block_k == 0,
        FEW_ROWS=groups.few_pairs,
        BLOCK_M=schedule.block_m,
        BLOCK_R=how.block_r,
        BLOCK_K=block_k,
        num_warps=how.num_warps,
        num_stages=how.num_stages,
        enable_fp_fusion=_fuses(reduction),
    )
    return sums


def expand(
    y: torch.Tensor,
    sums: torch.Tensor,
    b: Sequence[torch.Tensor],
    groups: Groups,
    reduction: LoraReduction,
    schedule: LoraSchedule,
    ahead: bool = False,
) -> None:
    """Add to rows y [M, N] with adapters the product of u, the rounded sum of ``sums`` [leaves, M, slices * R]. With
    ``ahead`` the kernel that was launched before writes ``sums`` alone, and has waited for those before it.
    """
    rank, how = b[0].shape[3], schedule.expand
    columns = tuple(one.shape[2] for one in b)
    launch(
        expand_kernel,
        groups.num_blocks * sum(triton.cdiv(one, how.block_n * how.tiles_n) for one in columns),
        (y, sums, tuple(b), columns, groups.pairs, groups.stop, groups.expert_of_block, len(y), y.stride(0)),
        on=y,
        waits=True,
        RANK=rank,
        LEAVES=len(sums),
        AHEAD=ahead,
        FEW_ROWS=groups.few_pairs,
        BLOCK_M=schedule.block_m,
        BLOCK_N=how.block_n,
        TILES_N=how.tiles_n,
        BLOCK_R=max(16, min(how.most_r, triton.next_power_of_2(rank))),
        num_warps=how.num_warps,
        num_stages=1,
        enable_fp_fusion=_fuses(reduction),
    )


def _fuses(reduction: LoraReduction) -> bool:
    """Only fp32 has products outside of tensor cores."""
    return reduction.dtype == torch.float32


def composed(
    y: torch.Tensor,
    x: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    slots: torch.Tensor,
    reduction: LoraReduction,
) -> torch.Tensor:
    """What y becomes, of dense products of the operation ``linear`` by its smallest tile, and additions of PyTorch's:
    for tests and certificates.
    """
    out, first = y.clone(), 0
    for a_i, b_i in zip(a, b, strict=True):
        u = torch.zeros(len(x), a_i.shape[2], dtype=reduction.accumulate, device=y.device)
        for slot in slots.unique().tolist():
            own = slots == slot
            leaves = zip(x[own].split(reduction.k_leaf, 1), a_i[slot, 0].split(reduction.k_leaf, 1), strict=True)
            for x_leaf, a_leaf in leaves if slot >= 0 else ():
                u[own] += _dense(x_leaf, a_leaf)
        columns = slice(first, first := first + b_i.shape[2])
        out[:, columns] = _expanded(y[:, columns], u.to(reduction.dtype), b_i, slots, reduction)
    return out


def _expanded(
    y: torch.Tensor, u: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, reduction: LoraReduction
) -> torch.Tensor:
    """The same from u on."""
    out = y.clone()
    for slot in slots.unique().tolist():
        own = slots == slot
        if slot >= 0:
            out[own] = (y[own].to(reduction.accumulate) + _dense(u[own], b[slot, 0])).to(reduction.dtype)
    return out


def _dense(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """rows [M, K] @ weight [N, K].T, not rounded."""
    (n, k), tile = weight.shape, ptr_tiles(rows.dtype)[0]
    how = replace(LinearReduction.of_device("cuda", n, k, rows.dtype), precision="ieee")
    how = replace(how, enable_fp_fusion=rows.dtype == torch.float32)
    out = torch.empty(1, len(rows), n, dtype=how.accumulate, device=rows.device)
    return triton_gemm.gemm_ptr(rows[None], weight.t()[None], None, out, how, tile)[0]


_CERTIFIED_ROWS = (1, 2, 15, 16, 17, 31, 33, 64, 65, 256)
_CERTIFIED_SLOTS = 5
"""The last but one has no rows, and NaN for an adapter."""
_CERTIFIED_COLUMNS = 128
_CERTIFICATE_SCALE = 64
"""Of operands whose sums cancel: what is left of them is large enough that fp16 has its products, too."""


def certify(k: int, columns: Sequence[int], rank: int, dtype: torch.dtype, device: torch.device) -> int:
    """Compare every schedule with :func:`composed`, for 1 to 256 rows of several adapters and of none, of operands
    whose sums cancel; grouped for each call and ahead, so that no kernel is compiled while requests wait.

    Args:
        k: elements of x.
        columns: of each slice of y, of which some are enough.
        rank: that the tensors have room for.
        dtype: of all.
        device: a GPU.

    Returns:
        How many elements were compared.

    Raises:
        NotCovered: a schedule has other bits.
    """
    reduction, compared = LoraReduction.of_device("cuda", k, dtype), 0
    y, x, a, b, slots = _certificate_case(k, columns, rank, dtype, device)
    u, one = x[:, :1].expand(-1, rank).contiguous(), slice(b[0].shape[2])
    whole = composed(y, x, a, b, slots, reduction)
    expected = whole, whole, _expanded(y[:, one], u, b[0], slots, reduction)
    for schedule, rows in certified(dtype):
        order = torch.arange(rows, device=device) * 3 % len(y)  # some of all slots, each row once
        groups = RowGroups.empty(rows, len(a[0]), dtype, device)
        groups.set(slots[order])
        found = y[order], y[order], y[order, one].contiguous()
        add_adapters(found[0], x[order], a, b, slots[order], reduction, schedule)
        add_adapters(found[1], x[order], a, b, groups, reduction, schedule)
        add_expanded(found[2], u[order], b[0], slots[order], reduction, schedule)
        if not all(torch.equal(made, wanted[order]) for made, wanted in zip(found, expected, strict=True)):
            raise NotCovered(
                f"LoRA adapters of rank {rank} and {k} inputs in {dtype} on {torch.cuda.get_device_name(device)}",
                f"{schedule} of {rows} rows has other bits than products of matrices",
                "leave --enable-lora out, or serve on a CPU",
            )
        compared += sum(made.numel() for made in found)
    return compared


def certified(dtype: torch.dtype) -> Iterator[tuple[LoraSchedule, int]]:
    """Every schedule that :func:`lora_schedule` may give, with numbers of rows that it is compared for."""
    for schedule in lora_schedules(dtype):
        rows = [one for one in _CERTIFIED_ROWS if schedule.serves(one)]
        yield from ((schedule, one) for one in rows)
        if not schedule.few_rows:
            whole = replace(schedule, shrink=replace(schedule.shrink, by_leaf=False))
            yield from ((whole, one) for one in rows[-2:])


def _certificate_case(
    k: int, columns: Sequence[int], rank: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], torch.Tensor]:
    """y, x, a, b and slots."""
    rows, used = max(_CERTIFIED_ROWS), [0, 1, 2, _CERTIFIED_SLOTS - 1]
    columns = [min(one, _CERTIFIED_COLUMNS + one % _CERTIFIED_COLUMNS) for one in columns]
    adapters = len(used) * len(columns) * rank
    x, of_a = (
        F.pad(_CERTIFICATE_SCALE * one, (0, k % 2)) for one in cancelling(rows, adapters, k - k % 2, dtype, device)
    )
    generator = torch.Generator(device).manual_seed(1)
    a, b = [], []
    for n, part in zip(columns, of_a.view(len(columns), len(used), 1, rank, k), strict=True):
        for tensors, drawn in (
            (a, part),
            (b, torch.randn(len(used), 1, n, rank, generator=generator, device=device).to(dtype)),
        ):
            tensor = torch.full((_CERTIFIED_SLOTS, *drawn.shape[1:]), torch.nan, dtype=dtype, device=device)
            tensor[used] = drawn
            tensors.append(tensor)
    places = torch.tensor([-1, *used], device=device)
    slots = places[torch.arange(rows, device=device) % len(places)]
    y = 1e-3 * torch.randn(rows, sum(columns), generator=generator, device=device)
    y[::2] = 0
    return y.to(dtype), x, tuple(a), tuple(b), slots
