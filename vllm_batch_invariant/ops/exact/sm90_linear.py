"""Exact products on a Hopper, in Gluon: the integers of :mod:`.triton_linear` by another schedule.

A tile of the result is computed with operands swapped, so that wgmma's long side of 64 takes rows of the weight:

    hi = w1 x1,  mid = w1 x0 + w0 x1,  lo = w0 x0          (int32, [BLOCK_N, BLOCK_M])
    T = high 2^16 + low,  0 <= low < 2^16                  (int32 both)
    high += (w1 x2) 2^8 + w0 x2                            (where an x2 is not 0)
    fp32(T) = fp32(high >> 8) 2^24 + fp32(the other 24 bits): of two exact numbers, so that it is rounded once

|T| < 2^46, so that ``high`` fits. A row that has third digits has a mean magnitude below 2^9 + 1 on its grid, hence the
|x2| of K elements add up to at most K / 64, and no sum of products with them leaves an int32.

One warp copies, and one or two warpgroups multiply, each of them 64 rows of the weight: each digit is copied once a
tile and used twice. The copies go on while a segment's sum is rounded, and over the end of a tile. Where launches
overlap, the first weights are copied before the activations are there.
"""

from functools import cache

import torch
import triton
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..common.dependent_launch import LaunchSchedule
from ..common.gluon_names import copy_block
from ..common.gpu import Gpu
from ..common.launch import launch
from ..common.sm90_ring import next_stage
from ..common.triton_names import aggregate, value
from .schedule import HopperSchedule

_STEP_K = gl.constexpr(128)
"""Elements of K that are copied at once: rows of 128 bytes, the longest that wgmma reads without conflicts."""
_GROUP_M = gl.constexpr(8)
"""Tiles of rows of x that share the columns of the weight in the L2 cache."""
_PENDING = gl.constexpr(4)
"""Unfinished sums of segments that wait in memory, by the number of their last segment modulo this."""


@aggregate
class _Problem:
    """What is multiplied, and by which tiles."""

    high_digit_mask_ptr: value
    """int64 [M, PARTS]"""
    x_scale_ptr: value
    w_scale_ptr: value
    out_ptr: value
    M: value
    N: value
    tiles_m: value
    tiles_n: value
    length: value
    """Elements of a segment."""
    mask_step: value
    PARTS: gl.constexpr
    HAS_BIAS: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    LONG_SIDE: gl.constexpr
    IN_REGISTERS: gl.constexpr
    OVERLAPS: gl.constexpr
    """The kernel before may still run: activations, masks and scales of them are there once it was waited for."""


@aggregate
class _Ring:
    """Shared memory for ``NUM_STAGES`` steps of K, each with two digits of both operands, and a step's barriers."""

    x_smem: gl.shared_memory_descriptor
    """[NUM_STAGES * 2, BLOCK_M, _STEP_K]"""
    w_smem: gl.shared_memory_descriptor
    """[NUM_STAGES * 2, LONG_SIDE, _STEP_K]"""
    full_bar: gl.shared_memory_descriptor
    """[NUM_STAGES, 1]"""
    empty_bar: gl.shared_memory_descriptor
    NUM_STAGES: gl.constexpr


@gluon.jit
def _first_of(problem, tile):
    """A tile's first rows of x and of the weight."""
    group = _GROUP_M * problem.tiles_n
    first = tile // group * _GROUP_M
    height = gl.minimum(problem.tiles_m - first, _GROUP_M)
    in_group = tile % group
    return (first + in_group % height) * problem.BLOCK_M, in_group // height * problem.BLOCK_N


@gluon.jit
def _or(a, b):
    return a | b


@gluon.jit
def _mask(problem, offs_m, part):
    """int64 [BLOCK_M]: where rows of x have third digits in a segment."""
    return gl.load(
        problem.high_digit_mask_ptr + offs_m.to(gl.int64) * problem.PARTS + part, mask=offs_m < problem.M, other=0
    )


