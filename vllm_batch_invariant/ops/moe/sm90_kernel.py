"""Grouped products of many pairs by Hopper's wgmma, in Gluon: the chains of :mod:`.triton_kernels` by another schedule.

Programs stay and take the next tile when they are done with one: _BLOCK_M pairs of an expert and _COLUMNS rows of its
weight. Two warpgroups multiply, each for half of the pairs, and skip their half where it has none; four warps copy
meanwhile, over the end of a tile, too: rows of x by addresses, since a tile's pairs lie anywhere, and the weight by the
tensor memory accelerator. Of a gated layer a tile has as many columns of gate as of up, side by side::

    acc = 0                                                # [_HALF_M, _COLUMNS]
    for k in range(0, K, 16):
        acc += x[row(pair), k : k + 16] @ weight[expert, n, k : k + 16].T
    gate, up = acc                                         # [_HALF_M, _COLUMNS / 2] each
"""

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..common.gluon_names import copy_block, copy_elements
from ..common.gpu import Gpu
from ..common.launch import launch
from ..common.sm90_ring import next_stage
from ..common.triton_names import aggregate, value
from ..linear.reduction import LinearReduction
from ..linear.sm90_kernel import shared_layout
from ..silu.sm90_kernels import silu_and_mul

_HALF_M = gl.constexpr(64)
"""Pairs of a warpgroup: wgmma's long side."""
_BLOCK_M = gl.constexpr(128)
_COLUMNS = gl.constexpr(256)
"""The most of one wgmma, which then reads the fewest bytes of shared memory for what it computes."""
_STEP_K = gl.constexpr(64)
"""Elements of K that are copied at once: rows of 128 bytes, the longest that wgmma reads without conflicts."""
_COPYING_WARPS = gl.constexpr(4)
_TURNS = gl.constexpr(2)
"""Tiles that are known to those who multiply."""
_PACKED = gl.constexpr(256)
"""More than the pairs of a tile."""
_STAGES = 4
"""Steps of K that shared memory holds beside a warpgroup's results."""


@aggregate
class _Problem:
    """What is multiplied, and by which tiles."""

    x_ptr: value
    """[rows, K]"""
    out_ptr: value
    """[pairs, N]"""
    pairs_ptr: value
    """int32 [blocks * _BLOCK_M]"""
    stop_ptr: value
    """int32 [experts], where an expert's pairs end"""
    expert_ptr: value
    """int32 [blocks], -1 for a block without pairs"""
    turn_ptr: value
    """int32 [1], 0 at first: how many tiles have been taken beside each program's first"""
    num_pairs: value
    N: value
    K: value
    tiles_n: value
    num_tiles: value
    PAIRS_OF_A_ROW: gl.constexpr
    GATED: gl.constexpr
    BLOCK_N: gl.constexpr
    """Columns of the result in a tile."""
    OVERLAPS: gl.constexpr


@aggregate
class _Ring:
    """Shared memory for ``NUM_STAGES`` steps of K, and a step's barriers."""

    x_smem: gl.shared_memory_descriptor
    """[NUM_STAGES * 2, _HALF_M, _STEP_K]"""
    w_smem: gl.shared_memory_descriptor
    """[NUM_STAGES, _COLUMNS, _STEP_K]"""
    full_bar: gl.shared_memory_descriptor
    """[NUM_STAGES, 1]"""
    empty_bar: gl.shared_memory_descriptor
    turn_smem: gl.shared_memory_descriptor
    """int32 [_TURNS, 1], a tile and how many pairs it has"""
    taken_bar: gl.shared_memory_descriptor
    """[_TURNS, 1]"""
    known_bar: gl.shared_memory_descriptor
    NUM_STAGES: gl.constexpr


