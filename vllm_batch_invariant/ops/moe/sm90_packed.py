"""Grouped products with weights of four bits by Hopper's wgmma, in Gluon: the chains of :mod:`.triton_kernels`, of what
a format stores.

Operands are swapped: wgmma's long side has rows of the weight, which a warp holds decoded in registers
(:mod:`..linear.sm90_packed`), and its short side the pairs of one expert. Programs stay and take tile after tile; some
warps copy, over the end of a tile, too: codes by the tensor memory accelerator, rows of x by addresses, since pairs lie
anywhere. The others decode and multiply::

    acc = 0                                                # [ROWS, BLOCK_M]
    for k in range(0, K, 16):
        acc += decoded(weight[expert, n, k : k + 16]) @ x[row(pair), k : k + 16].T

Of a gated layer eight rows of gate and eight of up come in turn, so that a thread has both of a result.
"""

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

from ..common.gluon_names import barrier, copy_block, reinterpret
from ..common.gpu import Gpu
from ..common.launch import launch
from ..common.sm90_ring import next_stage
from ..common.triton_names import aggregate, value
from ..formats.triton_decode import PackedTile
from ..linear.reduction import LinearReduction
from ..linear.sm90_packed import (
    CHUNK_K,
    CODES,
    Scales,
    ask_for_rows,
    codes_layout,
    decoded_by_16,
    gathered,
    gathered_steps,
    in_order_of_16,
    load_pairs,
    load_scales,
    load_steps,
    load_words,
    load_words_at,
    rows_layout,
    spread_layout,
    steps_layout,
    steps_of_chunks,
)
from ..silu.sm90_kernels import rounded, silu_and_mul

_IN_TURN = gl.constexpr(8)
"""Rows of gate, and of up behind them: a thread has rows of the accumulator that are so far apart."""


@triton.constexpr_function
def _copying_registers(BLOCK_M):
    """Of a thread that copies: it has 32 or 64 bytes of x in each chunk."""
    return 56 if BLOCK_M in (8, 32) else 72


_ONE_SCALE = 1 << 30
"""More elements of K than a row has: then a row has one scale."""
_ALPHA, _LIMIT = gl.constexpr(1.702), gl.constexpr(7.0)
"""Of "swigluoai"."""


@aggregate
class _Problem:
    """What is multiplied, and by which tiles."""

    x_ptr: value
    """[rows, K]"""
    codes_ptr: value
    """int32 [experts, N, K / CODES], or gated 2 * N"""
    bias_ptr: value
    """[experts, N], or gated [experts, 2 * N]; or None"""
    out_ptr: value
    """[pairs, N]"""
    pairs_ptr: value
    """int32 [blocks * BLOCK_M]"""
    stop_ptr: value
    """int32 [experts], where an expert's pairs end"""
    expert_ptr: value
    """int32 [blocks], -1 for a block without pairs, behind all others"""
    num_pairs: value
    N: value
    K: value
    tiles_n: value
    num_tiles: value
    scales: value
    PAIRS_OF_A_ROW: gl.constexpr
    ACTIVATION: gl.constexpr
    HAS_BIAS: gl.constexpr
    OVERLAPS: gl.constexpr


@aggregate
class _Ring:
    """Shared memory for ``NUM_STAGES`` steps of K, and a step's barriers."""

    x_smem: gl.shared_memory_descriptor
    """[NUM_STAGES * CHUNKS, BLOCK_M, CHUNK_K]"""
    codes_smem: gl.shared_memory_descriptor
    """int32 [NUM_STAGES, ROWS, CHUNKS * CHUNK_K / CODES]"""
    full_bar: gl.shared_memory_descriptor
    """[NUM_STAGES, 1]"""
    empty_bar: gl.shared_memory_descriptor
    wide_smem: gl.shared_memory_descriptor
    """[BLOCK_M, CHUNK_K]"""
    BLOCK_M: gl.constexpr
    ROWS: gl.constexpr
    """Of the weight in a tile."""
    CHUNKS: gl.constexpr
    """Of K in a step."""
    NUM_STAGES: gl.constexpr
    COPYING_WARPS: gl.constexpr
    """Of a partition that copies."""
    COPIERS: gl.constexpr


