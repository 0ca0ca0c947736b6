"""The product by Hopper's wgmma for narrow weights, in Gluon: the same chain of steps over K.

One warp loads and a warpgroup multiplies, so that neither waits for the other's instructions. A multiprocessor takes in
at most 64 bytes a cycle, so that K takes as long as a tile's rows and columns together; where N is small, small tiles
give every multiprocessor one. Triton would load wgmma's long side of 64 whole; here only the columns of the tile are
loaded. The rest of it is what shared memory held before, and its rows of the result are not written.
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

from ..common.gluon_names import copy_block
from .schedule import NarrowTile

_LONG_SIDE = gl.constexpr(64)
"""Rows of wgmma's first operand, which are columns of b."""
_PART = gl.constexpr(64)
"""Elements of K that are copied at once: rows of 128 bytes, the longest that wgmma reads without conflicts."""


@gluon.jit
def _next(stage, phase, stages: gl.constexpr):
    """The next place in a ring, and the parity of its use."""
    last = stage == stages - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _load(
    a, b, ring_a, ring_b, ready, empty, first_m, first_n, k,
    tile_m: gl.constexpr, tile_n: gl.constexpr, parts: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    """One warp: keeps the rings full."""
    stage, phase = gl.to_tensor(0), gl.to_tensor(1)
    for start in range(0, k, _PART * parts):
        mbarrier.wait(empty.index(stage), phase)
        arrived = ready.index(stage)
        mbarrier.expect(arrived, (tile_m + tile_n) * _PART * parts * 2)
        for part in gl.static_range(parts):
            at = start + part * _PART
            step_a, step_b = ring_a.index(stage * parts + part), ring_b.index(stage * parts + part)
            copy_block(b, [first_n, at], arrived, step_b.slice(0, tile_n))
            copy_block(a, [first_m, at], arrived, step_a)
        stage, phase = _next(stage, phase, stages)


@gluon.jit
def _multiply(
    bias, out, ring_a, ring_b, ready, empty, first_m, first_n, m, n, k, has_bias: gl.constexpr,
    tile_m: gl.constexpr, tile_n: gl.constexpr, parts: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the chain of the whole tile. A step's place is free once the next step's products are queued."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tile_m, 16])
    acc = gl.full([_LONG_SIDE, tile_m], 0.0, gl.float32, layout)
    stage, phase, before = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for start in range(0, k, _PART * parts):
        mbarrier.wait(ready.index(stage), phase)
        for part in gl.static_range(parts):
            step_a, step_b = ring_a.index(stage * parts + part), ring_b.index(stage * parts + part)
            acc = warpgroup_mma(step_b, step_a.permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_wait(parts, deps=(acc,))
        mbarrier.arrive(empty.index(before), pred=start > 0)
        before = stage
        stage, phase = _next(stage, phase, stages)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    place = gl.arange(0, _LONG_SIDE, gl.SliceLayout(1, layout))
    at_n = first_n + place
    at_m = first_m + gl.arange(0, tile_m, gl.SliceLayout(0, layout))
    inside = (place < tile_n) & (at_n < n)
    if has_bias:
        acc += gl.load(bias + at_n, mask=inside, other=0.0).to(gl.float32)[:, None]
    places = at_m.to(gl.int64)[None, :] * n + at_n[:, None]
    gl.store(out + places, acc.to(out.dtype.element_ty), mask=inside[:, None] & (at_m < m)[None, :])


@gluon.jit(do_not_specialize=["m", "n", "k", "tiles_m"])
def narrow_kernel(
    a,
    b,
    bias,
    out,
    m,
    n,
    k,
    tiles_m,
    has_bias: gl.constexpr,
    tile_m: gl.constexpr,
    tile_n: gl.constexpr,
    parts: gl.constexpr,
    stages: gl.constexpr,
):
    """a: descriptor of [M, K], b: of [N, K], out: [M, N]. A step of K has ``parts`` times 64 elements. Elements beyond
    an edge read as zero and are not written.
    """
    first_m = gl.program_id(0) % tiles_m * tile_m
    first_n = gl.program_id(0) // tiles_m * tile_n
    ring_a = gl.allocate_shared_memory(a.dtype, [stages * parts, tile_m, _PART], a.layout)
    ring_b = gl.allocate_shared_memory(b.dtype, [stages * parts, _LONG_SIDE, _PART], b.layout)
    ready = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    bias, out, ring_a, ring_b, ready, empty, first_m, first_n, m, n, k, has_bias, tile_m, tile_n, parts,
                    stages,
                ),
            ),
            (_load, (a, b, ring_a, ring_b, ready, empty, first_m, first_n, k, tile_m, tile_n, parts, stages)),
        ],
        [1],
        [40],
    )  # fmt: skip


@cache
def shared_layout() -> gl.NVMMASharedLayout:
    """How a part of an operand of 16 bits lies in shared memory, which its descriptor must know."""
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * _PART.value, element_bitwidth=16, rank=2)


def _describe(matrix: torch.Tensor, stride: int, rows: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), [stride, 1], [rows, _PART.value], shared_layout())


def launch(
    a: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: NarrowTile,
    strides: tuple[int, int],
) -> None:
    """out = a @ weight.T + bias.

    Args:
        a: [M, K] bf16 or fp16, at least one row, with K as the inner side; addresses and strides are multiples of 16
            bytes.
        weight: [N, K] of the same kind.
        bias: [N], or None.
        out: [M, N], packed.
        tile: how the product is cut.
        strides: elements between the rows of a and of the weight.
    """
    (m, k), n = a.shape, weight.shape[0]
    tiles_m, tiles_n = triton.cdiv(m, tile.rows), triton.cdiv(n, tile.columns)
    with torch.cuda.device_of(a):
        narrow_kernel[(tiles_m * tiles_n,)](
            _describe(a, strides[0], tile.rows),
            _describe(weight, strides[1], tile.columns),
            None if bias is None else bias.contiguous(),
            out,
            m,
            n,
            k,
            tiles_m,
            has_bias=bias is not None,
            tile_m=tile.rows,
            tile_n=tile.columns,
            parts=tile.parts,
            stages=tile.stages,
            num_warps=4,
            maxnreg=128,
        )