@gluon.jit
def _row_ptrs(problem, first, LAYOUT: gl.constexpr):
    """Where the rows of a warpgroup's pairs begin [_HALF_M, _STEP_K]; beyond the last pair it is any row."""
    slots = first + gl.arange(0, _HALF_M, gl.SliceLayout(1, LAYOUT))
    pairs = gl.load(problem.pairs_ptr + slots)
    pairs = gl.where((pairs >= 0) & (pairs < problem.num_pairs), pairs, 0)  # nobody has written those beyond the last
    offs_k = gl.arange(0, _STEP_K, gl.SliceLayout(0, LAYOUT))
    return problem.x_ptr + ((pairs // problem.PAIRS_OF_A_ROW).to(gl.int64) * problem.K)[:, None] + offs_k[None, :]


@gluon.jit
def _look_up(problem, tile):
    """The expert of a tile, and how many pairs it has. Blocks without pairs are behind all others."""
    block = tile // problem.tiles_n
    expert = gl.load(problem.expert_ptr + block, mask=tile < problem.num_tiles, other=-1)
    stop = gl.load(problem.stop_ptr + expert, mask=expert >= 0, other=0)
    return expert, gl.where(expert >= 0, gl.minimum(stop - block * _BLOCK_M, _BLOCK_M), 0)


@gluon.jit
def _tell(ring, turn, phase, tile, count):
    """Tells those who multiply what comes next: nothing if it has no pairs."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [_COPYING_WARPS], [0])
    mbarrier.wait(ring.taken_bar.index(turn), phase)
    ring.turn_smem.index(turn).store(gl.full([1], tile * _PACKED + count, gl.int32, layout))
    mbarrier.arrive(ring.known_bar.index(turn))
    return next_stage(turn, phase, _TURNS)


@gluon.jit
def _copy_steps(w_desc, problem, ring, row, x_ptrs, second_ptrs, has_second, first_k, stop_k, stage, phase):
    """Copies from one element of K to another, of the expert's rows from ``row`` on and of both halves of the pairs."""
    HALF_COLUMNS: gl.constexpr = _COLUMNS // 2
    to_right = problem.N if problem.GATED else HALF_COLUMNS
    for start_k in range(first_k, stop_k, _STEP_K):
        mbarrier.wait(ring.empty_bar.index(stage), phase)
        full, w_smem = ring.full_bar.index(stage), ring.w_smem.index(stage)
        mbarrier.expect(full, _COLUMNS * _STEP_K * 2)
        copy_block(w_desc, [row, start_k], full, w_smem.slice(0, HALF_COLUMNS))
        copy_block(w_desc, [row + to_right, start_k], full, w_smem.slice(HALF_COLUMNS, HALF_COLUMNS))
        copy_elements(ring.x_smem.index(stage * 2), x_ptrs + start_k)
        if has_second:
            copy_elements(ring.x_smem.index(stage * 2 + 1), second_ptrs + start_k)
        async_copy.mbarrier_arrive(full, increment_count=False)
        stage, phase = next_stage(stage, phase, ring.NUM_STAGES)
    return stage, phase


@gluon.jit
def _copy_partition(w_desc, problem, ring):
    """Keeps the ring full. The next tile is looked up while there are steps in the ring to be multiplied."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [_COPYING_WARPS, 1], [1, 0])
    if problem.OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    half_k = problem.K // (2 * _STEP_K) * _STEP_K
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    turn, turn_phase = gl.to_tensor(0), gl.to_tensor(1)
    tile = gl.program_id(0)
    expert, count = _look_up(problem, tile)
    while count > 0:
        turn, turn_phase = _tell(ring, turn, turn_phase, tile, count)
        first, first_n = tile // problem.tiles_n * _BLOCK_M, tile % problem.tiles_n * problem.BLOCK_N
        x_ptrs, second_ptrs = _row_ptrs(problem, first, layout), _row_ptrs(problem, first + _HALF_M, layout)
        has_second = count > _HALF_M
        row = expert * (2 * problem.N if problem.GATED else problem.N) + first_n
        stage, phase = _copy_steps(
            w_desc, problem, ring, row, x_ptrs, second_ptrs, has_second, 0, half_k, stage, phase
        )  # fmt: skip
        tile = gl.num_programs(0) + gl.atomic_add(problem.turn_ptr, 1)
        expert, count = _look_up(problem, tile)
        stage, phase = _copy_steps(
            w_desc, problem, ring, row, x_ptrs, second_ptrs, has_second, half_k, problem.K, stage, phase
        )  # fmt: skip
    _tell(ring, turn, turn_phase, tile, count)


@gluon.jit
def _multiply_partition(problem, ring, HALF: gl.constexpr):
    """A warpgroup: its half of the pairs of every tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _COLUMNS, 16]
    )
    HALF_COLUMNS: gl.constexpr = _COLUMNS // 2
    dtype: gl.constexpr = problem.out_ptr.dtype.element_ty
    if problem.OVERLAPS:
        gdc_wait()
    packed: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    alone: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    in_half = gl.arange(0, _HALF_M, gl.SliceLayout(1, packed))
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    turn, turn_phase = gl.to_tensor(0), gl.to_tensor(0)
    count = gl.to_tensor(1)
    while count > 0:
        mbarrier.wait(ring.known_bar.index(turn), turn_phase)
        known = gl.max(ring.turn_smem.index(turn).load(alone), 0)
        mbarrier.arrive(ring.taken_bar.index(turn))
        turn, turn_phase = next_stage(turn, turn_phase, _TURNS)
        tile, count = known // _PACKED, known % _PACKED
        if count > 0:
            first_n, here = tile % problem.tiles_n * problem.BLOCK_N, count - HALF * _HALF_M
            if here > 0:
                slots = tile // problem.tiles_n * _BLOCK_M + HALF * _HALF_M + in_half
                pairs = gl.load(problem.pairs_ptr + slots, mask=in_half < here, other=-1)  # on their way meanwhile
                acc = gl.full([_HALF_M, _COLUMNS], 0.0, gl.float32, layout)
                before = gl.to_tensor(0)
                for start_k in range(0, problem.K, _STEP_K):
                    mbarrier.wait(ring.full_bar.index(stage), phase)
                    fence_async_shared()  # wgmma reads what other threads have copied
                    x, weight = ring.x_smem.index(stage * 2 + HALF), ring.w_smem.index(stage)
                    acc = warpgroup_mma(x, weight.permute([1, 0]), acc, is_async=True)
                    acc = warpgroup_mma_wait(1, deps=(acc,))
                    mbarrier.arrive(ring.empty_bar.index(before), pred=start_k > 0)
                    before = stage
                    stage, phase = next_stage(stage, phase, ring.NUM_STAGES)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(ring.empty_bar.index(before))
                left, right = acc.reshape([_HALF_M, 2, HALF_COLUMNS]).permute([0, 2, 1]).split()
                if problem.GATED:
                    _write(problem, silu_and_mul(left, right, dtype), pairs, first_n, packed)
                else:
                    _write(problem, left.to(dtype), pairs, first_n, packed)
                    _write(problem, right.to(dtype), pairs, first_n + HALF_COLUMNS, packed)
            else:
                for _ in range(0, problem.K, _STEP_K):
                    mbarrier.wait(ring.full_bar.index(stage), phase)
                    mbarrier.arrive(ring.empty_bar.index(stage))
                    stage, phase = next_stage(stage, phase, ring.NUM_STAGES)


