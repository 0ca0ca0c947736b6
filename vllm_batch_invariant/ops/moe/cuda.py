"""Mixtures of experts on a GPU: (token, expert) pairs are grouped by expert on the GPU, and each block of them is
multiplied by its expert's weights. Nothing waits for the host, so a step may be a CUDA graph.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ...errors import NotCovered
from ..common.cancelling import cancelling
from ..common.gpu import Gpu
from ..common.launch import launch
from ..common.triton_rows import aligned
from ..formats.eight import FP8_BLOCK
from ..formats.fp4 import GLOBALS_BY_STEPS, NVFP4, NVFP4_STEPS, by_steps
from ..formats.record import Format
from ..formats.triton_decode import PackedTile
from ..linear import triton_gemm
from ..linear.problem import ALIGNMENT, LARGEST_SIDE, ScaledProblem
from ..linear.reduction import LinearReduction
from ..norm.cuda import quantised
from ..norm.reduction import NormReduction
from ..quantise import cuda as quantising
from ..quantise.reduction import E4M3, QuantiseReduction
from ..scaled_linear import cuda as scaled_linear
from ..scaled_linear.library import operand_sets
from ..scaled_linear.reduction import GROUP, ScaledLinearReduction
from ..silu.cuda import silu_and_mul
from ..softmax import softmax
from ..softmax.reduction import LONGEST_WHOLE, SoftmaxReduction
from .deep_gemm import BLOCK_M as LIBRARY_BLOCK_M
from .deep_gemm import ExpertsProblem, Slots, gather, grouped_deep_gemm
from .params import Codes, Experts, StoredExperts
from .reduction import UNGATED, MoeReduction
from .routes import route_by
from .triton_kernels import (
    activation_kernel,
    combine_kernel,
    combine_norm_kernel,
    count_kernel,
    grouped_gemm_kernel,
    place_kernel,
    route_kernel,
)

_BYTES_AT_ONCE = 1 << 30
"""Of products that are held in memory until they are added: the more tokens an expert has, the fuller its blocks."""
_REPLAYS = 5
_MOST_COMPARED = 16_384
"""Experts times groups, both as powers of two, that the kernel of routes compares at once."""


@dataclass(frozen=True)
class GroupedSchedule:
    """A tile of a grouped product; no bits follow it.

    Attributes:
        block_m: pairs of one expert.
        block_n: columns of the result; where gate and up are activated in the tile, of each.
        block_k: elements of K in one step of the loop.
        num_warps: of a program.
        num_stages: of the loop.
        by_tma: whether the tensor memory accelerator reads the weights, where it can.
        halves: whether a block of at most half as many pairs is a tile of half as many rows.
        persistent: whether :mod:`.sm90_kernel` computes it, where it can; with blocks of 128 pairs.
        packed_ctas: programs of :mod:`.sm90_packed` on a multiprocessor, which computes it of weights of four bits; 0:
            it does not.
        copiers: how many of its partitions copy.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    by_tma: bool = True
    halves: bool = False
    persistent: bool = False
    packed_ctas: int = 0
    copiers: int = 1

    @property
    def swap_ab(self) -> bool:
        """Whether a tile is computed transposed: the tensor core's long side takes columns where pairs are few."""
        return self.block_m < 64

    @property
    def rows(self) -> int:
        """Of the weight in a tile of :mod:`.sm90_packed`: a warp has those of a quarter of wgmma's long side."""
        return 16 * self.num_warps

    @property
    def copying_warps(self) -> int:
        """Of a partition that copies there: a thread has a pair's 32 bytes, or of many pairs two."""
        return 1 if self.block_m < 32 else max(4, self.block_m // 16)


@dataclass(frozen=True)
class LayerSchedule:
    """How a layer's two products are cut into tiles; no bits follow it.

    Attributes:
        gate_up: of the first product.
        down: of the second, with as many pairs.
        few_pairs: for no more pairs than this, a power of two; every program looks for those of its block. 0: a kernel
            groups them first.
        most: pairs of an expert, on average, up to which it serves.
        longest: rows of the second product's weight, in elements, up to which it serves.
    """

    gate_up: GroupedSchedule
    down: GroupedSchedule
    few_pairs: int = 0
    most: float = inf
    longest: float = inf

    def __post_init__(self) -> None:
        if self.gate_up.block_m != self.down.block_m:
            raise ValueError("both products have the same blocks of pairs")

    def serves(self, pairs: int, experts: int, intermediate: int) -> bool:
        """Whether it is for so many pairs, and for rows of ``intermediate`` elements in the second product."""
        most = self.few_pairs or self.most * experts
        return pairs <= most and intermediate <= self.longest


_HOPPER = (
    LayerSchedule(GroupedSchedule(16, 64, 128, 4, 3), GroupedSchedule(16, 64, 64, 4, 3), few_pairs=16, longest=192),
    LayerSchedule(GroupedSchedule(16, 64, 128, 4, 3), GroupedSchedule(16, 64, 128, 4, 3), few_pairs=16),
    LayerSchedule(GroupedSchedule(16, 64, 128, 4, 3), GroupedSchedule(16, 128, 64, 4, 3), few_pairs=64, longest=192),
    LayerSchedule(GroupedSchedule(16, 64, 128, 4, 3), GroupedSchedule(16, 128, 128, 4, 3), few_pairs=64),
    LayerSchedule(GroupedSchedule(16, 64, 128, 4, 3), GroupedSchedule(16, 128, 64, 4, 3), most=9, longest=192),
    LayerSchedule(GroupedSchedule(16, 64, 128, 4, 3), GroupedSchedule(16, 128, 128, 4, 3), most=9),
    LayerSchedule(GroupedSchedule(32, 64, 128, 4, 2), GroupedSchedule(32, 128, 64, 4, 3), most=22, longest=192),
    LayerSchedule(GroupedSchedule(32, 64, 128, 4, 2), GroupedSchedule(32, 128, 128, 4, 2), most=22),
    LayerSchedule(GroupedSchedule(64, 64, 64, 4, 4), GroupedSchedule(64, 128, 64, 4, 4), most=45),
    LayerSchedule(
        GroupedSchedule(128, 128, 64, 8, 4, halves=True), GroupedSchedule(128, 256, 64, 8, 4, halves=True), most=100
    ),
    LayerSchedule(
        GroupedSchedule(128, 128, 64, 8, 4, halves=True, persistent=True),
        GroupedSchedule(128, 256, 64, 8, 4, halves=True, persistent=True),
    ),
)


def _packed_schedule(
    block_m: int, gate_up: tuple[int, int, int, int], down: tuple[int, int, int, int], most: float
) -> LayerSchedule:
    """Of rows of the weight in a tile, stages, programs of a multiprocessor and partitions that copy."""
    products = zip((gate_up, down), (2, 1), strict=True)
    tiles = (
        GroupedSchedule(block_m, rows // halves, 128, rows // 16, stages, packed_ctas=ctas, copiers=copiers)
        for (rows, stages, ctas, copiers), halves in products
    )
    return LayerSchedule(*tiles, most=most)


_HOPPER_PACKED = (
    _packed_schedule(8, (64, 8, 3, 1), (64, 8, 3, 2), 0.2),
    _packed_schedule(8, (64, 8, 3, 2), (128, 6, 2, 2), 1),
    _packed_schedule(8, (64, 8, 3, 2), (64, 8, 3, 2), 4),
    _packed_schedule(16, (64, 8, 3, 2), (256, 6, 1, 4), 12),
    _packed_schedule(32, (256, 8, 1, 1), (128, 5, 2, 1), 20),
    _packed_schedule(64, (128, 8, 1, 2), (128, 8, 1, 2), inf),
)
"""Of :mod:`.sm90_packed`, for weights of four bits. A tile of 128 pairs waits for its rows of x."""
_MANY = 320
"""Pairs of an expert, on average, from which on a layer of such weights is faster as a layer of their matrices."""
_MOST_MATRICES = 5 << 30
"""Bytes of the matrices of one product."""
_SCALED = (
    LayerSchedule(GroupedSchedule(16, 64, GROUP, 4, 4), GroupedSchedule(16, 64, GROUP, 4, 3), few_pairs=64),
    LayerSchedule(GroupedSchedule(16, 64, GROUP, 4, 4), GroupedSchedule(16, 64, GROUP, 4, 3), most=9),
    LayerSchedule(GroupedSchedule(32, 64, GROUP, 4, 3), GroupedSchedule(32, 128, GROUP, 4, 3), most=22),
    LayerSchedule(GroupedSchedule(64, 64, GROUP, 4, 4), GroupedSchedule(64, 64, GROUP, 4, 3), most=100),
    LayerSchedule(
        GroupedSchedule(128, 64, GROUP, 4, 3, halves=True), GroupedSchedule(128, 64, GROUP, 8, 3, halves=True)
    ),
)
"""Of codes of e4m3, the fastest on an H200. A step is one sum of the tensor core, whose first operand has 64 rows or
more: with fewer Triton takes neither Hopper's wgmma nor Blackwell's tcgen05.mma, but mma.sync, which adds otherwise.
Columns have one scale, so that a tile has a divisor of 128 of them. Each fits 99 KiB of shared memory.
"""
_OTHERS = {
    2: (
        LayerSchedule(GroupedSchedule(16, 64, 64, 4, 4), GroupedSchedule(16, 64, 128, 4, 4), most=9),
        LayerSchedule(GroupedSchedule(32, 64, 64, 4, 4), GroupedSchedule(32, 128, 64, 4, 4), most=22),
        LayerSchedule(GroupedSchedule(64, 64, 64, 4, 4), GroupedSchedule(64, 128, 64, 4, 4), most=45),
        LayerSchedule(GroupedSchedule(128, 64, 64, 8, 3), GroupedSchedule(128, 128, 64, 8, 3)),
    ),
    4: (
        LayerSchedule(*2 * (GroupedSchedule(16, 32, 32, 4, 2),), few_pairs=64),
        LayerSchedule(*2 * (GroupedSchedule(16, 32, 32, 4, 2),), most=16),
        LayerSchedule(GroupedSchedule(64, 32, 32, 8, 2), GroupedSchedule(64, 64, 32, 8, 2)),
    ),
}
"""By bytes of an element. The first that serves is taken."""


@cache
def layer_schedules(
    dtype: torch.dtype, gpu: Gpu, packed: bool = False, scaled: bool = False
) -> tuple[LayerSchedule, ...]:
    """Those that may serve on a GPU; ``packed``: layers that :mod:`.sm90_packed` computes; ``scaled``: those whose
    products are of codes.
    """
    if packed or scaled:
        return _SCALED if scaled else _HOPPER_PACKED
    return _HOPPER if gpu.has_wgmma and dtype.itemsize == 2 else _OTHERS[dtype.itemsize]


def layer_schedule(
    pairs: int,
    experts: int,
    intermediate: int,
    dtype: torch.dtype,
    gpu: Gpu,
    packed: bool = False,
    scaled: bool = False,
) -> LayerSchedule:
    """The schedule for so many pairs and experts, in a layer of ``intermediate`` columns here."""
    schedules = layer_schedules(dtype, gpu, packed, scaled)
    return next(one for one in schedules if one.serves(pairs, experts, intermediate))


def is_packed(
    form: Format | None, hidden: int, intermediate: int, dtype: torch.dtype, gpu: Gpu, activation: str
) -> bool:
    """Whether :mod:`.sm90_packed` computes both products of a layer of such experts."""
    tile = form and PackedTile.of(form, dtype)
    if not tile or not gpu.has_wgmma or dtype.itemsize != 2 or triton.knobs.runtime.interpret:
        return False
    from .sm90_packed import covers

    return covers(tile, intermediate, hidden, activation) and covers(tile, hidden, intermediate, "")


@dataclass(frozen=True)
class WalkSchedule:
    """How many elements of a row the kernel of sums and the certificate's take at a time; a power of two."""

    block: int

    @classmethod
    def of(cls, length: int) -> "WalkSchedule":
        """For rows of ``length`` elements."""
        return cls(min(1024, triton.next_power_of_2(length)))


_COMBINING = WalkSchedule(512)
"""Four elements for each thread: a warp reads 512 bytes that lie side by side."""


@dataclass(frozen=True)
class GroupingSchedule:
    """How pairs are grouped by expert; powers of two.

    Attributes:
        block: pairs that a program places.
        pairs_at_once: of its own that each of them is compared with at a time.
        counted_at_once: of all pairs, which every program counts. 0: a kernel counts those of each program before.
        num_warps: of a program.
        blocks_at_once: blocks without pairs that are marked at a time.
    """

    block: int
    pairs_at_once: int
    counted_at_once: int
    num_warps: int = 4
    blocks_at_once: int = 256


_GROUPING = {
    4096: GroupingSchedule(32, 32, 2048, 8),
    32_768: GroupingSchedule(128, 16, 0),
    inf: GroupingSchedule(256, 32, 0),
}
"""By the most pairs that they are for."""
_COUNTS_AT_ONCE, _PROGRAMS_AT_ONCE = 8192, 64
"""Of experts and programs, and of programs, whose counts a program adds. They do not follow the number of pairs, for
which a kernel would be compiled while requests wait.
"""


@dataclass(frozen=True)
class Groups:
    """Pairs grouped by expert, or for programs that do so themselves.

    Attributes:
        num_blocks: of pairs. It follows the shape of ids alone: some may be without pairs.
        pairs: [num_blocks * block_m] int32; or, ungrouped, the expert of each pair.
        stop: [experts or more] int32, where the pairs of each expert end, or None.
        expert_of_block: [num_blocks] int32, -1 for a block without pairs; or None.
        few_pairs: of the schedule.
        places: where an expert lies, if they are not all here; for programs that group.
    """

    num_blocks: int
    pairs: torch.Tensor
    stop: torch.Tensor | None = None
    expert_of_block: torch.Tensor | None = None
    few_pairs: int = 0
    places: torch.Tensor | None = None

    @classmethod
    def empty(cls, num_blocks: int, experts: int, block_m: int, device: torch.device) -> "Groups":
        """Room for so many blocks, not written yet."""
        ints = {"dtype": torch.int32, "device": device}
        bins = max(2, triton.next_power_of_2(experts))  # nobody has compiled a histogram of one
        pairs, stop = torch.empty(num_blocks * block_m, **ints), torch.empty(bins, **ints)
        return cls(num_blocks, pairs, stop, torch.empty(num_blocks, **ints))


def group(ids: torch.Tensor, experts: int, schedule: LayerSchedule, places: torch.Tensor | None = None) -> Groups:
    """Group the pairs of ids [tokens, top_k], packed, into blocks of one expert each, in order: atomic additions for
    every pair would wait for each other.

    Args:
        ids: of experts.
        experts: how many are here.
        schedule: whose blocks they are.
        places: where an expert lies, -1 for one whose pairs are left out; None if all are here, in order.
    """
    num_pairs, block_m = ids.numel(), schedule.gate_up.block_m
    if schedule.few_pairs:
        return Groups(num_pairs, ids, few_pairs=schedule.few_pairs, places=places)
    groups = Groups.empty(min(num_pairs, experts) + num_pairs // block_m, experts, block_m, ids.device)
    place(ids, groups, block_m, places)
    return groups


def numbers_of_pairs(most: int) -> tuple[int, ...]:
    """One for each way in which up to so many pairs are grouped, descending."""
    return tuple(sorted({int(min(one, most)) for one in _GROUPING}, reverse=True))


def place(ids: torch.Tensor, groups: Groups, block_m: int, places: torch.Tensor | None = None) -> None:
    """Write the pairs of ids, packed, into groups that have room for them; one of expert -1 is in none.

    Args:
        ids: of experts, any shape.
        groups: of :meth:`Groups.empty`, as many blocks as pairs may have or more.
        block_m: of the groups.
        places: see :func:`group`.
    """
    assert groups.stop is not None
    num_pairs, padded = ids.numel(), len(groups.stop)
    how = next(one for most, one in _GROUPING.items() if num_pairs <= most)
    programs = triton.cdiv(num_pairs, how.block)
    shared = {"PADDED_EXPERTS": padded, "IS_PART": places is not None, "BLOCK": how.block, "num_warps": how.num_warps}
    counts, counts_at_once = None, 0
    if not how.counted_at_once:
        counts = torch.empty(programs, padded, dtype=torch.int32, device=ids.device)
        counts_at_once = min(_PROGRAMS_AT_ONCE, max(1, _COUNTS_AT_ONCE // padded))
        launch(count_kernel, programs, (ids, places, counts, num_pairs), on=ids, waits=True, **shared)
    launch(
        place_kernel,
        programs,
        (
            ids,
            places,
            counts,
            groups.stop,
            groups.expert_of_block,
            groups.pairs,
            num_pairs,
            programs,
            groups.num_blocks,
        ),
        on=ids,
        waits=True,
        BLOCK_M=block_m,
        COUNTS=counts_at_once,
        COUNTED_AT_ONCE=how.counted_at_once,
        BLOCKS_AT_ONCE=how.blocks_at_once,
        PAIRS_AT_ONCE=how.pairs_at_once,
        **shared,
    )


def grouped_gemm(
    x: torch.Tensor | Codes,
    weight: torch.Tensor | StoredExperts,
    bias: torch.Tensor | None,
    groups: Groups,
    pairs: int,
    dtype: torch.dtype,
    schedule: GroupedSchedule,
    *,
    activation: str = "",
) -> torch.Tensor:
    """Each pair's row of x times its expert's weight: [pairs, N]. Rows of pairs that are in no group are not written.

    Args:
        x: [rows, K], packed; a row has pairs // rows pairs, one after the other. Codes are multiplied with those of a
            weight in blocks of 128 x 128, or with a scale a row if they have one.
        weight: [experts, N, K], packed; or with an activation of a gate [experts, 2 * N, K]. What is stored in a format
            that no kernel reads (:class:`PackedTile`) is written to memory first.
        bias: [experts, N] or [experts, 2 * N], or None.
        groups: of the schedule's ``block_m``.
        pairs: how many there are.
        dtype: of the result.
        schedule: decides the speed.
        activation: of gate and up, each rounded as if it were written, whose rows are the weight's halves or, for
            "swigluoai", are in it in turn; or without a gate of all rows; or "".
    """
    experts, rows, k = weight.shape
    n, in_turn = rows if activation in UNGATED else rows // 2, activation == "swigluoai"
    reduction = LinearReduction.of_device("cuda", rows, k, x.dtype)
    out = torch.empty(pairs, n, dtype=dtype, device=x.device)
    scales, zeros, form, of_x, strides_of_x, group_k, in_blocks = None, None, None, None, (0, 0), 0, False
    fuses, rows_of_a_scale = _fuses(x, reduction), 1
    if isinstance(x, Codes):
        (weight, scales), in_blocks = weight.tensors, x.scales.dim() == 2
        rows_of_a_scale = 1 if in_blocks else rows // scales.shape[1]
        strides_of_x = (*x.scales.stride(), 0)[:2]
        x, of_x, group_k = aligned(x.codes), x.scales, GROUP
    elif isinstance(weight, StoredExperts):
        form = PackedTile.of(weight.format, x.dtype)
        if schedule.packed_ctas and form is not None:
            from . import sm90_packed

            of_blocks = groups.pairs, groups.stop, groups.expert_of_block
            sm90_packed.grouped_packed_sm90(
                aligned(x), _packed(weight), form, bias, out, of_blocks, reduction,
                activation=activation, block_m=schedule.block_m, rows=schedule.rows,
                block_k=schedule.block_k, num_stages=schedule.num_stages, ctas_per_sm=schedule.packed_ctas,
                copying_warps=schedule.copying_warps, copiers=schedule.copiers,
            )  # fmt: skip
            return out
        weight, scales, zeros = (weight.matrices(), None, None) if form is None else _packed(weight)
    by_tma = form is None and schedule.by_tma and _supports_tma(weight)
    if schedule.persistent and by_tma and not triton.knobs.runtime.interpret:
        from . import sm90_kernel  # Gluon is needed for this kernel alone

        if sm90_kernel.covers(k, bias is not None, activation):
            of_blocks = groups.pairs, groups.stop, groups.expert_of_block
            sm90_kernel.grouped_gemm_sm90(x, weight, out, *of_blocks, reduction, gated=bool(activation))
            return out
    if by_tma and in_turn:
        box = [1, schedule.block_n, schedule.block_k]
        weight = TensorDescriptor(weight, [2, experts * n, k], [k, 2 * k, 1], box)
    elif by_tma:
        weight = TensorDescriptor(weight, [experts * rows, k], [k, 1], [schedule.block_n, schedule.block_k])
    launch(
        grouped_gemm_kernel,
        groups.num_blocks * triton.cdiv(n, schedule.block_n),
        (
            x,
            of_x,
            *strides_of_x,
            weight,
            scales,
            zeros,
            bias,
            out,
            groups.pairs,
            groups.places,
            groups.stop,
            groups.expert_of_block,
            pairs,
            n,
            k,
        ),
        on=x,
        waits=True,
        PAIRS_OF_A_ROW=pairs // len(x),
        ACTIVATION=activation,
        IS_PART=groups.places is not None,
        HAS_BIAS=bias is not None,
        EVEN_K=k % schedule.block_k == 0,
        FEW_PAIRS=groups.few_pairs,
        BY_TMA=by_tma,
        BLOCK_M=schedule.block_m,
        BLOCK_N=schedule.block_n,
        BLOCK_K=schedule.block_k,
        SWAP_AB=schedule.swap_ab,
        PRECISION=reduction.precision,
        HALVES=schedule.halves,
        FORMAT=form,
        GROUP=group_k,
        IN_BLOCKS=in_blocks,
        ROWS_OF_A_SCALE=rows_of_a_scale,
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
        enable_fp_fusion=fuses,
    )
    return out


def _fuses(x: torch.Tensor | Codes, reduction: LinearReduction) -> bool | None:
    """Whether the compiler may fuse products with additions: not those with scales of rows and a bias."""
    return reduction.enable_fp_fusion and not (isinstance(x, Codes) and x.scales.dim() == 1)


def as_read(stored: StoredExperts) -> StoredExperts:
    """As :func:`grouped_gemm` wants them: those in NVFP4 by steps, in new memory, where it reads that.

    Raises:
        NotCovered: scales of matrices so small or large that this might be another matrix.
    """
    if stored.format is not NVFP4 or not reads(NVFP4_STEPS, stored.dtype):
        return stored
    codes, scales, of_matrices = stored.tensors
    (least, most), sizes = GLOBALS_BY_STEPS, of_matrices.abs()
    if bool(((sizes != 0) & ((sizes < least) | (sizes > most))).any()):
        raise NotCovered(
            f"experts in NVFP4 with a scale of a matrix that is not between {least:.0e} and {most:.0e}",
            "kernels for GPUs would round its products with powers of two",
            "download the checkpoint again, or serve on a CPU",
        )
    of_rows = of_matrices.repeat_interleave(codes.shape[1] // of_matrices.shape[1], 1)
    steps = scales.new_empty(len(scales), scales.shape[1], 2 * scales.shape[2], dtype=stored.dtype)
    for expert, made in enumerate(steps):
        made.copy_(by_steps((codes[expert], scales[expert], of_rows[expert]), stored.dtype)[1])
    return StoredExperts(NVFP4_STEPS, (codes, steps), stored.dtype)


def reads(form: Format, dtype: torch.dtype) -> bool:
    """Whether :func:`grouped_gemm` reads what a format stores, and writes no matrix to memory first."""
    return PackedTile.of(form, dtype) is not None


def _packed(weight: StoredExperts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Words of codes, scales, and zero points or None."""
    codes, scales, *zeros = weight.tensors
    return codes.view(torch.int32), scales, zeros[0] if zeros else None


def _supports_tma(weight: torch.Tensor) -> bool:
    experts, rows, k = weight.shape
    return (
        weight.itemsize == 2
        and k * weight.itemsize % ALIGNMENT == 0
        and weight.data_ptr() % ALIGNMENT == 0
        and experts * rows <= LARGEST_SIDE
        and Gpu.of(weight.device.index).has_tma
    )


def route(
    logits: torch.Tensor, reduction: MoeReduction, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    tokens, (top_k, experts), wide = len(logits), (reduction.top_k, reduction.num_experts), reduction.accumulate
    groups = triton.next_power_of_2(reduction.groups)
    compared = groups * triton.next_power_of_2(experts) if groups > 1 else 0
    if experts > LONGEST_WHOLE or compared > _MOST_COMPARED:
        scores = softmax(logits.to(wide)) if reduction.scoring == "softmax" else torch.sigmoid(logits.to(wide))
        return route_by(scores, reduction, bias)
    weights = torch.empty(tokens, top_k, dtype=wide, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    of_row = SoftmaxReduction.of_device("cuda", experts, wide)
    if tokens:
        launch(
            route_kernel,
            tokens,
            (
                logits.contiguous(),
                None if bias is None else bias.to(wide).contiguous(),
                weights,
                ids,
                experts,
                reduction.scale,
            ),
            on=logits,
            waits=True,
            SCORING=reduction.scoring,
            HAS_BIAS=bias is not None,
            RENORMALISE=reduction.renormalise,
            HAS_SCALE=reduction.scale != 1,
            GROUPS=reduction.groups,
            TOP_GROUPS=reduction.top_groups,
            PADDED_GROUPS=groups,
            SUMS_TWO=bias is not None and experts > reduction.groups,
            TOP_K=top_k,
            PADDED_TOP_K=triton.next_power_of_2(top_k),
            BLOCK=of_row.block,
            NUM_WARPS=of_row.num_warps,
            num_warps=of_row.num_warps,
            enable_fp_fusion=of_row.enable_fp_fusion,
        )
    return weights, ids


def moe(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: Experts) -> torch.Tensor:
    """See the operation's package."""
    out, start = torch.empty_like(x, memory_format=torch.contiguous_format), 0
    for tokens, by_library in _parts(x, experts):
        part = slice(start, start + tokens)
        made = _products_by_library if by_library else products
        combine(made(x[part], weights[part], ids[part], experts.of_tokens(start)), out[part])
        start += tokens
    return out


def _parts(x: torch.Tensor, experts: Experts) -> Iterator[tuple[int, bool]]:
    """Numbers of tokens that are computed at once, and whether a library does."""
    at_once = _tokens_at_once(x.shape[1], experts.reduction)
    for tokens, by_library in grouped_deep_gemm.parts(experts, len(x)):
        most = tokens if by_library else at_once
        for start in range(0, tokens, most):
            yield min(most, tokens - start), by_library


def _tokens_at_once(hidden: int, reduction: MoeReduction) -> int:
    return max(1, _BYTES_AT_ONCE // (reduction.top_k * hidden * reduction.dtype.itemsize))


@dataclass(frozen=True)
class Products:
    """What experts have made of tokens, before it is added.

    Attributes:
        expert_out: [tokens * top_k, hidden], of each pair; not written for an expert that is not here.
        weights: [tokens, top_k] fp32.
        ids: [tokens, top_k].
        places: see :class:`Experts`.
        slots: [tokens * top_k] int32, the row of ``expert_out`` that each pair has; None: as many rows, in order.
    """

    expert_out: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    places: torch.Tensor | None
    slots: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Of their sums."""
        return torch.Size((len(self.ids), self.expert_out.shape[1]))

    @property
    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """Of a kernel that adds them, of rows in order."""
        return self.expert_out, self.weights, self.ids, self.places

    @property
    def constants(self) -> dict[str, Any]:
        """Of such a kernel."""
        return {"TOP_K": self.ids.shape[1], "IS_PART": self.places is not None}

    def added(self) -> torch.Tensor:
        """The weighted sums: [tokens, hidden]."""
        out = self.expert_out.new_empty(self.shape)
        combine(self, out)
        return out


def products(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: Experts) -> Products:
    """What :func:`moe` adds, of its operands; all of it is in memory at once."""
    x, weights, ids = x.contiguous(), weights.contiguous(), ids.contiguous()
    gate_up, down, reduction, places = experts.gate_up, experts.down, experts.reduction, experts.places
    pairs, dtype, activation = ids.numel(), x.dtype, reduction.activation
    gpu, form = Gpu.of(x.device.index), down.format if isinstance(down, StoredExperts) else None
    scaled = reduction.products is not None
    packed = not scaled and is_packed(form, *down.shape[1:], dtype, gpu, activation)
    many = packed and pairs >= _MANY * reduction.num_experts
    many &= gate_up.shape.numel() * dtype.itemsize <= _MOST_MATRICES
    schedule = layer_schedule(pairs, reduction.num_experts, down.shape[2], dtype, gpu, packed and not many, scaled)
    groups = group(ids, len(down), schedule, places)
    if reduction.products is not None and reduction.products.mma != gpu.fp8_mma:
        raise NotCovered(
            f"sums of e4m3 of {reduction.products.mma} on {gpu.name}",
            f"it has those of {gpu.fp8_mma}",
            "use those of the GPU",
        )
    given = _operand(x, reduction, *experts.given[:1])
    read = partial(_matrices_of, many)
    first = partial(grouped_gemm, given, read(gate_up), experts.gate_up_bias, groups, pairs, dtype, schedule.gate_up)
    if experts.adapters is None:
        activated = first(activation=activation)
    else:  # which are added before the activation
        placed, hidden = experts.placed(ids).flatten(), first()
        tokens = torch.arange(pairs, device=ids.device) // reduction.top_k
        experts.adapters.add_gate_up(hidden, x[tokens], tokens, placed)
        activated = _activated(hidden, activation)
    made = _operand(activated, reduction, *experts.given[1:])
    expert_out = grouped_gemm(made, read(down), experts.down_bias, groups, pairs, dtype, schedule.down)
    if experts.adapters is not None:
        experts.adapters.add_down(expert_out, activated, tokens, placed)
    if experts.exchange is not None:
        here = experts.placed(ids).flatten() >= 0
        expert_out, places = experts.exchange(torch.where(here[:, None], expert_out, 0.0)), None
    return Products(expert_out, weights, ids, places)


def _products_by_library(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: Experts) -> Products:
    """The same by DeepGEMM, in the slots of pairs."""
    x, weights, ids = x.contiguous(), weights.contiguous(), ids.contiguous()
    gathered, slots = _gathered(_operand(x, experts.reduction), ids, len(experts.down))
    hidden = grouped_deep_gemm.product(gathered, experts.gate_up, slots)
    activated = silu_and_mul(hidden, codes=experts.reduction.quantised)
    expert_out = grouped_deep_gemm.product(_operand(activated, experts.reduction), experts.down, slots)
    return Products(expert_out, weights, ids, None, slots.of_pair)


def _gathered(x: torch.Tensor | Codes, ids: torch.Tensor, experts: int) -> tuple[Codes, Slots]:
    """Rows of x in the slots of pairs of ids, packed."""
    assert isinstance(x, Codes)
    pairs = ids.numel()
    groups = Groups.empty(min(pairs, experts) + pairs // LIBRARY_BLOCK_M, experts, LIBRARY_BLOCK_M, ids.device)
    place(ids, groups, LIBRARY_BLOCK_M)
    return gather(x, pairs, groups)


class LibraryTrial:
    """So many tokens of a layer, by DeepGEMM and by the tiles here.

    Args:
        experts: the layer.
        tokens: how many.
    """

    def __init__(self, experts: Experts, tokens: int) -> None:
        problem = ExpertsProblem.of(experts)
        assert problem is not None
        self.experts, self.tokens, self.problem = experts, tokens, problem
        device = experts.down.device
        draw = {"generator": torch.Generator(device).manual_seed(0), "device": device}
        scores = torch.rand(tokens, problem.experts, **draw)
        self.weights, self.ids = (one.contiguous() for one in scores.topk(problem.top_k))
        self.x = torch.randn(tokens, problem.hidden, **draw).to(problem.dtype)

    def runs(self) -> None:
        """Have the library compute them once."""
        _products_by_library(self.x, self.weights, self.ids, self.experts)

    def agrees(self) -> bool:
        """Whether both give every pair of each product, of operands whose sums show their order, and of the layer, the
        same bits.
        """
        p = self.problem
        sides = ((2 * p.intermediate, p.hidden, p.top_k), (p.hidden, p.intermediate, 1))
        if not all(self._agrees(n, k, pairs_of_a_row) for n, k, pairs_of_a_row in sides):
            return False
        given = self.x, self.weights, self.ids, self.experts
        found, expected = _products_by_library(*given), products(*given)
        assert found.slots is not None
        return _same_bits(found.expert_out, found.slots, expected.expert_out)

    def _agrees(self, n: int, k: int, pairs_of_a_row: int) -> bool:
        """The same of one product, whose experts have a matrix of which each begins with other rows."""
        p, device, pairs = self.problem, self.x.device, self.ids.numel()
        schedule = next(one for one in _SCALED if one.gate_up.block_m == LIBRARY_BLOCK_M)
        groups = group(self.ids, p.experts, schedule)
        form = self.experts.down.format
        for one in operand_sets(ScaledProblem(n, k, p.dtype, p.device), pairs // pairs_of_a_row, device):
            codes, scale, weight, weight_scale = one
            blocks = range(p.experts)
            of_experts = torch.stack([weight.view(torch.uint8).roll(GROUP * block, 0) for block in blocks])
            scales = torch.stack([weight_scale.roll(block, 0) for block in blocks])
            stored = StoredExperts(form, (of_experts.view(weight.dtype), scales), p.dtype)
            x = Codes(codes, scale, p.dtype)
            gathered, slots = _gathered(x, self.ids, p.experts)
            found = grouped_deep_gemm.product(gathered, stored, slots)
            expected = grouped_gemm(x, stored, None, groups, pairs, p.dtype, schedule.down)
            if not _same_bits(found, slots.of_pair, expected):
                return False
        return True

    def times(self) -> dict[str, float]:
        """Median microseconds of the layer's sums, without and with the library. Between events, in no graph: a layer
        takes longer than its launches, and where memory ends in a capture, PyTorch frees none until the process ends.
        """
        out, given = torch.empty_like(self.x), (self.x, self.weights, self.ids, self.experts)
        ways = {"without": products, "DeepGEMM": _products_by_library}
        found: dict[str, list[float]] = {name: [] for name in ways}
        with torch.cuda.device(self.x.device):
            for replay in range(1 + _REPLAYS):
                for name, way in ways.items():
                    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    combine(way(*given), out)  # keeps the GPU busy while the call that counts is launched
                    start.record()
                    combine(way(*given), out)
                    stop.record()
                    stop.synchronize()
                    found[name] += [1e3 * start.elapsed_time(stop)] * (replay > 0)
        return {name: median(samples) for name, samples in found.items()}


def _same_bits(rows: torch.Tensor, slots: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the rows of slots [pairs] are those expected [pairs, N], of two bytes an element."""
    return torch.equal(rows.view(torch.int16)[slots], expected.view(torch.int16))


def prepare_library(experts: Experts, max_tokens: int) -> None:
    """Choose and verify the numbers of tokens, of up to so many in a step, that DeepGEMM computes of such a layer."""
    most = min(max_tokens, _tokens_at_once(experts.down.shape[1], experts.reduction))
    grouped_deep_gemm.prepare(experts, most, partial(LibraryTrial, experts))


def _matrices_of(many: bool, weight: torch.Tensor | StoredExperts) -> torch.Tensor | StoredExperts:
    """What a product reads: of many pairs, the matrices that stored experts stand for."""
    return weight.matrices() if many and isinstance(weight, StoredExperts) else weight


def _operand(rows: torch.Tensor, reduction: MoeReduction, scale: torch.Tensor | None = None) -> torch.Tensor | Codes:
    """Rows as a product takes them, of a given scale or with their own; of rows that nobody has written, any."""
    how = reduction.quantised
    return rows if how is None else Codes(*quantising.quantise(rows, scale, how), rows.dtype)


def a_norm_may_add(x: torch.Tensor, experts: Experts) -> bool:
    """Whether :func:`add_and_norm` serves for tokens x [tokens, hidden]: there are some, and not so many that they are
    computed in parts, or by a library, and a row lies in a norm's tile.
    """
    norm = NormReduction.of_device("cuda", x.shape[1], x.dtype)
    return norm.length <= norm.block and list(_parts(x, experts)) == [(len(x), False)]


def add_and_norm(
    of: Products, residual: torch.Tensor, weight: torch.Tensor, eps: float, codes: QuantiseReduction | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum over experts, and RMSNorm of it and a residual, in one launch: the bits of :func:`moe` and of
    :func:`..norm.rms_norm`.

    Args:
        of: of :func:`products`.
        residual: [tokens, hidden] of its dtype.
        weight: [hidden]
        codes: as of :func:`..norm.cuda.rms_norm`.

    Returns:
        the normalised rows, and the sum with the residual, rounded: [tokens, hidden].

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    (tokens, hidden), dtype = of.shape, of.expert_out.dtype
    found = {tuple(residual.shape): residual.dtype, tuple(weight.shape): weight.dtype}
    if found != {(tokens, hidden): dtype, (hidden,): dtype}:
        raise ValueError(f"{tokens} rows of {hidden} in {dtype} have a residual and a weight of {found}")
    norm = NormReduction.of_device("cuda", hidden, dtype)
    residual, out = aligned(residual), torch.empty(tokens, hidden, dtype=dtype, device=residual.device)
    residual_out, made = torch.empty_like(out), quantised(out, norm, codes)
    operands = *of.operands, residual, aligned(weight), out, residual_out, *made.operands
    launch(
        combine_norm_kernel,
        triton.cdiv(tokens, norm.rows_per_program),
        (*operands, tokens, hidden // norm.stride_unit, eps),
        on=out,
        waits=True,
        **of.constants,
        **made.constants,
        **norm.options,
    )
    return out, residual_out


def combine(of: Products, out: torch.Tensor) -> None:
    """Write the weighted sums ``out`` [tokens, hidden] over experts."""
    tokens, hidden = out.shape
    launch(
        combine_kernel,
        tokens * triton.cdiv(hidden, _COMBINING.block),
        (of.expert_out, of.slots, *of.operands[1:], out),
        on=out,
        waits=True,
        LENGTH=hidden,
        **of.constants,
        BLOCK=_COMBINING.block,
    )


def _activated(hidden: torch.Tensor, activation: str, of: torch.Tensor | Codes | None = None) -> torch.Tensor:
    """[pairs, intermediate] of [pairs, 2 * intermediate], or of as many without a gate; ``of``: what was multiplied, if
    not numbers of the same dtype.
    """
    (pairs, rows), gated = hidden.shape, activation not in UNGATED
    length = rows // 2 if gated else rows
    walk, reduction = WalkSchedule.of(length), LinearReduction.of_device("cuda", rows, length, hidden.dtype)
    out = torch.empty(pairs, length, dtype=hidden.dtype, device=hidden.device)
    launch(
        activation_kernel,
        (pairs, triton.cdiv(length, walk.block)),
        (hidden, out),
        on=hidden,
        LENGTH=length,
        ACTIVATION=activation,
        BLOCK=walk.block,
        enable_fp_fusion=_fuses(hidden if of is None else of, reduction),
    )
    return out


def certify(
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    activation: str = "silu",
    form: Format | None = None,
    products: ScaledLinearReduction | None = None,
) -> int:
    """Compare every tile with the dense product of the same rows, of operands whose sums cancel: that of the first
    product with and without the activation.

    Args:
        n: rows of an expert's weight, of which some are enough.
        k: their length.
        dtype: of both.
        device: a GPU.
        activation: of the layer.
        form: that the weight is stored in; None: as it is. The dense product is that with the matrix.
        products: of the layer, if they are of codes. The dense product is that of the operation ``scaled_linear``.

    Returns:
        How many elements were compared.

    Raises:
        NotCovered: a tile has other bits.
    """
    compared, gpu = 0, Gpu.of(device.index)
    if products is None:
        schedules, cases = _certified_schedules(n, k, dtype, gpu, activation, form), _certificate_cases
    else:
        schedules = [(one, False) for one in layer_schedules(dtype, gpu, scaled=True)]
        cases = _cases_of_codes
    for number, (schedule, of_matrices) in enumerate(schedules):
        for rows, ids, x, weight in cases(schedule, min(n, 512), k, dtype, device, form):
            weight = _matrices_of(of_matrices, weight)
            groups = group(ids, len(weight), schedule)
            for tile, gate in ((schedule.gate_up, ""), (schedule.gate_up, activation), (schedule.down, "")):
                used = _first_rows(weight, weight.shape[1] if gate in UNGATED else weight.shape[1] // 2 * 2)
                found = grouped_gemm(x, used, None, groups, ids.numel(), dtype, tile, activation=gate)
                for expert in range(len(used)):
                    pairs = (ids.flatten() == expert).nonzero().squeeze(1)
                    if not len(pairs):
                        continue
                    of_expert = x[pairs // ids.shape[1]]
                    if isinstance(of_expert, Codes):
                        assert products is not None
                        operands = of_expert.codes, of_expert.scales, *used.operand(expert)
                        dense = scaled_linear.scaled_linear(*operands, None, products)
                    else:
                        dense = triton_gemm.accumulate(of_expert, used[expert].t()).to(dtype)
                    dense = _activated(dense, gate, of_expert) if gate else dense
                    if not torch.equal(found[pairs], dense):
                        stored = f" stored as {form.name}" if form is not None else ""
                        raise NotCovered(
                            f"experts of {k} inputs in {dtype}{stored} on {torch.cuda.get_device_name(device)}",
                            f"schedule {number} ({tile}{', ' * bool(gate)}{gate}) of {rows} rows has other bits than a "
                            "dense layer",
                            "serve a dense model, or serve on a CPU",
                        )
                    compared += dense.numel()
    return compared


def _certified_schedules(
    n: int, k: int, dtype: torch.dtype, gpu: Gpu, activation: str, form: Format | None
) -> list[tuple[LayerSchedule, bool]]:
    """Those that products of a weight [N, K] may have: it may be the first of a layer, or the second. And of each
    whether it reads the matrices that stored experts stand for.
    """
    sides = (k, n // 2), (n, k)
    packed = [is_packed(form, hidden, intermediate, dtype, gpu, activation) for hidden, intermediate in sides]
    usual = layer_schedules(dtype, gpu)
    found = [(one, False) for one in layer_schedules(dtype, gpu, True)] if any(packed) else []
    found += [] if all(packed) else [(one, False) for one in usual]
    return found + [(one, True) for one in usual if any(packed) and not one.few_pairs and one.most > _MANY]


def _first_rows(weight: torch.Tensor | StoredExperts, n: int) -> Any:
    """Those of every expert."""
    if isinstance(weight, StoredExperts):
        return replace(weight, tensors=tuple(one[:, :n].contiguous() for one in weight.tensors))
    return weight[:, :n].contiguous()


_CERTIFICATE_SCALE = 64
"""Of the certificate's operands: what is left of their sums is large enough that fp16 has its products, too."""


_WIDE = 64
"""Powers of two that the scales of MXFP4 are larger by in another case of the certificate: of other scales than
checkpoints have, which :mod:`.sm90_packed` decodes otherwise.
"""


def _certificate_cases(
    schedule: LayerSchedule, n: int, k: int, dtype: torch.dtype, device: torch.device, form: Format | None
) -> Iterator[tuple[int, torch.Tensor, Any, Any]]:
    """(rows, ids, x, weight) of few and many tokens of three experts, of which one has none."""
    most = schedule.gate_up.block_m + 3
    exponents = {"exponents": form.exponents // (2 if dtype == torch.float16 else 1)} if form else {}
    for rows in (1, min(most, schedule.few_pairs // 2) if schedule.few_pairs else most):
        x, weight = cancelling(rows, 2 * n, k - k % 2, dtype, device, seed=rows, **exponents)
        x, weight = (F.pad(one if form else _CERTIFICATE_SCALE * one, (0, k % 2)) for one in (x, weight))
        ids = torch.tensor([[0, 2], [2, 0]], device=device).repeat(-(-rows // 2), 1)[:rows].contiguous()
        weight = torch.stack((weight[:n], weight[:n], weight[n:]))
        if form is not None:
            stored = zip(*(form.stored(of_expert) for of_expert in weight), strict=True)
            weight = StoredExperts(form, tuple(torch.stack(parts) for parts in stored), dtype)
        yield rows, ids, x, weight
        if form is not None and form.name == "mxfp4" and schedule.gate_up.packed_ctas:
            codes, scales = weight.tensors
            yield rows, ids, x * 2.0**-_WIDE, replace(weight, tensors=(codes, scales + _WIDE))


def _cases_of_codes(
    schedule: LayerSchedule, n: int, k: int, dtype: torch.dtype, device: torch.device, form: Format | None
) -> Iterator[tuple[int, torch.Tensor, Any, Any]]:
    """The same of codes of e4m3: of sums that cancel, in which an order of additions shows, of scales that all differ,
    and of one sign, in which a missing promotion does. Each half of the weight has whole blocks, if it has blocks.
    """
    assert form is not None
    n, groups = 2 * GROUP, -(-k // GROUP)
    most, half = schedule.gate_up.block_m + 3, k // 2
    for rows in (1, min(most, schedule.few_pairs // 2) if schedule.few_pairs else most):
        ids = torch.tensor([[0, 2], [2, 0]], device=device).repeat(-(-rows // 2), 1)[:rows].contiguous()
        for kind in ("cancelling", "scales", "one sign"):
            draw = {"generator": torch.Generator().manual_seed(rows), "dtype": torch.float32}
            x, weight = (
                torch.randn(*size, k, **draw) * 10 ** (2 * torch.rand(*size, k, **draw)) for size in ((rows,), (3, n))
            )
            sizes = ((rows, groups), (3, n // GROUP, groups)) if form is FP8_BLOCK else ((rows,), (3, n, 1))
            scales = [10 ** (torch.rand(size, **draw) - 3) for size in sizes]
            if kind == "cancelling":
                x[:, half : 2 * half], weight[..., half : 2 * half] = -x[:, :half], weight[..., :half]
                scales = [torch.full(size, 0.0123, dtype=torch.float32) for size in sizes]
            elif kind == "one sign":
                x, weight = x.abs(), weight.abs()
            codes, of_weight = (one.clamp(-448, 448).to(device).to(E4M3) for one in (x, weight))
            of_x, of_blocks = (one.to(device) for one in scales)
            yield rows, ids, Codes(codes, of_x, dtype), StoredExperts(form, (of_weight, of_blocks), dtype)