@gluon.jit
def _is_marked(problem, some, step):
    """Whether a step of K has third digits, of the masks of a tile's rows together."""
    return (some >> (step * _STEP_K // problem.mask_step)) & 1 != 0


@gluon.jit
def _copy_weights(w_desc, problem, ring, stage, first_n, first_k):
    """Starts the copies of both digits of a step of K."""
    for plane in gl.static_range(2):
        w_smem = ring.w_smem.index(stage * 2 + plane).slice(0, problem.BLOCK_N)
        copy_block(w_desc, [plane * problem.N + first_n, first_k], ring.full_bar.index(stage), w_smem)


@gluon.jit
def _copy_partition(x_desc, third_desc, w_desc, problem, ring):
    """One warp: keeps the ring full."""
    steps = (problem.length + _STEP_K - 1) // _STEP_K
    BYTES: gl.constexpr = (problem.BLOCK_M + problem.BLOCK_N) * _STEP_K
    rows: gl.constexpr = gl.BlockedLayout([max(problem.BLOCK_M // 32, 1)], [32], [1], [0])
    in_tile_m = gl.arange(0, problem.BLOCK_M, rows)
    ahead = gl.to_tensor(0)  # steps whose weights are on their way already
    if problem.OVERLAPS:
        ahead = gl.minimum(steps, ring.NUM_STAGES)
        _, first_n = _first_of(problem, gl.program_id(0))
        for step in range(ahead):
            mbarrier.expect(ring.full_bar.index(step), 2 * BYTES)
            _copy_weights(w_desc, problem, ring, step, first_n, step * _STEP_K)
        gdc_wait()
        gdc_launch_dependents()
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    for tile in range(gl.program_id(0), problem.tiles_m * problem.tiles_n, gl.num_programs(0)):
        first_m, first_n = _first_of(problem, tile)
        for part in range(problem.PARTS):
            high_digit_mask = _mask(problem, first_m + in_tile_m, part)  # on its way while the copies start
            for step in range(steps):
                first_k = part * problem.length + step * _STEP_K
                mbarrier.wait(ring.empty_bar.index(stage), phase)
                full = ring.full_bar.index(stage)
                if ahead > 0:
                    ahead -= 1
                else:
                    mbarrier.expect(full, 2 * BYTES)
                    _copy_weights(w_desc, problem, ring, stage, first_n, first_k)
                for plane in gl.static_range(2):
                    x_smem = ring.x_smem.index(stage * 2 + plane)
                    copy_block(x_desc, [plane * problem.M + first_m, first_k], full, x_smem)
                stage, phase = next_stage(stage, phase, ring.NUM_STAGES)
            some = gl.reduce(high_digit_mask, 0, _or)
            if some != 0:
                for plane in gl.static_range(2):
                    for step in range(steps):
                        if _is_marked(problem, some, step):
                            first_k = part * problem.length + step * _STEP_K
                            mbarrier.wait(ring.empty_bar.index(stage), phase)
                            full = ring.full_bar.index(stage)
                            mbarrier.expect(full, BYTES)
                            w_smem = ring.w_smem.index(stage * 2).slice(0, problem.BLOCK_N)
                            copy_block(w_desc, [plane * problem.N + first_n, first_k], full, w_smem)
                            copy_block(third_desc, [first_m, first_k], full, ring.x_smem.index(stage * 2))
                            stage, phase = next_stage(stage, phase, ring.NUM_STAGES)


@gluon.jit
def _two_digits(ring, stage, phase, steps, LONG_SIDE: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):
    """hi, mid and lo over a segment, and the next place in the ring. A step's place is free once the next step's
    wgmmas are queued.
    """
    hi = gl.full([LONG_SIDE, BLOCK_M], 0, gl.int32, LAYOUT)
    mid = gl.full([LONG_SIDE, BLOCK_M], 0, gl.int32, LAYOUT)
    lo = gl.full([LONG_SIDE, BLOCK_M], 0, gl.int32, LAYOUT)
    before = gl.to_tensor(0)  # not stage: Triton would take two names of one value for one that no step changes
    for step in range(steps):
        mbarrier.wait(ring.full_bar.index(stage), phase)
        w1 = ring.w_smem.index(stage * 2)  # [LONG_SIDE, _STEP_K]
        w0 = ring.w_smem.index(stage * 2 + 1)
        x1 = ring.x_smem.index(stage * 2).permute([1, 0])  # [_STEP_K, BLOCK_M]
        x0 = ring.x_smem.index(stage * 2 + 1).permute([1, 0])
        hi = warpgroup_mma(w1, x1, hi, is_async=True)
        mid = warpgroup_mma(w1, x0, mid, is_async=True)
        lo = warpgroup_mma(w0, x0, lo, is_async=True)
        mid = warpgroup_mma(w0, x1, mid, is_async=True)
        hi, mid, lo = warpgroup_mma_wait(4, deps=(hi, mid, lo))
        mbarrier.arrive(ring.empty_bar.index(before), pred=step > 0)
        before = stage
        stage, phase = next_stage(stage, phase, ring.NUM_STAGES)
    hi, mid, lo = warpgroup_mma_wait(0, deps=(hi, mid, lo))
    mbarrier.arrive(ring.empty_bar.index(before))
    return hi, mid, lo, stage, phase


@gluon.jit
def _third_digit(problem, ring, some, stage, phase, steps, LAYOUT: gl.constexpr):
    """(w1 x2) 2**8 + w0 x2 over the marked steps of a segment, and the next place in the ring."""
    third = gl.full([problem.LONG_SIDE, problem.BLOCK_M], 0, gl.int32, LAYOUT)
    for plane in gl.static_range(2):
        for step in range(steps):
            if _is_marked(problem, some, step):
                mbarrier.wait(ring.full_bar.index(stage), phase)
                x2 = ring.x_smem.index(stage * 2).permute([1, 0])
                third = warpgroup_mma(ring.w_smem.index(stage * 2), x2, third, is_async=True)
                third = warpgroup_mma_wait(0, deps=(third,))
                mbarrier.arrive(ring.empty_bar.index(stage))
                stage, phase = next_stage(stage, phase, ring.NUM_STAGES)
        if plane == 0:
            third = third << 8
    return third, stage, phase


@gluon.jit
def _bf16_bits(x):
    """uint16 of fp32, rounded to nearest even."""
    bits = x.to(gl.uint32, bitcast=True)
    return gl.where(x != x, 0x7FC0, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to(gl.uint16)


@gluon.jit
def _write(total, problem, bias_ptr, first_m, first_n, in_tile_m, in_tile_n):
    """A tile of the result, rounded."""
    mask_n = (in_tile_n < problem.BLOCK_N) & (in_tile_n < problem.N - first_n)
    if problem.HAS_BIAS:
        bias = gl.load(bias_ptr + first_n + in_tile_n, mask=mask_n, other=0.0)
        total += bias.to(gl.float32)[:, None]
    offs = (first_m + in_tile_m).to(gl.int64)[None, :] * problem.N + (first_n + in_tile_n)[:, None]
    mask = mask_n[:, None] & (in_tile_m < problem.M - first_m)[None, :]
    gl.store(problem.out_ptr + offs, _bf16_bits(total).to(gl.bfloat16, bitcast=True), mask=mask)


@gluon.jit
def _pending_ptrs(pending_ptr, last, in_tile_m, in_tile_n, SIZE: gl.constexpr):
    """Where the sum of segments up to ``last`` of a tile of SIZE elements is kept: a thread reads what it wrote."""
    # What follows the segment is added first: else an offset for each element waits in a register for the next one.
    offs_m = in_tile_m + last % _PENDING * SIZE
    return pending_ptr + (offs_m[None, :] + in_tile_n[:, None] * in_tile_m.shape[0])


@gluon.jit
def _multiply_partition(problem, bias_ptr, pending_ptr, ring):
    """Whole tiles. Segments are added as soon as two neighbours, or two sums, are there."""
    steps = (problem.length + _STEP_K - 1) // _STEP_K
    PARTS: gl.constexpr = problem.PARTS
    BLOCK_M: gl.constexpr = problem.BLOCK_M
    IN_REGISTERS: gl.constexpr = problem.IN_REGISTERS
    LONG_SIDE: gl.constexpr = problem.LONG_SIDE
    SIZE: gl.constexpr = LONG_SIDE * BLOCK_M
    NUM_WARPS: gl.constexpr = LONG_SIDE // 16
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, BLOCK_M, 32]
    )
    rows: gl.constexpr = gl.BlockedLayout([max(BLOCK_M // 32, 1)], [32], [NUM_WARPS], [0])
    in_tile_n = gl.arange(0, LONG_SIDE, gl.SliceLayout(1, LAYOUT))
    in_tile_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
    if PARTS > 1 and not IN_REGISTERS:
        pending_ptr += gl.program_id(0).to(gl.int64) * (_PENDING * SIZE)
    if problem.OVERLAPS:
        gdc_wait()
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for tile in range(gl.program_id(0), problem.tiles_m * problem.tiles_n, gl.num_programs(0)):
        first_m, first_n = _first_of(problem, tile)
        if PARTS > 1 and IN_REGISTERS:  # a segment's, the sum of two and of four; written before they are read
            ones = gl.full([LONG_SIDE, BLOCK_M], 0.0, gl.float32, LAYOUT)
            twos, fours = ones, ones
        for part in range(PARTS):
            high_digit_mask = _mask(problem, first_m + gl.arange(0, BLOCK_M, rows), part)
            hi, mid, lo, stage, phase = _two_digits(ring, stage, phase, steps, LONG_SIDE, BLOCK_M, LAYOUT)
            low = lo + ((mid & 255) << 8)
            high = hi + (mid >> 8) + (low >> 16)
            low = low & 0xFFFF
            some = gl.reduce(high_digit_mask, 0, _or)
            if some != 0:
                third, stage, phase = _third_digit(problem, ring, some, stage, phase, steps, LAYOUT)
                high += third
            one = (high >> 8).to(gl.float32) * 16777216.0 + (((high & 255) << 16) | low).to(gl.float32)
            w_scale_ptrs = problem.w_scale_ptr + first_n.to(gl.int64) * PARTS + in_tile_n * PARTS + part
            w_scale = gl.load(w_scale_ptrs, mask=in_tile_n < problem.N - first_n, other=0.0)
            x_scale_ptrs = problem.x_scale_ptr + first_m.to(gl.int64) * PARTS + in_tile_m * PARTS + part
            x_scale = gl.load(x_scale_ptrs, mask=in_tile_m < problem.M - first_m, other=0.0)
            one = one * w_scale[:, None] * x_scale[None, :]
            if PARTS == 1:
                _write(one, problem, bias_ptr, first_m, first_n, in_tile_m, in_tile_n)
            elif IN_REGISTERS:
                two = ones + one
                four = twos + two
                if part == PARTS - 1:
                    total = fours + four
                    _write(total, problem, bias_ptr, first_m, first_n, in_tile_m, in_tile_n)
                ones = gl.where(part % 2 == 0, one, ones)
                twos = gl.where(part % 4 == 1, two, twos)
                fours = gl.where(part % 8 == 3, four, fours)
            elif part % 2 == 0:
                gl.store(_pending_ptrs(pending_ptr, part, in_tile_m, in_tile_n, SIZE), one)
            else:
                two = gl.load(_pending_ptrs(pending_ptr, part - 1, in_tile_m, in_tile_n, SIZE)) + one
                if part % 4 == 1:
                    gl.store(_pending_ptrs(pending_ptr, part, in_tile_m, in_tile_n, SIZE), two)
                else:
                    four = gl.load(_pending_ptrs(pending_ptr, part - 2, in_tile_m, in_tile_n, SIZE)) + two
                    if part == 3:
                        gl.store(_pending_ptrs(pending_ptr, part, in_tile_m, in_tile_n, SIZE), four)
                    else:
                        total = gl.load(_pending_ptrs(pending_ptr, part - 4, in_tile_m, in_tile_n, SIZE)) + four
                        _write(total, problem, bias_ptr, first_m, first_n, in_tile_m, in_tile_n)


@gluon.jit(do_not_specialize=["M", "N", "tiles_m", "tiles_n", "length", "mask_step"])
def linear_sm90_kernel(
    x_desc,
    third_desc,
    w_desc,
    high_digit_mask_ptr,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    pending_ptr,
    M,
    N,
    tiles_m,
    tiles_n,
    length,
    mask_step,
    PARTS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """Tiles of the result, in turns.

    Args:
        x_desc: of int8 [2 M, K], x1 and x0, in blocks [BLOCK_M, _STEP_K].
        third_desc: of int8 [M, K], x2.
        w_desc: of int8 [2 N, K], w1 and w0, in blocks [BLOCK_N, _STEP_K].
        high_digit_mask_ptr: int64 [M, PARTS], as in :func:`.triton_kernels.quantize_kernel`.
        x_scale_ptr: fp32 [M, PARTS].
        w_scale_ptr: fp32 [N, PARTS].
        bias_ptr: [N], or None.
        out_ptr: bf16 [M, N].
        pending_ptr: fp32 [programs, _PENDING, long side * BLOCK_M], unfinished sums of segments; None where
            they stay IN_REGISTERS.
        PARTS: 1 or 8 segments of ``length`` elements, in the latter case whole steps.
    """
    LONG_SIDE: gl.constexpr = 64 if BLOCK_N <= 64 else 128
    problem = _Problem(
        high_digit_mask_ptr, x_scale_ptr, w_scale_ptr, out_ptr, M, N, tiles_m, tiles_n, length, mask_step, PARTS,
        HAS_BIAS, BLOCK_M, BLOCK_N, LONG_SIDE, IN_REGISTERS, OVERLAPS,
    )  # fmt: skip
    x_smem = gl.allocate_shared_memory(gl.int8, [NUM_STAGES * 2, BLOCK_M, _STEP_K], x_desc.layout)
    w_smem = gl.allocate_shared_memory(gl.int8, [NUM_STAGES * 2, LONG_SIDE, _STEP_K], w_desc.layout)
    full_bar = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty_bar = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full_bar.index(stage), count=1)
        mbarrier.init(empty_bar.index(stage), count=1)
    fence_async_shared()
    ring = _Ring(x_smem, w_smem, full_bar, empty_bar, NUM_STAGES)
    gl.warp_specialize(
        [
            (_multiply_partition, (problem, bias_ptr, pending_ptr, ring)),
            (_copy_partition, (x_desc, third_desc, w_desc, problem, ring)),
        ],
        [1],
        [40],
    )


@cache
def shared_layout() -> gl.NVMMASharedLayout:
    """How a copied block of digits lies in shared memory, which its descriptor must know."""
    return gl.NVMMASharedLayout(swizzle_byte_width=_STEP_K.value, element_bitwidth=8, rank=2)


def _describe(digits: torch.Tensor, block_rows: int) -> TensorDescriptor:
    rows, k = digits.flatten(0, -2).shape
    return TensorDescriptor(digits, [rows, k], [k, 1], [block_rows, _STEP_K.value], shared_layout())


def covers(k: int, parts: int) -> bool:
    """Whether rows of K elements, in so many segments, can be copied as the kernel does it."""
    return k % 16 == 0 and (parts == 1 or k // parts % _STEP_K.value == 0)


def linear_sm90(
    digits: torch.Tensor,
    third: torch.Tensor,
    high_digit_mask: torch.Tensor,
    x_scale: torch.Tensor,
    w_digits: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    mask_step: int,
    tile: HopperSchedule,
    follows: LaunchSchedule,
) -> None:
    """Write the product of activations and a weight on their grids to ``out``.

    Args:
        digits: int8 [2, M, K], of at least one row, as the next three in :class:`.cuda.Activations`.
        third: int8 [M, K].
        high_digit_mask: int64 [M, segments].
        x_scale: fp32 [M, segments].
        w_digits: int8 [2, N, K], as the next in :class:`.cuda.ExactWeight`.
        w_scale: fp32 [N, segments].
        bias: [N], or None.
        out: bf16 [M, N].
        mask_step: elements of a bit of the mask, a multiple of 128.
        tile: decides the speed.
        follows: if it overlaps, the weight is read before the kernel before has ended.
    """
    (_, m, k), (n, parts) = digits.shape, w_scale.shape
    tiles_m, tiles_n = triton.cdiv(m, tile.block_m), triton.cdiv(n, tile.block_n)
    programs = min(tiles_m * tiles_n, Gpu.of(out.device.index).num_sms * tile.ctas_per_sm)
    pending = None
    if parts > 1 and not tile.in_registers:
        size = programs, _PENDING.value, tile.long_side * tile.block_m
        pending = torch.empty(size, dtype=torch.float32, device=out.device)
    launch(
        linear_sm90_kernel,
        programs,
        (
            _describe(digits, tile.block_m),
            _describe(third, tile.block_m),
            _describe(w_digits, tile.block_n),
            high_digit_mask,
            x_scale,
            w_scale,
            bias,
            out,
            pending,
            m,
            n,
            tiles_m,
            tiles_n,
            k // parts,
            mask_step,
        ),
        on=out,
        PARTS=parts,
        HAS_BIAS=bias is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        NUM_STAGES=tile.num_stages,
        IN_REGISTERS=tile.in_registers,
        **follows.options,
        num_warps=tile.num_warps,
        maxnreg=tile.registers,
    )
