"""Products of codes of FP8 by Hopper's wgmma, in Gluon. For every tile and either operand on wgmma's long side of 64::

    total = 0                                              # fp32, of x [M, K] and a weight [N, K]
    for k in range(0, K, 128):
        sum = x[m, k : k + 128] @ weight[n, k : k + 128].T # from zero, in four steps of 32 elements
        total = fma(x_scale[m, k / 128] * weight_scale[n / 128, k / 128], sum, total)
    out[m, n] = round(total + bias[n])

and with a scale for each row of x and of the weight ``total += sum`` and ``round(total * x_scale[m] * weight_scale[n] +
bias[n])``, from left to right.

The loading warp, its ring in shared memory and what is written of a tile with swapped operands are those of the matmuls
of 16 bits (:mod:`..linear.sm90_kernel`); a step's scales are copied beside its operands. Few rows of x are wgmma's
short side. A tile of many has them on the long side: a thread then needs two scales of a step, not one of each column.
Where registers hold two accumulators, one is promoted while the tensor cores add to the other; where they do not, two
warpgroups take turns of themselves.
"""

from functools import cache

import torch
import triton
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from ..common.dependent_launch import LaunchSchedule
from ..common.gluon_names import copy_elements
from ..common.gpu import Gpu
from ..common.launch import launch
from ..common.sm90_ring import next_stage
from ..common.triton_names import aggregate, value
from ..linear.problem import leading_dim
from ..linear.sm90_kernel import Ring, load_partition, write
from .sm90_schedule import LONG_SIDE, STEP_K, Sm90Schedule

_STEP_K = gl.constexpr(STEP_K)
"""Elements of K that are copied at once: rows of 128 bytes, the longest that wgmma reads without conflicts."""
_LONG_SIDE = gl.constexpr(LONG_SIDE)
_TOGETHER = gl.constexpr(8)
"""Tiles of rows of x that share the columns of the weight in the L2 cache."""
_COPYING_REGISTERS = gl.constexpr(40)
_MULTIPLYING_REGISTERS = gl.constexpr(232)
"""Of a thread, where two warpgroups multiply."""
_REGISTERS = {1: 128, 2: 168}
"""Of a thread at the launch, by the warpgroups that multiply; four warps have those that one that copies leaves."""
_SCALED_N = 128
"""Rows of a weight that share a scale."""


@aggregate
class _Problem:
    """What is multiplied, and by which tiles."""

    out_ptr: value
    bias_ptr: value
    x_scale_ptr: value
    w_scale_ptr: value
    stride_x: value
    """Between scales of neighbouring rows of x."""
    stride_xk: value
    """Between those of neighbouring steps."""
    stride_w: value
    """Between those of neighbouring blocks of the weight's rows; those of steps are packed."""
    M: value
    N: value
    K: value
    tiles_m: value
    tiles_n: value
    tiles: value
    x_scale_smem: gl.shared_memory_descriptor
    """[NUM_STAGES, rows of x in a tile]"""
    w_scale_smem: gl.shared_memory_descriptor
    """[NUM_STAGES, 1]"""
    SCALED_N: gl.constexpr
    """Rows of the weight that share a scale in a step; 1 where a row has one in all steps."""
    SWAPPED: gl.constexpr
    OVERLAPS: gl.constexpr
    AHEAD: gl.constexpr
    GATED: gl.constexpr

    @gluon.jit
    def first_of(self, tile, ring):
        """Where a tile begins, in wgmma's short side and in its long one. Tiles one after the other have the same rows
        of the weight, and so many of them the same of x.
        """
        group = _TOGETHER * self.tiles_n
        first = tile // group * _TOGETHER
        height = gl.minimum(self.tiles_m - first, _TOGETHER)
        in_group = tile % group
        tile_m, tile_n = first + in_group % height, in_group // height
        if self.SWAPPED:
            short, long = tile_m, tile_n
        else:
            short, long = tile_n, tile_m
        return short * ring.BLOCK_M, long * ring.BLOCK_N

    @gluon.jit
    def load_beside(self, ring, stage, first_short, first_long, start_k):
        """One warp: starts the copies of a step's scales."""
        if self.SCALED_N > 1:
            lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
            if self.SWAPPED:
                first_m, first_n = first_short, first_long
            else:
                first_m, first_n = first_long, first_short
            step = start_k // _STEP_K
            rows = gl.minimum(first_m + gl.arange(0, self.x_scale_smem.shape[1], lanes), self.M - 1)
            x_scale = self.x_scale_ptr + rows.to(gl.int64) * self.stride_x + step * self.stride_xk
            copy_elements(self.x_scale_smem.index(stage), x_scale)
            block = first_n // self.SCALED_N + gl.arange(0, 1, lanes)
            copy_elements(self.w_scale_smem.index(stage), self.w_scale_ptr + block * self.stride_w + step)
            async_copy.mbarrier_arrive(ring.full_bar.index(stage), increment_count=False)