@gluon.jit
def _write(problem, made, pairs, first_n, LAYOUT: gl.constexpr):
    """Writes the rows [_HALF_M, _COLUMNS / 2] of pairs that are not -1, 256 bytes of each side by side."""
    made = gl.convert_layout(made, LAYOUT)
    offs_n = first_n + gl.arange(0, _COLUMNS // 2, gl.SliceLayout(0, LAYOUT))
    offs = (pairs.to(gl.int64) * problem.N)[:, None] + offs_n[None, :]
    gl.store(problem.out_ptr + offs, made, mask=(pairs >= 0)[:, None] & (offs_n < problem.N)[None, :])


@gluon.jit(do_not_specialize=["num_pairs", "tiles_n", "num_tiles"])
def grouped_gemm_sm90_kernel(
    x_ptr,
    w_desc,
    out_ptr,
    pairs_ptr,
    stop_ptr,
    expert_ptr,
    turn_ptr,
    num_pairs,
    N,
    K,
    tiles_n,
    num_tiles,
    PAIRS_OF_A_ROW: gl.constexpr,
    GATED: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """As :func:`.triton_kernels.grouped_gemm_kernel` without a bias: with GATED weight has 2 N rows an expert, and out
    is silu(gate) * up. ``w_desc`` is of [experts * rows, K] in blocks [_COLUMNS / 2, _STEP_K], and K whole steps.
    """
    BLOCK_N: gl.constexpr = _COLUMNS // 2 if GATED else _COLUMNS
    problem = _Problem(
        x_ptr, out_ptr, pairs_ptr, stop_ptr, expert_ptr, turn_ptr, num_pairs, N, K, tiles_n, num_tiles, PAIRS_OF_A_ROW,
        GATED, BLOCK_N, OVERLAPS,
    )  # fmt: skip
    x_smem = gl.allocate_shared_memory(w_desc.dtype, [NUM_STAGES * 2, _HALF_M, _STEP_K], w_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [NUM_STAGES, _COLUMNS, _STEP_K], w_desc.layout)
    full_bar = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty_bar = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full_bar.index(stage), count=1 + 32 * _COPYING_WARPS)
        mbarrier.init(empty_bar.index(stage), count=2)
    turn_smem = gl.allocate_shared_memory(gl.int32, [_TURNS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    taken_bar = gl.allocate_shared_memory(gl.int64, [_TURNS, 1], mbarrier.MBarrierLayout())
    known_bar = gl.allocate_shared_memory(gl.int64, [_TURNS, 1], mbarrier.MBarrierLayout())
    for turn in gl.static_range(_TURNS):
        mbarrier.init(taken_bar.index(turn), count=2)
        mbarrier.init(known_bar.index(turn), count=1)
    fence_async_shared()
    ring = _Ring(x_smem, w_smem, full_bar, empty_bar, turn_smem, taken_bar, known_bar, NUM_STAGES)
    gl.warp_specialize(
        [
            (_multiply_partition, (problem, ring, gl.constexpr(0))),
            (_multiply_partition, (problem, ring, gl.constexpr(1))),
            (_copy_partition, (w_desc, problem, ring)),
        ],
        [4, _COPYING_WARPS],
        [216, 72],
    )


def covers(k: int, has_bias: bool, activation: str) -> bool:
    """Whether the kernel multiplies rows of K elements so; the activation is that of :func:`.cuda.grouped_gemm`."""
    return k % _STEP_K.value == 0 and not has_bias and activation in ("", "silu")


def grouped_gemm_sm90(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    pairs: torch.Tensor,
    stop: torch.Tensor,
    expert_of_block: torch.Tensor,
    reduction: LinearReduction,
    *,
    gated: bool,
) -> None:
    """Write each pair's product to ``out`` [pairs, N].

    Args:
        x: [rows, K] bf16 or fp16, packed, of a K that the kernel :func:`covers`.
        weight: [experts, N, K], or gated [experts, 2 * N, K], packed, as the tensor memory accelerator takes it.
        out: packed.
        pairs: grouped in blocks of 128, as the next two in :class:`.cuda.Groups`.
        stop: int32.
        expert_of_block: int32.
        reduction: decides the bits.
        gated: whether it is the activation, silu(gate) * up.
    """
    experts, rows, k = weight.shape
    n = out.shape[1]
    columns = _COLUMNS.value // 2 if gated else _COLUMNS.value
    tiles_n = triton.cdiv(n, columns)
    num_tiles = len(expert_of_block) * tiles_n
    programs = min(Gpu.of(x.device.index).num_sms, num_tiles)
    box = [_COLUMNS.value // 2, _STEP_K.value]
    launch(
        grouped_gemm_sm90_kernel,
        programs,
        (
            x,
            TensorDescriptor(weight, [experts * rows, k], [k, 1], box, shared_layout()),
            out,
            pairs,
            stop,
            expert_of_block,
            torch.zeros(1, dtype=torch.int32, device=out.device),
            len(out),
            n,
            k,
            tiles_n,
            num_tiles,
        ),
        on=x,
        waits=True,
        PAIRS_OF_A_ROW=len(out) // len(x),
        GATED=gated,
        NUM_STAGES=_STAGES,
        maxnreg=168,
        enable_fp_fusion=reduction.enable_fp_fusion,
    )
