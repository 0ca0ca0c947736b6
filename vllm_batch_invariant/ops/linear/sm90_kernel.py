"""``out = a @ b + bias`` by Hopper's wgmma for few rows, in Gluon: K is added in the same order as in
:mod:`.triton_kernels`.

a: [M, K], b: [K, N] as a weight [N, K], bias: [N]. Operands are swapped: a tile of the result is computed as
``(b.T @ a.T).T``, so that wgmma's long side of 64 takes the columns of b::

    acc = 0                                                # [64, BLOCK_M]
    for k in range(0, K, 16):
        acc += weight[n, k : k + 16] @ a[m, k : k + 16].T
    out[m, n] = round(acc.T + bias[n])

One warp loads and warpgroups multiply, each for 64 columns of b, so that none waits for the other's instructions, and
the next tile's operands are on their way while a tile is written. A multiprocessor takes in at most 64 bytes a cycle,
so that K takes as long as a tile's rows and columns together; where N is small, small tiles give every multiprocessor
one. Triton would load wgmma's long side of 64 whole; here only the columns of the tile are loaded. The rest of it is
what shared memory held before, and its rows of the result are not written.

Where the weight is [gate, up] of a gated layer, out is ``silu(a @ gate.T) * (a @ up.T)``, [M, N / 2]. The long side
then takes eight columns of gate and eight of up in turn: those of one result are in the registers of one thread.

A launch may begin while the kernel before runs, which makes ``a``, and kernels before that one: it loads weights until
it has to wait.

A weight of four bits is loaded as it is stored, and is wgmma's first operand from registers (:mod:`.sm90_packed`). Then
tiles are larger, and serve many rows, too: two warpgroups read the same rows of a, so that 128 columns of 256 rows take
36 bytes a cycle, and what is decoded is multiplied with all rows of a tile.
"""

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..common.dependent_launch import LaunchSchedule
from ..common.gluon_names import barrier, copy_block, reinterpret, write_block
from ..common.gpu import Gpu
from ..common.launch import launch
from ..common.sm90_ring import next_stage
from ..common.triton_names import aggregate, value
from ..silu.sm90_kernels import silu_and_mul
from .problem import ALIGNMENT, leading_dim
from .reduction import LinearReduction
from .schedule import NarrowTile
from .sm90_packed import (
    CHUNK_K,
    CODES,
    LONG_SIDE,
    Scales,
    ask_for_scales,
    codes_layout,
    decoded,
    load_scales,
    load_words,
    rows_of,
)
from .triton_kernels import TL_DTYPES

_COPY_K = gl.constexpr(64)
"""Elements of K that are copied at once: rows of 128 bytes, the longest that wgmma reads without conflicts."""
_IN_TURN = gl.constexpr(8)
"""Columns of gate, and of up behind them: a thread has rows of the accumulator that are so far apart."""
_REGISTERS = gl.constexpr(128)
"""Of a thread: then four warpgroups fit into a multiprocessor."""
_REGISTERS_OF_FEW = 168
"""Of two warpgroups with accumulators of 256 rows; then the one that copies leaves them most of its own."""
_ROWS_FIRST = gl.constexpr(1024)
"""Rows of out whose columns are all computed before other rows are."""
_WRITTEN = gl.constexpr(64)
"""Rows of out that are on their way through shared memory at once, twice."""
_ONE_SCALE = 1 << 30
"""More elements of K than a row has: then a row has one scale."""
_COPYING_REGISTERS = gl.constexpr(40)