@gluon.jit
def _start(ring, stage, acc, GROUP: gl.constexpr):
    """The sum of a step's products for the warpgroup's rows, which takes the place of what acc held."""
    a, b = ring.a_smem.index(stage), ring.b_smem.index(stage * ring.WARPGROUPS + GROUP)
    # no max_num_imprecise_acc: one of all of a step would be added to what acc held
    return warpgroup_mma(b, a.permute([1, 0]), acc, use_acc=False, is_async=True)


@gluon.jit
def _scales_of(problem, stage, GROUP: gl.constexpr, layout: gl.constexpr):
    """What a step's sums are multiplied with, for each row of x in the warpgroup's part of a tile."""
    scale = 1.0
    if problem.SCALED_N > 1:
        x_scale = problem.x_scale_smem.index(stage)
        if problem.SWAPPED:
            of_rows: gl.constexpr = gl.SliceLayout(0, layout)
            scale = x_scale.load(of_rows)
        else:
            of_rows: gl.constexpr = gl.SliceLayout(1, layout)
            scale = x_scale.slice(GROUP * _LONG_SIDE, _LONG_SIDE).load(of_rows)
        scale *= problem.w_scale_smem.index(stage).load(of_rows)
        scale = gl.expand_dims(scale, 0 if problem.SWAPPED else 1)
    return scale


@gluon.jit
def _promoted(problem, total, scale, acc):
    if problem.SCALED_N > 1:
        total = gl.fma(scale.broadcast_to(total.shape[0], total.shape[1]), acc, total)
    else:
        total += acc
    return total


@gluon.jit
def _one_more(problem, ring, total, started, other, stage, phase, before, GROUP: gl.constexpr, layout: gl.constexpr):
    """Starts the next step's sum, and promotes the one before. ``before`` is where that one's operands are."""
    mbarrier.wait(ring.full_bar.index(stage), phase)
    other = _start(ring, stage, other, GROUP)
    scale = _scales_of(problem, before, GROUP, layout)
    started = warpgroup_mma_wait(1, deps=(started,))
    # the second wait is over at once: without it LLVM moves the sum behind the next wgmma, where ptxas waits for all
    total = warpgroup_mma_wait(1, deps=(_promoted(problem, total, scale, started),))
    mbarrier.arrive(ring.empty_bar.index(before))
    before = stage
    stage, phase = next_stage(stage, phase, ring.NUM_STAGES)
    return total, started, other, stage, phase, before


@gluon.jit
def _last(problem, ring, total, started, before, GROUP: gl.constexpr, layout: gl.constexpr):
    scale = _scales_of(problem, before, GROUP, layout)
    started = warpgroup_mma_wait(0, deps=(started,))
    total = _promoted(problem, total, scale, started)
    mbarrier.arrive(ring.empty_bar.index(before))
    return total


