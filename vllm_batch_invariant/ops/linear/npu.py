"""Products on an Ascend NPU, in triton-ascend: one fp32 accumulator an element, K upwards, in tiles that N sizes.

That tiles of other sizes give a row the same bits is not known of the cube cores, so the tile is a part of the
reduction: whatever the number of rows, they are padded to whole tiles, and one binary serves them all. N and K are
compile-time constants and no mask follows M, so a step has a static number of rows, and a kernel that neither masks
rows nor adds a bias stays on the cube cores, without synchronisation with vector cores. Compiled and simulated, never
run on hardware (tests/npu/offline).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.npu_rows import check_covered, cube_grid, on, vector_grid
from .reduction import LinearReduction

_WIDE = 8192
_BIAS_BLOCK = 2048


@dataclass(frozen=True)
class Tile:
    """What a cube core computes at a time: [rows, columns] of the result, in steps of ``depth`` along K."""

    rows: int
    columns: int
    depth: int


def tile_for(columns: int) -> Tile:
    """The tile for products with N = ``columns``; a part of the reduction, so it may not see M.

    128 rows also for one: a cube core multiplies a tile in about the time in which its share of the memory bandwidth
    brings the weight's part of it (an estimate from data sheets). Wide tiles read the rows less often, and narrow ones
    share a small weight among more cores.
    """
    return Tile(128, 256 if columns >= _WIDE else 128, 128)


@triton.jit
def _load(
    matrix,
    first_row,
    first_column,
    height: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    cut_rows: tl.constexpr,
    cut_columns: tl.constexpr,
):
    """[rows, columns] of a packed [height, width] matrix. What is beyond an edge reads as zero, where that is cut."""
    down, across = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :]
    # 64-bit, because a matrix may have more than 2**31 elements.
    places = matrix + tl.cast(first_row, tl.int64) * width + first_column + down * width + across
    if cut_rows and cut_columns:
        part = tl.load(places, mask=(down + first_row < height) & (across + first_column < width), other=0.0)
    elif cut_rows:
        part = tl.load(places, mask=down + first_row < height, other=0.0)
    elif cut_columns:
        part = tl.load(places, mask=across + first_column < width, other=0.0)
    else:
        part = tl.load(places)
    return part


@triton.jit(do_not_specialize=["entries", "tiles_m"], do_not_specialize_on_alignment=["a", "b", "out"])
def _product_kernel(
    a,
    b,
    out,
    entries,
    tiles_m,
    n: tl.constexpr,
    k: tl.constexpr,
    by_columns: tl.constexpr,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
):
    """a: [entries, tiles_m * tile_m, k], b: [entries, k, n] (or its transpose, if ``by_columns``), out: [entries,
    tiles_m * tile_m, n], all packed.
    """
    tiles_n: tl.constexpr = (n + tile_n - 1) // tile_n
    cut_n: tl.constexpr = n % tile_n != 0
    cut_k: tl.constexpr = k % tile_k != 0
    for tile in range(tl.program_id(0), entries * tiles_m * tiles_n, tl.num_programs(0)):
        row = tile // tiles_n
        entry = row // tiles_m
        first_n = tile % tiles_n * tile_n
        a_rows = a + row.to(tl.int64) * (tile_m * k)
        b_entry = b + entry.to(tl.int64) * (n * k)
        acc = tl.zeros((tile_m, tile_n), tl.float32)
        for first_k in range(0, k, tile_k):
            step_a = _load(a_rows, 0, first_k, tile_m, k, tile_m, tile_k, False, cut_k)
            if by_columns:
                step_b = tl.trans(_load(b_entry, first_n, first_k, n, k, tile_n, tile_k, cut_n, cut_k))
            else:
                step_b = _load(b_entry, first_k, first_n, k, n, tile_k, tile_n, cut_k, cut_n)
            acc = tl.dot(step_a, step_b, acc, input_precision="ieee")
        down, across = tl.arange(0, tile_m)[:, None], first_n + tl.arange(0, tile_n)[None, :]
        places = out + row.to(tl.int64) * (tile_m * n) + down * n + across
        if cut_n:
            tl.store(places, acc.to(out.dtype.element_ty), mask=across < n)
        else:
            tl.store(places, acc.to(out.dtype.element_ty))


@triton.jit(
    do_not_specialize=["items", "blocks", "length"], do_not_specialize_on_alignment=["accumulated", "bias", "out"]
)
def _add_bias_kernel(accumulated, bias, out, items, blocks, length, block: tl.constexpr):
    """out = accumulated + bias in fp32, rounded once: a kernel of its own, because it needs the vector cores."""
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        places = item % blocks * block + tl.arange(0, block)
        row = item // blocks
        start = row.to(tl.int64) * length
        mask = places < length
        value = tl.load(accumulated + start + places, mask=mask, other=0.0)
        value += tl.load(bias + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + start + places, value.to(out.dtype.element_ty), mask=mask)


def mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[M, K] @ [K, N] + bias; see the operation's package for the contract."""
    if bias is None:
        return _product(a[None], b[None], a.dtype)[0]
    return _with_bias(accumulate(a, b), bias, a.dtype)