@gluon.jit
def _look_up(problem, tile, BLOCK_M: gl.constexpr):
    """The expert of a tile, and how many pairs it has."""
    block = tile // problem.tiles_n
    expert = gl.load(problem.expert_ptr + block, mask=tile < problem.num_tiles, other=-1)
    stop = gl.load(problem.stop_ptr + expert, mask=expert >= 0, other=0)
    return expert, gl.where(expert >= 0, gl.minimum(stop - block * BLOCK_M, BLOCK_M), 0)


@gluon.jit
def _ask_for_scales(problem, expert, first_n, ring):
    """Has those of a tile brought to the L2 cache."""
    scales, N = problem.scales, problem.N
    ROWS: gl.constexpr = ring.ROWS
    WARPS: gl.constexpr = ring.COPYING_WARPS
    if problem.ACTIVATION == "":
        ask_for_rows(scales, expert * N + first_n, gl.minimum(ROWS, N - first_n), WARPS)
    elif problem.ACTIVATION == "swigluoai":
        ask_for_rows(scales, 2 * (expert * N + first_n), gl.minimum(ROWS, 2 * (N - first_n)), WARPS)
    else:
        count = gl.minimum(ROWS // 2, N - first_n)
        ask_for_rows(scales, 2 * expert * N + first_n, count, WARPS)
        ask_for_rows(scales, (2 * expert + 1) * N + first_n, count, WARPS)


@gluon.jit
def _load_x(problem, ring, x_ptrs, offs_k, k):
    """The rows of a tile's pairs from k on, [BLOCK_M, CHUNK_K] of each chunk of a step."""
    found = ()
    for chunk in gl.static_range(ring.CHUNKS):
        at = k + chunk * CHUNK_K
        of_chunk = gl.load(x_ptrs + at, mask=(at + offs_k < problem.K)[None, :], other=0.0)
        found = found + (of_chunk,)  # noqa: RUF005 - Triton has no starred ones
    return found


@gluon.jit
def _copy_partition(w_desc, problem, ring, WHICH: gl.constexpr):
    """Keeps the ring full: one of COPIERS partitions, that take steps in turn, each with rows of x on their way."""
    WARPS: gl.constexpr = ring.COPYING_WARPS
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [WARPS, 1], [1, 0])
    GATED: gl.constexpr = problem.ACTIVATION != ""
    STEP_K: gl.constexpr = CHUNK_K * ring.CHUNKS
    WORDS: gl.constexpr = STEP_K // CODES
    COLUMNS: gl.constexpr = ring.ROWS // 2 if GATED else ring.ROWS
    if problem.OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    in_block = gl.arange(0, ring.BLOCK_M, gl.SliceLayout(1, layout))
    offs_k = gl.arange(0, CHUNK_K, gl.SliceLayout(0, layout))
    COPIERS: gl.constexpr = ring.COPIERS
    stage, phase = gl.to_tensor(WHICH), gl.to_tensor(1)
    steps, first = (problem.K + STEP_K - 1) // STEP_K, gl.to_tensor(WHICH)  # of a tile, and that to begin with
    tile = gl.program_id(0)
    expert, count = _look_up(problem, tile, ring.BLOCK_M)
    while count > 0:
        first_n = tile % problem.tiles_n * COLUMNS
        slots = tile // problem.tiles_n * ring.BLOCK_M + in_block
        pairs = gl.load(problem.pairs_ptr + slots, mask=in_block < count, other=0)  # any row where there is no pair
        x_ptrs = problem.x_ptr + ((pairs // problem.PAIRS_OF_A_ROW).to(gl.int64) * problem.K)[:, None] + offs_k[None, :]
        if WHICH == 0:
            _ask_for_scales(problem, expert, first_n, ring)
        of_tile = expert
        tile += gl.num_programs(0)
        expert, count = _look_up(problem, tile, ring.BLOCK_M)
        x = _load_x(problem, ring, x_ptrs, offs_k, first * STEP_K)  # on its way while there is no place for it
        for step in range(first, steps, COPIERS):
            start_k = step * STEP_K
            mbarrier.wait(ring.empty_bar.index(stage), phase)
            full, codes = ring.full_bar.index(stage), ring.codes_smem.index(stage)
            mbarrier.expect(full, ring.ROWS * WORDS * 4)
            if GATED:
                TURNS: gl.constexpr = ring.ROWS // (2 * _IN_TURN)
                in_turn = reinterpret(codes, w_desc.dtype, [1, TURNS, 2, _IN_TURN, WORDS], w_desc.layout)
                copy_block(w_desc, [of_tile, first_n // _IN_TURN, 0, 0, start_k // CODES], full, in_turn)
            else:
                of_expert = reinterpret(codes, w_desc.dtype, [1, ring.ROWS, WORDS], w_desc.layout)
                copy_block(w_desc, [of_tile, first_n, start_k // CODES], full, of_expert)
            for chunk in gl.static_range(ring.CHUNKS):
                ring.x_smem.index(stage * ring.CHUNKS + chunk).store(in_order_of_16(x[chunk]))
            fence_async_shared()  # wgmma reads it
            mbarrier.arrive(full)
            x = _load_x(problem, ring, x_ptrs, offs_k, start_k + COPIERS * STEP_K)
            stage += COPIERS
            is_around = stage >= ring.NUM_STAGES
            stage = gl.where(is_around, stage - ring.NUM_STAGES, stage)
            phase = gl.where(is_around, phase ^ 1, phase)
        first += gl.maximum((steps - first + COPIERS - 1) // COPIERS, 0) * COPIERS - steps


@gluon.jit
def _row_of(problem, expert, first_n, in_tile):
    """Which row of all experts' weights a row of a tile is, and whether it is there."""
    if problem.ACTIVATION == "":
        column = first_n + in_tile
        row = expert * problem.N + column
    else:
        column = first_n + in_tile // (2 * _IN_TURN) * _IN_TURN + in_tile % _IN_TURN
        is_up = in_tile // _IN_TURN % 2
        if problem.ACTIVATION == "swigluoai":
            row = 2 * (expert * problem.N + column) + is_up
        else:
            row = (2 * expert + is_up) * problem.N + column
    return row.to(gl.int64), column < problem.N


@gluon.jit
def _swigluoai(gate, up, DTYPE: gl.constexpr):
    """As :func:`.triton_kernels._activated`, of two accumulators. NaN stays NaN."""
    gate, up = rounded(gate, DTYPE), rounded(up, DTYPE)
    gate = gl.where(gate > _LIMIT, _LIMIT, gate)
    up = gl.where(up > _LIMIT, _LIMIT, gl.where(up < -_LIMIT, -_LIMIT, up))
    one = gl.full(gate.shape, 1.0, gl.float32, gate.type.layout)
    return ((up + 1.0) * (gate * gl.div_rn(one, 1.0 + gl.exp(-(gate * _ALPHA))))).to(DTYPE)


@triton.constexpr_function
def _kind_of(scales_dtype):
    return {"int16": "e2m1", "int32": "steps"}.get(str(scales_dtype), "int4")


@gluon.jit
def _load_scales(problem, ring, offs, mask_n, k):
    """Those of a step from k on, as :func:`decoded_by_16` takes them of its chunks; of FP4 not yet gathered."""
    KIND: gl.constexpr = _kind_of(problem.scales.scales_ptr.dtype.element_ty)
    if KIND == "e2m1":
        found = load_pairs(problem.scales, offs, mask_n, k, problem.K, ring.CHUNKS)
    elif KIND == "steps":
        found = load_steps(problem.scales, offs, mask_n, k, problem.K, ring.CHUNKS)
    else:
        dtype: gl.constexpr = problem.out_ptr.dtype.element_ty
        found = load_scales(problem.scales, offs, mask_n, k, problem.K, ring.CHUNKS, ring.ROWS, dtype)
    return found


@gluon.jit
def _wide_tile(problem, ring, pairs, offs, row, mask_n, LAYOUT: gl.constexpr):
    """A tile of MXFP4 in which scales are of all sizes, from memory: slow, as no checkpoint needs it.

    Args:
        pairs: of the tile [BLOCK_M], -1 for none.
        offs: where scales of its rows begin [ROWS].
        row: of the weight, of each.
        mask_n: whether it is there.
    """
    ROWS: gl.constexpr = ring.ROWS
    dtype: gl.constexpr = problem.out_ptr.dtype.element_ty
    of_x: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [ROWS // 16, 1], [1, 0])
    of_row = gl.convert_layout(pairs, gl.SliceLayout(1, of_x))
    x_ptrs = problem.x_ptr + ((gl.maximum(of_row, 0) // problem.PAIRS_OF_A_ROW).to(gl.int64) * problem.K)[:, None]
    x_ptrs += gl.arange(0, CHUNK_K, gl.SliceLayout(0, of_x))[None, :]
    of_codes = row * (problem.K // CODES)
    of_rows: gl.constexpr = gl.SliceLayout(1, spread_layout(ROWS, 2))
    offs, mask_n = gl.convert_layout(offs, of_rows), gl.convert_layout(mask_n, of_rows)
    acc = gl.full([ROWS, ring.BLOCK_M], 0.0, gl.float32, LAYOUT)
    for k in range(0, problem.K, CHUNK_K):
        first, _ = gathered(load_pairs(problem.scales, offs, mask_n, k, problem.K, 2))
        words = load_words_at(problem.codes_ptr, of_codes, mask_n, k, ROWS)
        weight = decoded_by_16(words, first, LAYOUT, dtype, "wide e2m1")
        ring.wide_smem.store(in_order_of_16(gl.load(x_ptrs + k)))
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(weight, ring.wide_smem.permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        barrier()
    return acc


@gluon.jit
def _multiply_partition(problem, ring):
    """Decodes and multiplies: all of K for whole tiles. Scales are asked for two steps ahead."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[ring.ROWS // 16, 1], instr_shape=[16, ring.BLOCK_M, 16]
    )
    GATED: gl.constexpr = problem.ACTIVATION != ""
    STEP_K: gl.constexpr = CHUNK_K * ring.CHUNKS
    COLUMNS: gl.constexpr = ring.ROWS // 2 if GATED else ring.ROWS
    ROWS: gl.constexpr = ring.ROWS
    KIND: gl.constexpr = _kind_of(problem.scales.scales_ptr.dtype.element_ty)
    dtype: gl.constexpr = problem.out_ptr.dtype.element_ty
    if problem.OVERLAPS:
        gdc_wait()
    if KIND == "e2m1":
        of_scales = gl.arange(0, ROWS, gl.SliceLayout(1, spread_layout(ROWS, ring.CHUNKS)))
    elif KIND == "steps":
        of_scales = gl.arange(0, ROWS, gl.SliceLayout(1, steps_layout(ROWS, ring.CHUNKS)))
    else:
        of_scales = gl.arange(0, ROWS, rows_layout(ROWS, problem.scales.GROUP))
    in_block = gl.arange(0, ring.BLOCK_M, gl.SliceLayout(0, layout))
    in_tile = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    tile = gl.program_id(0)
    expert, count = _look_up(problem, tile, ring.BLOCK_M)
    while count > 0:
        first_n = tile % problem.tiles_n * COLUMNS
        row, mask_n = _row_of(problem, expert, first_n, of_scales)
        offs = row * problem.scales.stride
        slots = tile // problem.tiles_n * ring.BLOCK_M + in_block
        pairs = gl.load(problem.pairs_ptr + slots, mask=in_block < count, other=-1)  # on their way meanwhile
        acc = gl.full([ROWS, ring.BLOCK_M], 0.0, gl.float32, layout)
        if problem.HAS_BIAS:
            of_bias, has_row = _row_of(problem, expert, first_n, in_tile)
            bias = gl.load(problem.bias_ptr + of_bias, mask=has_row, other=0.0)
        tile += gl.num_programs(0)
        expert, count = _look_up(problem, tile, ring.BLOCK_M)
        now = _load_scales(problem, ring, offs, mask_n, 0)
        after = _load_scales(problem, ring, offs, mask_n, STEP_K)
        before, seen = gl.to_tensor(0), gl.full([ROWS, ring.CHUNKS], 0, gl.int16, spread_layout(ROWS, ring.CHUNKS))
        for start_k in range(0, problem.K, STEP_K):
            later = _load_scales(problem, ring, offs, mask_n, start_k + 2 * STEP_K)
            mbarrier.wait(ring.full_bar.index(stage), phase)
            codes = ring.codes_smem.index(stage)
            words = load_words(codes, 0, ROWS)
            if KIND == "e2m1":
                seen |= now
                scales = gathered(now)
            elif KIND == "steps":
                scales = steps_of_chunks(now)
            else:
                scales = now
            for chunk in gl.static_range(ring.CHUNKS):
                decoding = words
                if chunk + 1 < ring.CHUNKS:
                    words = load_words(codes, chunk + 1, ROWS)
                of_chunk = gathered_steps(scales[chunk]) if KIND == "steps" else scales[chunk]
                weight = decoded_by_16(decoding, of_chunk, layout, dtype, KIND)
                x = ring.x_smem.index(stage * ring.CHUNKS + chunk)
                acc = warpgroup_mma(weight, x.permute([1, 0]), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                if chunk == 0:
                    mbarrier.arrive(ring.empty_bar.index(before), pred=start_k > 0)
            now, after, before = after, later, stage
            stage, phase = next_stage(stage, phase, ring.NUM_STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        # ptxas 12.8 and 12.9 round accumulators before that wait if no branch follows it: this barrier was passed
        mbarrier.wait(ring.full_bar.index(before), phase ^ (stage == 0).to(gl.int32))
        mbarrier.arrive(ring.empty_bar.index(before))
        if KIND == "e2m1":  # noqa: SIM102 - decided when the kernel is compiled
            if gl.max(gl.max(seen.to(gl.int32) & 0x8080, 1), 0) > 0:
                acc = _wide_tile(problem, ring, pairs, offs, row, mask_n, layout)
        if problem.HAS_BIAS:
            acc += bias.to(gl.float32)[:, None]
        if GATED:
            gate, up = acc.reshape([ROWS // _IN_TURN // 2, 2, _IN_TURN, ring.BLOCK_M]).permute([0, 2, 3, 1]).split()
            made = _swigluoai(gate, up, dtype) if problem.ACTIVATION == "swigluoai" else silu_and_mul(gate, up, dtype)
            made = made.reshape([COLUMNS, ring.BLOCK_M])
        else:
            made = acc.to(dtype)
        offs_n = first_n + gl.arange(0, COLUMNS, gl.SliceLayout(1, made.type.layout))
        to_pairs = gl.convert_layout(pairs, gl.SliceLayout(0, made.type.layout))
        offs_out = to_pairs.to(gl.int64)[None, :] * problem.N + offs_n[:, None]
        gl.store(problem.out_ptr + offs_out, made, mask=(to_pairs >= 0)[None, :] & (offs_n < problem.N)[:, None])


@gluon.jit(do_not_specialize=["num_pairs", "tiles_n", "num_tiles", "stride_scales"])
def grouped_packed_sm90_kernel(
    x_ptr,
    w_desc,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    pairs_ptr,
    stop_ptr,
    expert_ptr,
    num_pairs,
    N,
    K,
    tiles_n,
    num_tiles,
    stride_scales,
    GROUP: gl.constexpr,
    PAIRS_OF_A_ROW: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    COPYING_WARPS: gl.constexpr,
    COPIERS: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """As :func:`.triton_kernels.grouped_gemm_kernel`. ``w_desc`` is of codes, int32 [experts, N, K / CODES] in blocks
    [1, ROWS, BLOCK_K / CODES], or gated [experts, N / _IN_TURN, 2, _IN_TURN, K / CODES]. ``scales`` as
    :class:`..linear.sm90_packed.Scales` has them.
    """
    CHUNKS: gl.constexpr = BLOCK_K // CHUNK_K
    X_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_smem = gl.allocate_shared_memory(
        out_ptr.dtype.element_ty, [NUM_STAGES * CHUNKS, BLOCK_M, CHUNK_K], X_LAYOUT
    )  # fmt: skip
    codes_smem = gl.allocate_shared_memory(w_desc.dtype, [NUM_STAGES, ROWS, BLOCK_K // CODES], codes_layout(BLOCK_K))
    wide_smem = gl.allocate_shared_memory(out_ptr.dtype.element_ty, [BLOCK_M, CHUNK_K], X_LAYOUT)
    full_bar = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty_bar = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full_bar.index(stage), count=2)
        mbarrier.init(empty_bar.index(stage), count=1)
    fence_async_shared()
    scales = Scales(scales_ptr, zeros_ptr, stride_scales, GROUP)
    problem = _Problem(
        x_ptr, codes_ptr, bias_ptr, out_ptr, pairs_ptr, stop_ptr, expert_ptr, num_pairs, N, K, tiles_n, num_tiles,
        scales, PAIRS_OF_A_ROW, ACTIVATION, HAS_BIAS, OVERLAPS,
    )  # fmt: skip
    ring = _Ring(
        x_smem,
        codes_smem,
        full_bar,
        empty_bar,
        wide_smem,
        BLOCK_M,
        ROWS,
        CHUNKS,
        NUM_STAGES,
        COPYING_WARPS,
        COPIERS,
    )
    REGISTERS: gl.constexpr = _copying_registers(BLOCK_M)
    if COPIERS == 1:
        gl.warp_specialize(
            [(_multiply_partition, (problem, ring)), (_copy_partition, (w_desc, problem, ring, gl.constexpr(0)))],
            [COPYING_WARPS],
            [REGISTERS],
        )
    elif COPIERS == 2:
        gl.warp_specialize(
            [
                (_multiply_partition, (problem, ring)),
                (_copy_partition, (w_desc, problem, ring, gl.constexpr(0))),
                (_copy_partition, (w_desc, problem, ring, gl.constexpr(1))),
            ],
            [COPYING_WARPS] * 2,
            [REGISTERS] * 2,
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_partition, (problem, ring)),
                (_copy_partition, (w_desc, problem, ring, gl.constexpr(0))),
                (_copy_partition, (w_desc, problem, ring, gl.constexpr(1))),
                (_copy_partition, (w_desc, problem, ring, gl.constexpr(2))),
                (_copy_partition, (w_desc, problem, ring, gl.constexpr(3))),
            ],
            [COPYING_WARPS] * 4,
            [REGISTERS] * 4,
        )


def covers(form: PackedTile, n: int, k: int, activation: str) -> bool:
    """Whether the kernel multiplies experts' weights [N, K] of a format; the activation is that of
    :func:`.cuda.grouped_gemm`.
    """
    whole = not form.group or k % form.group == 0
    sides = k % CHUNK_K.value == 0 and n % (2 * _IN_TURN.value if activation else 1) == 0
    return whole and sides and activation in ("", "silu", "swigluoai")


def grouped_packed_sm90(
    x: torch.Tensor,
    weight: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    form: PackedTile,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    groups: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    reduction: LinearReduction,
    *,
    activation: str,
    block_m: int,
    rows: int,
    block_k: int,
    num_stages: int,
    ctas_per_sm: int,
    copying_warps: int,
    copiers: int,
) -> None:
    """Write each pair's product to ``out`` [pairs, N].

    Args:
        x: [rows, K], packed, its address a multiple of 16 bytes.
        weight: int32 [experts, N, K / 8], or gated 2 * N, scales and zero points, packed, of what the kernel
            :func:`covers`.
        form: of the weight.
        bias: [experts, N], or gated 2 * N; or None.
        out: packed.
        groups: pairs in blocks of ``block_m``, and the two that follow them in :class:`.cuda.Groups`.
        reduction: decides the bits.
        activation: of gate and up, as in :func:`.cuda.grouped_gemm`.
        block_m: pairs of a tile, from 8 to 128.
        rows: of the weight in a tile, 64 or 128.
        block_k: elements of K in a step, 128 or 256.
        num_stages: steps that shared memory holds.
        ctas_per_sm: programs of a multiprocessor.
        copying_warps: of a partition that copies.
        copiers: such partitions: 1, 2 or 4.
    """
    codes, scales, zeros = weight
    experts, of_expert, words = codes.shape
    n, k = out.shape[1], words * CODES.value
    pairs, stop, expert_of_block = groups
    box, layout = block_k // CODES.value, _layout(block_k, 5 if activation else 3)
    if activation:
        turn = _IN_TURN.value
        of_gate = (
            [2 * turn * words, words, 2 * words] if activation == "swigluoai" else [turn * words, n * words, words]
        )
        shape, strides = [experts, n // turn, 2, turn, words], [of_expert * words, *of_gate, 1]
        block = [1, rows // (2 * turn), 2, turn, box]
    else:
        shape, strides, block = [experts, n, words], [n * words, words, 1], [1, rows, box]
    if form.kind != "int4":
        scales = scales.view(torch.int16 if form.kind == "mxfp4" else torch.int32)
    columns = rows // 2 if activation else rows
    tiles_n = triton.cdiv(n, columns)
    num_tiles = len(expert_of_block) * tiles_n
    launch(
        grouped_packed_sm90_kernel,
        min(ctas_per_sm * Gpu.of(x.get_device()).num_sms, num_tiles),
        (
            x,
            TensorDescriptor(codes, shape, strides, block, layout),
            codes,
            scales,
            zeros,
            bias,
            out,
            pairs,
            stop,
            expert_of_block,
            len(out),
            n,
            k,
            tiles_n,
            num_tiles,
            scales.stride(1),
        ),
        on=x,
        waits=True,
        GROUP=form.group or _ONE_SCALE,
        PAIRS_OF_A_ROW=len(out) // len(x),
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        ROWS=rows,
        BLOCK_K=block_k,
        NUM_STAGES=num_stages,
        COPYING_WARPS=copying_warps,
        COPIERS=copiers,
        num_warps=rows // 16,
        maxnreg=_registers(rows // 16 + max(4, copying_warps * copiers), ctas_per_sm),
        enable_fp_fusion=reduction.enable_fp_fusion,
    )


def _layout(block_k: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, block_k // 2), element_bitwidth=32, rank=rank)


def _registers(warps: int, ctas_per_sm: int) -> int:
    """Of a thread when a program of so many warps begins: as many as let so many programs into a multiprocessor."""
    return min(168, 65536 // (ctas_per_sm * warps * 32) // 8 * 8)