@gluon.jit
def _sum_in_turn(problem, ring, stage, phase, GROUP: gl.constexpr, layout: gl.constexpr):
    """All of K in two accumulators."""
    SHAPE: gl.constexpr = [_LONG_SIDE, ring.BLOCK_M]
    steps = (problem.K + _STEP_K - 1) // _STEP_K
    total = gl.full(SHAPE, 0.0, gl.float32, layout)
    even = gl.full(SHAPE, 0.0, gl.float32, layout)
    odd = gl.full(SHAPE, 0.0, gl.float32, layout)
    mbarrier.wait(ring.full_bar.index(stage), phase)
    even = _start(ring, stage, even, GROUP)
    before = stage
    stage, phase = next_stage(stage, phase, ring.NUM_STAGES)
    for _ in range((steps - 1) // 2):
        total, even, odd, stage, phase, before = _one_more(
            problem, ring, total, even, odd, stage, phase, before, GROUP, layout
        )  # fmt: skip
        total, odd, even, stage, phase, before = _one_more(
            problem, ring, total, odd, even, stage, phase, before, GROUP, layout
        )  # fmt: skip
    if steps % 2 == 0:
        total, _promoted_one, last, stage, phase, before = _one_more(
            problem, ring, total, even, odd, stage, phase, before, GROUP, layout
        )  # fmt: skip
        total = _last(problem, ring, total, last, before, GROUP, layout)
    else:
        total = _last(problem, ring, total, even, before, GROUP, layout)
    return total, stage, phase


@gluon.jit
def _sum(problem, ring, stage, phase, GROUP: gl.constexpr, layout: gl.constexpr):
    """The same in one accumulator."""
    SHAPE: gl.constexpr = [_LONG_SIDE, ring.BLOCK_M]
    total = gl.full(SHAPE, 0.0, gl.float32, layout)
    acc = gl.full(SHAPE, 0.0, gl.float32, layout)
    for _ in range(0, problem.K, _STEP_K):
        mbarrier.wait(ring.full_bar.index(stage), phase)
        total = _last(problem, ring, total, _start(ring, stage, acc, GROUP), stage, GROUP, layout)
        stage, phase = next_stage(stage, phase, ring.NUM_STAGES)
    return total, stage, phase


@gluon.jit
def _of_columns(ptr, first, stop, COUNT: gl.constexpr, layout: gl.constexpr):
    """COUNT numbers in fp32, zero from ``stop`` on."""
    offs = first + gl.arange(0, COUNT, layout)
    return gl.load(ptr + offs, mask=offs < stop, other=0.0).to(gl.float32)


@gluon.jit
def _mma_partition(problem, ring, ACCUMULATORS: gl.constexpr, GROUP: gl.constexpr):
    """A warpgroup: all of K for its part of whole tiles."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ring.BLOCK_M, 32]
    )
    of_long: gl.constexpr = gl.SliceLayout(1, layout)
    of_short: gl.constexpr = gl.SliceLayout(0, layout)
    dtype: gl.constexpr = problem.out_ptr.dtype.element_ty
    if problem.OVERLAPS:
        gdc_wait()
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for tile in range(gl.program_id(0), problem.tiles, gl.num_programs(0)):
        if ACCUMULATORS == 2:
            total, stage, phase = _sum_in_turn(problem, ring, stage, phase, GROUP, layout)
        else:
            total, stage, phase = _sum(problem, ring, stage, phase, GROUP, layout)
        first_short, first_long = problem.first_of(tile, ring)
        first_long += GROUP * _LONG_SIDE
        if problem.SWAPPED:
            if problem.SCALED_N == 1:
                total *= _of_columns(problem.x_scale_ptr, first_short, problem.M, ring.BLOCK_M, of_short)[None, :]
                total *= _of_columns(problem.w_scale_ptr, first_long, problem.N, _LONG_SIDE, of_long)[:, None]
            if problem.bias_ptr is not None:
                total += _of_columns(problem.bias_ptr, first_long, problem.N, _LONG_SIDE, of_long)[:, None]
            write(problem, total.to(dtype), first_short, first_long, problem.N, ring.BLOCK_N // ring.WARPGROUPS)
        else:
            if problem.SCALED_N == 1:
                total *= _of_columns(problem.x_scale_ptr, first_long, problem.M, _LONG_SIDE, of_long)[:, None]
                total *= _of_columns(problem.w_scale_ptr, first_short, problem.N, ring.BLOCK_M, of_short)[None, :]
            if problem.bias_ptr is not None:
                total += _of_columns(problem.bias_ptr, first_short, problem.N, ring.BLOCK_M, of_short)[None, :]
            _write_rows(problem, total.to(dtype), first_long, first_short)


@gluon.jit
def _write_rows(problem, made, first_m, first_n):
    """Writes made [_LONG_SIDE, columns], as many of a row side by side as a warp can."""
    COLUMNS: gl.constexpr = made.shape[1]
    LANES: gl.constexpr = COLUMNS // 8
    packed: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    made = gl.convert_layout(made, packed)
    offs_m = first_m + gl.arange(0, _LONG_SIDE, gl.SliceLayout(1, packed))
    offs_n = first_n + gl.arange(0, COLUMNS, gl.SliceLayout(0, packed))
    offs = offs_m.to(gl.int64)[:, None] * problem.N + offs_n[None, :]
    gl.store(problem.out_ptr + offs, made, mask=(offs_m < problem.M)[:, None] & (offs_n < problem.N)[None, :])


@gluon.jit(
    do_not_specialize=["M", "K", "tiles_m", "tiles_n", "tiles", "stride_x", "stride_xk", "stride_w"],
    do_not_specialize_on_alignment=["x_scale_ptr", "w_scale_ptr", "bias_ptr"],
)
def scaled_gemm_sm90_kernel(
    short_desc,
    long_desc,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    stride_x,
    stride_xk,
    stride_w,
    M,
    N,
    K,
    tiles_m,
    tiles_n,
    tiles,
    SCALED_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    SWAPPED: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    ACCUMULATORS: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """x: [M, K], weight: [N, K], that on wgmma's short side first, bias: [N] or None, out: [M, N].
    With SCALED_N rows of the weight to a scale there are x_scale [M, K / 128] of any strides and weight_scale
    [N / SCALED_N, K / 128] of packed rows; else, where it is 1, x_scale [M] and weight_scale [N]. Elements beyond an
    edge read as zero and are not written.
    """
    SHORT: gl.constexpr = BLOCK_M if SWAPPED else BLOCK_N
    LONG: gl.constexpr = BLOCK_N if SWAPPED else BLOCK_M
    FILLERS: gl.constexpr = 1 + 32 if SCALED_N > 1 else 1
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    short_smem = gl.allocate_shared_memory(short_desc.dtype, [NUM_STAGES, SHORT, _STEP_K], short_desc.layout)
    long_smem = gl.allocate_shared_memory(
        long_desc.dtype, [NUM_STAGES * WARPGROUPS, _LONG_SIDE, _STEP_K], long_desc.layout
    )  # fmt: skip
    x_scale_smem = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, BLOCK_M], plain)
    w_scale_smem = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 1], plain)
    full_bar = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty_bar = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full_bar.index(stage), count=FILLERS)
        mbarrier.init(empty_bar.index(stage), count=WARPGROUPS)
    fence_async_shared()
    problem = _Problem(
        out_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, stride_x, stride_xk, stride_w, M, N, K, tiles_m, tiles_n, tiles,
        x_scale_smem, w_scale_smem, SCALED_N, SWAPPED, OVERLAPS, OVERLAPS and SWAPPED, False,
    )  # fmt: skip
    ring = Ring(
        short_smem, long_smem, None, full_bar, empty_bar, SHORT, LONG, 1, 1, 1, _LONG_SIDE, NUM_STAGES, WARPGROUPS, 1
    )  # fmt: skip
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (_mma_partition, (problem, ring, ACCUMULATORS, gl.constexpr(0))),
                (load_partition, (short_desc, long_desc, problem, ring)),
            ],
            [1],
            [_COPYING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_mma_partition, (problem, ring, ACCUMULATORS, gl.constexpr(0))),
                (_mma_partition, (problem, ring, ACCUMULATORS, gl.constexpr(1))),
                (load_partition, (short_desc, long_desc, problem, ring)),
            ],
            [4, 1],
            [_MULTIPLYING_REGISTERS, _COPYING_REGISTERS],
        )


@cache
def _shared_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=STEP_K, element_bitwidth=8, rank=2)


def _describe(matrix: torch.Tensor, block_rows: int) -> TensorDescriptor:
    stride, _ = leading_dim(matrix)
    return TensorDescriptor(matrix, list(matrix.shape), [stride, 1], [block_rows, STEP_K], _shared_layout())


def scaled_gemm_sm90(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Sm90Schedule,
    overlaps: bool = False,
) -> torch.Tensor:
    """``(codes * scale) @ (weight * weight_scale).T + bias``.

    Args:
        codes: [M, K] e4m3, at least one row, with K as the contiguous side; the address and the stride of rows are
            multiples of 16 bytes.
        scale: fp32, [M, ceil(K / 128)] of any strides, or [M].
        weight: [N, K] of the same kind.
        weight_scale: fp32, [ceil(N / 128), ceil(K / 128)] with packed rows, or [N] packed.
        bias: [N], or None.
        out: [M, N] fp32, bf16 or fp16, packed.
        tile: decides the speed.
        overlaps: whether the launch does not wait for kernels before, which must not write the weight.

    Returns:
        ``out``.
    """
    (m, k), n = codes.shape, len(weight)
    blocks = scale.dim() == 2
    short, long = (codes, weight) if tile.swapped else (weight, codes)
    tiles_m, tiles_n = triton.cdiv(m, tile.block_m), triton.cdiv(n, tile.block_n)
    launch(
        scaled_gemm_sm90_kernel,
        min(tiles_m * tiles_n, tile.ctas_per_sm * Gpu.of(codes.get_device()).num_sms),
        (
            _describe(short, tile.short),
            _describe(long, min(tile.long, LONG_SIDE)),
            scale if blocks else scale.contiguous(),
            weight_scale,
            None if bias is None else bias.contiguous(),
            out,
            scale.stride(0) if blocks else 0,
            scale.stride(1) if blocks else 0,
            weight_scale.stride(0) if blocks else 0,
            m,
            n,
            k,
            tiles_m,
            tiles_n,
            tiles_m * tiles_n,
        ),
        on=codes,
        SCALED_N=_SCALED_N if blocks else 1,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        NUM_STAGES=tile.num_stages,
        SWAPPED=tile.swapped,
        WARPGROUPS=tile.warpgroups,
        ACCUMULATORS=tile.accumulators,
        **LaunchSchedule(overlaps).options,
        maxnreg=_REGISTERS[tile.warpgroups],
    )
    return out