def accumulate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[M, K] @ [K, N], not yet rounded: the result is in the reduction's accumulator dtype."""
    return accumulate_batch(a[None], b[None])[0]


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, M, K] @ [B, K, N]; an entry has the bits of :func:`mm`."""
    return _product(a, b, a.dtype)


def accumulate_batch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, M, K] @ [B, K, N], not yet rounded."""
    return _product(a, b, torch.float32)


def prepare(weight: torch.Tensor, rows: int, bias: bool = False, sizes: Iterable[int] = ()) -> None:  # noqa: ARG001
    """Compile the kernels that ``linear`` with such a weight [N, K] needs. Nothing is measured, and neither ``rows``
    nor ``sizes`` matter, because one binary serves all.
    """
    added = weight.new_zeros(weight.shape[0]) if bias else None
    mm(weight.new_zeros(1, weight.shape[1]), weight.detach().t(), added)


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, M, K] @ [B, K, N] as a contiguous [B, M, N] in ``dtype``."""
    (entries, m, k), n = a.shape, b.shape[2]
    reduction = LinearReduction(n, k, a.dtype)
    check_covered("a product", a, b)
    if 0 in (entries, m, n, k):
        return torch.zeros(entries, m, n, dtype=dtype, device=a.device)
    tile = tile_for(reduction.out_features)
    tiles_m = triton.cdiv(m, tile.rows)
    padding = tiles_m * tile.rows - m
    padded = torch.nn.functional.pad(a, (0, 0, 0, padding)) if padding else a
    by_columns = not b.is_contiguous() and b.transpose(1, 2).is_contiguous()
    out = torch.empty(entries, m + padding, n, dtype=dtype, device=a.device)
    with on(a.device):
        _product_kernel[cube_grid(entries * tiles_m * triton.cdiv(n, tile.columns), a.device)](
            padded.contiguous(),
            b if by_columns else b.contiguous(),
            out,
            entries,
            tiles_m,
            n=n,
            k=k,
            by_columns=by_columns,
            tile_m=tile.rows,
            tile_n=tile.columns,
            tile_k=tile.depth,
        )
    return out[:, :m].contiguous()


def _with_bias(accumulated: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """accumulated: [M, N] fp32 plus bias: [N], in ``dtype``."""
    m, n = accumulated.shape
    check_covered("a product", bias)
    out = torch.empty(m, n, dtype=dtype, device=accumulated.device)
    if out.numel():
        blocks = triton.cdiv(n, _BIAS_BLOCK)
        with on(out.device):
            _add_bias_kernel[vector_grid(m * blocks, out.device)](
                accumulated, bias.contiguous(), out, m * blocks, blocks, n, block=_BIAS_BLOCK
            )
    return out