@aggregate
class _Problem:
    """What is multiplied, and how it is cut."""

    out_ptr: value
    out_desc: value
    """Of out, where tiles are written through shared memory; or None."""
    M: value
    N: value
    K: value
    tiles_m: value
    tiles: value
    """Of the result."""
    K_SLICES: gl.constexpr
    HAS_BIAS: gl.constexpr
    GATED: gl.constexpr
    ACCUMULATE: gl.constexpr
    OVERLAPS: gl.constexpr
    AHEAD: gl.constexpr
    """Whether b is read before the kernel before has ended."""
    scales: value
    """Of b, if that is packed."""

    @gluon.jit
    def first_of(self, tile, ring):
        """Where a tile begins, in M and in N. Tiles one after the other have the same columns; of many rows so many
        come first that they stay in the L2 cache while all columns pass, which four bits make the smaller part.
        """
        if ring.PACKING == 1 or ring.BLOCK_M < LONG_SIDE:
            tile_m, tile_n = tile % self.tiles_m, tile // self.tiles_m
        else:
            ROWS_FIRST: gl.constexpr = max(1, _ROWS_FIRST // ring.BLOCK_M)
            of_rows = ROWS_FIRST * (self.tiles // self.tiles_m)
            before = tile // of_rows * ROWS_FIRST
            count = gl.minimum(self.tiles_m - before, ROWS_FIRST)
            tile_m, tile_n = before + tile % of_rows % count, tile % of_rows // count
        return tile_m * ring.BLOCK_M, tile_n * ring.BLOCK_N

    @gluon.jit
    def load_beside(self, ring, stage, first_m, first_n, start_k):
        """Starts the copies of what a step has beside its operands: nothing."""


@aggregate
class Ring:
    """Shared memory for ``NUM_STAGES`` steps of K, each of ``COPIES`` copies of an operand, and a step's barriers. The
    rows of a are wgmma's short side, those of b its long one.
    """

    a_smem: gl.shared_memory_descriptor
    """[NUM_STAGES * COPIES, BLOCK_M, elements in a copy]"""
    b_smem: gl.shared_memory_descriptor
    """[NUM_STAGES * B_COPIES * WARPGROUPS, ROWS, elements in a copy]"""
    out_smem: value
    """[2, _WRITTEN, columns of out in a tile], with out_desc; or None."""
    full_bar: gl.shared_memory_descriptor
    """[NUM_STAGES, 1]"""
    empty_bar: gl.shared_memory_descriptor
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    COPIES: gl.constexpr
    """Of a in a step."""
    B_COPIES: gl.constexpr
    PACKING: gl.constexpr
    """Elements of K in one of b."""
    ROWS: gl.constexpr
    """Of the operand that a partition multiplies, LONG_SIDE for each four of its warps."""
    NUM_STAGES: gl.constexpr
    WARPGROUPS: gl.constexpr
    STEPS: gl.constexpr
    """In a turn of the loop over K. What is decoded while wgmma reads what was decoded before needs registers of its
    own, and the assembler gives each in a turn the same ones in every turn: there are two chunks at least.
    """


@gluon.jit
def _load_b(b_desc, problem, ring, stage, first_n, start_k):
    """Starts the copies of a step's columns of b; the step's barrier expects both operands."""
    full = ring.full_bar.index(stage)
    COPY: gl.constexpr = b_desc.block_shape[-1]
    TURNS: gl.constexpr = ring.ROWS // _IN_TURN // 2
    B_BYTES: gl.constexpr = ring.BLOCK_N * COPY * ring.B_COPIES * b_desc.dtype.primitive_bitwidth // 8
    A_COPY: gl.constexpr = ring.BLOCK_M * ring.a_smem.shape[2]
    A_BYTES: gl.constexpr = A_COPY * ring.COPIES * ring.a_smem.dtype.primitive_bitwidth // 8
    mbarrier.expect(full, A_BYTES + B_BYTES)
    if ring.PACKING > 1:
        start_k = start_k // ring.PACKING
    for copy in gl.static_range(ring.B_COPIES):
        for group in gl.static_range(ring.WARPGROUPS):
            b_smem = ring.b_smem.index((stage * ring.B_COPIES + copy) * ring.WARPGROUPS + group)
            k = start_k + copy * COPY
            if problem.GATED:
                in_turn = reinterpret(b_smem, b_desc.dtype, [TURNS, 2, _IN_TURN, COPY], b_desc.layout)
                copy_block(b_desc, [first_n // (2 * _IN_TURN) + group * TURNS, 0, 0, k], full, in_turn)
            elif ring.WARPGROUPS == 1:
                copy_block(b_desc, [first_n, k], full, b_smem.slice(0, ring.BLOCK_N))
            else:
                copy_block(b_desc, [first_n + group * LONG_SIDE, k], full, b_smem)


@gluon.jit
def load_partition(a_desc, b_desc, problem, ring):
    """One warp: keeps the ring full. ``problem`` says where a tile begins, and what else a step has."""
    COPY_K: gl.constexpr = ring.a_smem.shape[2]
    STEP_K: gl.constexpr = COPY_K * ring.COPIES
    whole_k = problem.K
    if ring.STEPS > 1:  # as many steps as are multiplied
        whole_k = gl.cdiv(problem.K, ring.STEPS * STEP_K) * (ring.STEPS * STEP_K)
    if ring.PACKING > 1:
        _, first_n = problem.first_of(gl.program_id(0), ring)
        ask_for_scales(problem.scales, first_n, problem.N, ring.BLOCK_N, problem.GATED)
    ahead = gl.to_tensor(0)  # steps whose columns of b are on their way already
    if problem.AHEAD:
        ahead = gl.minimum((whole_k + STEP_K - 1) // STEP_K, ring.NUM_STAGES)
        _, first_n = problem.first_of(gl.program_id(0), ring)
        for step in range(ahead):
            _load_b(b_desc, problem, ring, step, first_n, step * STEP_K)
    if problem.OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    for tile in range(gl.program_id(0), problem.tiles, gl.num_programs(0)):
        first_m, first_n = problem.first_of(tile, ring)
        if ring.PACKING > 1:
            _, next_n = problem.first_of(gl.minimum(tile + gl.num_programs(0), problem.tiles - 1), ring)
            ask_for_scales(problem.scales, next_n, problem.N, ring.BLOCK_N, problem.GATED)
        for start_k in range(0, whole_k, STEP_K):
            mbarrier.wait(ring.empty_bar.index(stage), phase)
            if ahead > 0:
                ahead -= 1
            else:
                _load_b(b_desc, problem, ring, stage, first_n, start_k)
            for copy in gl.static_range(ring.COPIES):
                a_smem = ring.a_smem.index(stage * ring.COPIES + copy)
                copy_block(a_desc, [first_m, start_k + copy * COPY_K], ring.full_bar.index(stage), a_smem)
            problem.load_beside(ring, stage, first_m, first_n, start_k)
            stage, phase = next_stage(stage, phase, ring.NUM_STAGES)


@gluon.jit
def _mma_slice(
    problem, ring, stage, phase, before, K, GROUP: gl.constexpr, IS_FIRST: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """The next K elements of K for the warpgroup's columns, in one accumulator. A step's place is free once the next
    step's wgmmas are queued, of the next slice where the slice ends.
    """
    acc = gl.full([layout.warps_per_cta[0] * 16, ring.BLOCK_M], 0.0, problem.ACCUMULATE, layout)
    for start_k in range(0, K, _COPY_K * ring.COPIES):
        mbarrier.wait(ring.full_bar.index(stage), phase)
        for copy in gl.static_range(ring.COPIES):
            index = stage * ring.COPIES + copy
            a, b = ring.a_smem.index(index), ring.b_smem.index(index * ring.WARPGROUPS + GROUP)
            acc = warpgroup_mma(b, a.permute([1, 0]), acc, is_async=True)  # [LONG_SIDE, BLOCK_M]
        acc = warpgroup_mma_wait(ring.COPIES, deps=(acc,))
        if IS_FIRST:
            mbarrier.arrive(ring.empty_bar.index(before), pred=start_k > 0)
        else:
            mbarrier.arrive(ring.empty_bar.index(before))
        before = stage
        stage, phase = next_stage(stage, phase, ring.NUM_STAGES)
    return warpgroup_mma_wait(0, deps=(acc,)), stage, phase, before


@gluon.jit
def _next_words(ring, stage, phase, is_there, GROUP: gl.constexpr, CHUNK: gl.constexpr):
    """The codes of a chunk, or if there is none what lies there, and where the one behind it is."""
    COPY: gl.constexpr = CHUNK % ring.COPIES
    if COPY == 0:
        mbarrier.wait(ring.full_bar.index(stage), phase, pred=is_there)
    words = load_words(ring.b_smem.index(stage * ring.WARPGROUPS + GROUP), COPY, ring.ROWS)
    if COPY + 1 == ring.COPIES:
        stage, phase = next_stage(stage, phase, ring.NUM_STAGES)
    return words, stage, phase


@gluon.jit
def _mma_part(a, b, acc, PART: gl.constexpr):
    """Starts the product of a part of a chunk, of which b are the decoded ones; when it begins, the one before is done
    and its operand's registers are free.
    """
    PART_K: gl.constexpr = CHUNK_K // len(b)
    if len(b) > 1:
        a = a.slice(PART * PART_K, PART_K, dim=1)
    acc = warpgroup_mma(b[PART], a.permute([1, 0]), acc, is_async=True)
    return warpgroup_mma_wait(1, deps=(acc,))


@gluon.jit
def _mma_packed_slice(
    problem, ring, stage, phase, before, offs, mask_n, first_k, K, GROUP: gl.constexpr, IS_FIRST: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """The same of K from first_k on, of codes: a chunk is decoded while the one before is multiplied, its words are
    loaded a chunk before that, and scales are asked for two turns ahead. A warpgroup seems to wait until wgmma takes an
    operand from its registers, when the one before is done: so in large tiles a quarter of a chunk is decoded behind
    each of its four wgmmas, not all behind the last.
    """
    PARTS: gl.constexpr = 4 if ring.COPIES == 1 else 1
    CHUNKS: gl.constexpr = ring.COPIES * ring.STEPS
    STEP_K: gl.constexpr = _COPY_K * CHUNKS
    dtype: gl.constexpr = problem.out_ptr.dtype.element_ty
    acc = gl.full([layout.warps_per_cta[0] * 16, ring.BLOCK_M], 0.0, problem.ACCUMULATE, layout)
    now = load_scales(problem.scales, offs, mask_n, first_k, problem.K, CHUNKS, ring.ROWS, dtype)
    after = load_scales(problem.scales, offs, mask_n, first_k + STEP_K, problem.K, CHUNKS, ring.ROWS, dtype)
    ahead, ahead_phase = stage, phase
    words, ahead, ahead_phase = _next_words(ring, ahead, ahead_phase, True, GROUP, 0)
    b = ()
    for part in gl.static_range(PARTS):
        b = b + (decoded(words, now[0], part, PARTS, layout),)  # noqa: RUF005 - Triton has no starred ones
    words, ahead, ahead_phase = _next_words(ring, ahead, ahead_phase, True, GROUP, 1)
    for start_k in range(0, K, STEP_K):
        later = load_scales(
            problem.scales, offs, mask_n, first_k + start_k + 2 * STEP_K, problem.K, CHUNKS, ring.ROWS, dtype
        )  # fmt: skip
        for step in gl.static_range(ring.STEPS):
            for copy in gl.static_range(ring.COPIES):
                of_next = (now + after)[step * ring.COPIES + copy + 1]
                a = ring.a_smem.index(stage * ring.COPIES + copy)
                acc = _mma_part(a, b, acc, 0)
                if step * ring.COPIES + copy + 2 < CHUNKS:  # noqa: SIM108 - decided when the kernel is compiled
                    is_there = True
                else:
                    is_there = start_k + STEP_K < K
                following, ahead, ahead_phase = _next_words(ring, ahead, ahead_phase, is_there, GROUP, copy + 2)
                next_b = (decoded(words, of_next, 0, PARTS, layout),)
                for part in gl.static_range(1, PARTS):
                    acc = _mma_part(a, b, acc, part)
                    next_b = next_b + (decoded(words, of_next, part, PARTS, layout),)  # noqa: RUF005 - as above
                b, words = next_b, following
                if copy == 0:
                    if IS_FIRST and step == 0:
                        mbarrier.arrive(ring.empty_bar.index(before), pred=start_k > 0)
                    else:
                        mbarrier.arrive(ring.empty_bar.index(before))
            before = stage
            stage, phase = next_stage(stage, phase, ring.NUM_STAGES)
        now, after = after, later
    acc = warpgroup_mma_wait(0, deps=(acc,))
    # ptxas 12.8 and 12.9 round accumulators before that wait if no branch follows it: this barrier was passed already
    mbarrier.wait(ring.full_bar.index(before), phase ^ (stage == 0).to(gl.int32))
    return acc, stage, phase, before


@gluon.jit
def _mma_tree(
    problem, ring, stage, phase, before, offs, mask_n, first_k, K, GROUP: gl.constexpr, K_SLICES: gl.constexpr,
    IS_FIRST: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The next K_SLICES slices, of K elements each: their sum, not yet rounded; what is added to make it, is."""
    if K_SLICES == 1:
        if ring.PACKING == 1:
            total, stage, phase, before = _mma_slice(problem, ring, stage, phase, before, K, GROUP, IS_FIRST, layout)
        else:
            total, stage, phase, before = _mma_packed_slice(
                problem, ring, stage, phase, before, offs, mask_n, first_k, K, GROUP, IS_FIRST, layout
            )  # fmt: skip
    else:
        HALF: gl.constexpr = K_SLICES // 2
        DTYPE: gl.constexpr = problem.out_ptr.dtype.element_ty
        left, stage, phase, before = _mma_tree(
            problem, ring, stage, phase, before, offs, mask_n, first_k, K, GROUP, HALF, IS_FIRST, layout
        )  # fmt: skip
        left = left.to(DTYPE)
        right, stage, phase, before = _mma_tree(
            problem, ring, stage, phase, before, offs, mask_n, first_k + HALF * K, K, GROUP, HALF, False, layout
        )  # fmt: skip
        total = left.to(problem.ACCUMULATE) + right.to(DTYPE).to(problem.ACCUMULATE)
    return total, stage, phase, before


@gluon.jit
def _mma_partition(bias_ptr, problem, ring, GROUP: gl.constexpr):
    """A warpgroup: all of K for its columns of whole tiles."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[max(ring.ROWS, LONG_SIDE) // 16, 1], instr_shape=[16, ring.BLOCK_M, 16]
    )
    dtype: gl.constexpr = problem.out_ptr.dtype.element_ty
    if problem.OVERLAPS:
        gdc_wait()
    stage, phase, before = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for tile in range(gl.program_id(0), problem.tiles, gl.num_programs(0)):
        if ring.PACKING > 1:
            _, of_scales = problem.first_of(tile, ring)
            offs, mask_n = rows_of(problem.scales, of_scales, problem.N, problem.GATED, _IN_TURN, ring.ROWS)
        else:
            offs, mask_n = 0, 0
        acc, stage, phase, before = _mma_tree(
            problem, ring, stage, phase, before, offs, mask_n, 0, problem.K // problem.K_SLICES, GROUP,
            problem.K_SLICES, True, layout,
        )  # fmt: skip
        mbarrier.arrive(ring.empty_bar.index(before))
        first_m, first_n = problem.first_of(tile, ring)
        first_n += GROUP * ring.ROWS
        if problem.GATED:
            gate, up = (
                acc.reshape([ring.ROWS // _IN_TURN // 2, 2, _IN_TURN, ring.BLOCK_M]).permute([0, 2, 3, 1]).split()
            )
            made = silu_and_mul(gate, up, dtype).reshape([ring.ROWS // 2, ring.BLOCK_M])
            if problem.out_desc is None:
                write(problem, made, first_m, first_n // 2, problem.N // 2, ring.ROWS // 2)
            else:
                _write_block(problem, ring, made, first_m, first_n // 2)
        else:
            COLUMNS: gl.constexpr = ring.BLOCK_N // ring.WARPGROUPS
            if ring.ROWS < LONG_SIDE:
                acc, _ = acc.reshape([LONG_SIDE // 16, 2, 8, ring.BLOCK_M]).permute([0, 2, 3, 1]).split()
                acc = acc.reshape([ring.ROWS, ring.BLOCK_M])
            if problem.HAS_BIAS:
                in_tile_n = gl.arange(0, ring.ROWS, gl.SliceLayout(1, acc.type.layout))
                mask_n = (in_tile_n < COLUMNS) & (first_n + in_tile_n < problem.N)
                bias = gl.load(bias_ptr + first_n + in_tile_n, mask=mask_n, other=0.0)  # [LONG_SIDE]
                acc += bias.to(problem.ACCUMULATE)[:, None]
            if problem.out_desc is None:
                write(problem, acc.to(dtype), first_m, first_n, problem.N, COLUMNS)
            else:
                _write_block(problem, ring, acc.to(dtype), first_m, first_n)
    if problem.out_desc is not None:
        tma.store_wait(0)


@gluon.jit
def write(problem, made, first_m, first_n, N, COLUMNS: gl.constexpr):
    """Writes the first COLUMNS rows of made [columns of out, BLOCK_M] to out [M, N]."""
    in_tile_n = gl.arange(0, made.shape[0], gl.SliceLayout(1, made.type.layout))
    offs_m = first_m + gl.arange(0, made.shape[1], gl.SliceLayout(0, made.type.layout))
    offs_n = first_n + in_tile_n
    mask_n = (in_tile_n < COLUMNS) & (offs_n < N)
    offs = offs_m.to(gl.int64)[None, :] * N + offs_n[:, None]
    gl.store(problem.out_ptr + offs, made, mask=mask_n[:, None] & (offs_m < problem.M)[None, :])


@gluon.jit
def _write_block(problem, ring, made, first_m, first_n):
    """Writes made [columns of out, BLOCK_M] to out [M, N] through shared memory, _WRITTEN rows at a time. A copy is
    waited for where its place is used again.
    """
    parts = _halves(made)
    for part in gl.static_range(len(parts)):
        place = ring.out_smem.index(part % 2)
        tma.store_wait(1)
        barrier()
        place.permute([1, 0]).store(parts[part])
        fence_async_shared()
        barrier()
        write_block(problem.out_desc, [first_m + part * _WRITTEN, first_n], place)


@gluon.jit
def _halves(made):
    """Parts of made [columns of out, rows] with _WRITTEN rows, in order."""
    COLUMNS: gl.constexpr = made.shape[0]
    ROWS: gl.constexpr = made.shape[1]
    if ROWS == _WRITTEN:
        parts = (made,)
    else:
        first, second = made.reshape([COLUMNS, 2, ROWS // 2]).permute([0, 2, 1]).split()
        parts = _halves(first) + _halves(second)
    return parts


@gluon.jit(do_not_specialize=["M", "N", "K", "tiles_m", "tiles", "stride_scales"])
def gemm_sm90_swap_ab_kernel(
    a_desc,
    b_desc,
    bias_ptr,
    out_ptr,
    out_desc,
    scales_ptr,
    zeros_ptr,
    M,
    N,
    K,
    tiles_m,
    tiles,
    stride_scales,
    GROUP: gl.constexpr,
    K_SLICES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    GATED: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """a: descriptor of [M, K], b: of [N, K], bias: [N] or None, out: [M, N]. Elements beyond an edge read as zero and
    are not written. Each of K_SLICES parts of K is a multiple of BLOCK_K, or there is one. With OVERLAPS b is read
    before the kernel before has ended. With GATED there is neither bias nor tree, out is [M, N / 2], and b's descriptor
    is of [N / 2 / _IN_TURN, 2, _IN_TURN, K]. Where a scale is for GROUP elements of K, b is codes, [N, K / CODES], in a
    tile for whole warpgroups of one partition: those of :mod:`.sm90_packed`.
    """
    COPIES: gl.constexpr = BLOCK_K // _COPY_K
    PACKING: gl.constexpr = CODES if GROUP else 1
    ROWS: gl.constexpr = BLOCK_N if GROUP else LONG_SIDE
    B_COPIES: gl.constexpr = 1 if GROUP else COPIES
    STEPS: gl.constexpr = 2 if GROUP and COPIES == 1 else 1
    B_LAYOUT: gl.constexpr = codes_layout(BLOCK_K) if GROUP else a_desc.layout
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [NUM_STAGES * COPIES, BLOCK_M, _COPY_K], a_desc.layout)
    b_smem = gl.allocate_shared_memory(
        b_desc.dtype, [NUM_STAGES * B_COPIES * WARPGROUPS, ROWS, b_desc.block_shape[-1]], B_LAYOUT
    )
    full_bar = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty_bar = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full_bar.index(stage), count=1)
        mbarrier.init(empty_bar.index(stage), count=WARPGROUPS)
    fence_async_shared()
    out_smem = None
    if out_desc is not None:
        out_smem = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_shape, out_desc.layout)  # noqa: RUF005
    scales = Scales(scales_ptr, zeros_ptr, stride_scales, GROUP)
    problem = _Problem(
        out_ptr, out_desc, M, N, K, tiles_m, tiles, K_SLICES, HAS_BIAS, GATED, ACCUMULATE, OVERLAPS, OVERLAPS, scales
    )  # fmt: skip
    ring = Ring(
        a_smem, b_smem, out_smem, full_bar, empty_bar, BLOCK_M, BLOCK_N, COPIES, B_COPIES, PACKING, ROWS, NUM_STAGES,
        WARPGROUPS, STEPS,
    )  # fmt: skip
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (_mma_partition, (bias_ptr, problem, ring, gl.constexpr(0))),
                (load_partition, (a_desc, b_desc, problem, ring)),
            ],
            [1],
            [_COPYING_REGISTERS],
        )
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_mma_partition, (bias_ptr, problem, ring, gl.constexpr(0))),
                (_mma_partition, (bias_ptr, problem, ring, gl.constexpr(1))),
                (load_partition, (a_desc, b_desc, problem, ring)),
            ],
            [4, 1],
            [_REGISTERS, _COPYING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_mma_partition, (bias_ptr, problem, ring, gl.constexpr(0))),
                (_mma_partition, (bias_ptr, problem, ring, gl.constexpr(1))),
                (_mma_partition, (bias_ptr, problem, ring, gl.constexpr(2))),
                (load_partition, (a_desc, b_desc, problem, ring)),
            ],
            [4, 4, 1],
            [_REGISTERS, _REGISTERS, _COPYING_REGISTERS],
        )


@cache
def shared_layout(rank: int = 2, columns: int = _COPY_K.value) -> gl.NVMMASharedLayout:
    """How a copied block of 16 bits lies in shared memory, which its descriptor must know."""
    swizzle = 2 * min(_COPY_K.value, columns)
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=rank)


@cache
def _codes_layout(block_k: int, rank: int = 2) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, block_k // 2), element_bitwidth=32, rank=rank)


def _describe(matrix: torch.Tensor, block_rows: int, block_columns: int = _COPY_K.value) -> TensorDescriptor:
    stride, _ = leading_dim(matrix)
    layout = shared_layout(2, block_columns)
    return TensorDescriptor(matrix, list(matrix.shape), [stride, 1], [block_rows, block_columns], layout)


def _describe_codes(codes: torch.Tensor, block_rows: int, block_k: int) -> TensorDescriptor:
    stride, _ = leading_dim(codes)
    block = [block_rows, block_k // CODES.value]
    return TensorDescriptor(codes, list(codes.shape), [stride, 1], block, _codes_layout(block_k))


def _describe_in_turn(
    weight: torch.Tensor, block_rows: int, block: int, layout: gl.NVMMASharedLayout
) -> TensorDescriptor:
    """Of [gate, up], in blocks of the columns of b that a partition takes, eight of gate and eight of up in turn."""
    (rows, k), (stride, _) = weight.shape, leading_dim(weight)
    turn = _IN_TURN.value
    shape, strides = [rows // (2 * turn), 2, turn, k], [turn * stride, rows // 2 * stride, stride, 1]
    return TensorDescriptor(weight, shape, strides, [block_rows // (2 * turn), 2, turn, block], layout)


def gemm_sm90_swap_ab(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    reduction: LinearReduction,
    tile: NarrowTile,
    overlaps: bool = False,
    gated: bool = False,
    scales: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """``a @ b + bias``, or of a gated layer the product of both halves, one of them activated.

    Args:
        a: [M, K] bf16 or fp16, at least one row, with K as the contiguous side; addresses and strides are multiples of
            16 bytes.
        b: [K, N] of the same kind; gated, of [gate, up], N is a multiple of 16.
        bias: [N], or None, as it is for a gated layer.
        out: [M, N], packed, or gated [M, N / 2].
        reduction: decides the bits; that of a gated layer has no slices.
        tile: decides the speed; one of :data:`.schedule.GATED_TILES` for a gated layer.
        overlaps: whether the launch does not wait for kernels before, which must not write b.
        gated: whether out is silu(a @ gate) * (a @ up).
        scales: where b is int32 [K / 8, N] of codes of four bits, those of groups [N, K / group] of a's dtype, and zero
            points of 8 bits, of the same shape, if there are any.

    Returns:
        ``out``.
    """
    (m, k), n = a.shape, b.shape[1]
    codes = b.t()
    group, zeros = 0, None
    rows = tile.block_n if scales else LONG_SIDE.value
    if scales:
        b_desc = (
            _describe_in_turn(codes, rows, tile.block_k // CODES.value, _codes_layout(tile.block_k, 4))
            if gated
            else _describe_codes(codes, rows, tile.block_k)
        )
        scale, *rest = scales
        zeros = rest[0] if rest else None
        group = k // scale.shape[1] if scale.shape[1] > 1 else _ONE_SCALE
    elif gated:
        b_desc = _describe_in_turn(codes, rows, _COPY_K.value, shared_layout(4))
    else:
        b_desc = _describe(codes, min(tile.block_n, LONG_SIDE.value))
    tiles_m, tiles_n = triton.cdiv(m, tile.block_m), triton.cdiv(n, tile.block_n)
    columns = tile.block_n // 2 if gated else tile.block_n
    writes_blocks = scales and tile.writes_blocks and out.stride(0) * out.element_size() % ALIGNMENT == 0
    launch(
        gemm_sm90_swap_ab_kernel,
        min(tiles_m * tiles_n, tile.ctas_per_sm * Gpu.of(a.get_device()).num_sms),
        (
            _describe(a, tile.block_m),
            b_desc,
            None if bias is None else bias.contiguous(),
            out,
            _describe(out, _WRITTEN.value, columns) if writes_blocks else None,
            scales[0] if scales else None,
            zeros,
            m,
            n,
            k,
            tiles_m,
            tiles_m * tiles_n,
            scales[0].stride(0) if scales else None,
        ),
        on=a,
        GROUP=group,
        K_SLICES=reduction.k_slices,
        HAS_BIAS=bias is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        NUM_STAGES=tile.num_stages,
        WARPGROUPS=1 if scales else tile.warpgroups,
        num_warps=max(rows, LONG_SIDE.value) // 16,
        GATED=gated,
        ACCUMULATE=TL_DTYPES[reduction.accumulate],
        **LaunchSchedule(overlaps).options,
        maxnreg=_REGISTERS.value if tile.block_m <= 2 * LONG_SIDE.value else _REGISTERS_OF_FEW,
        enable_fp_fusion=reduction.enable_fp_fusion,
    )
    return out
