"""How a GEMM is cut into tiles on a GPU: speed only, since every tile adds K in the same order."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from ..common.gpu import Gpu
from ..formats import PLAIN, Format, integers
from .problem import GemmProblem
from .spec import BIAS, EPILOGUES, NONE, SWIGLU


@dataclass(frozen=True)
class Tile:
    """A tile of the result and how a program of Triton's kernels works on it."""

    block_m: int
    block_n: int
    block_k: int
    """Elements of K in one step of the loop."""
    num_warps: int
    num_stages: int


_FEW_ROWS_NARROW = Tile(16, 32, 128, num_warps=4, num_stages=5)
_FEW_ROWS = Tile(16, 64, 128, num_warps=4, num_stages=5)
_SOME_ROWS = Tile(64, 64, 128, num_warps=4, num_stages=3)
_MANY_ROWS = Tile(128, 128, 64, num_warps=8, num_stages=3)
_FP32_FEW_ROWS = Tile(16, 64, 32, num_warps=4, num_stages=3)
_FP32 = Tile(64, 64, 32, num_warps=8, num_stages=2)
_FP64 = Tile(32, 32, 16, num_warps=4, num_stages=2)


def ptr_tiles(dtype: torch.dtype) -> tuple[Tile, ...]:
    """Every tile that :func:`ptr_tile` may choose for operands of ``dtype``."""
    if dtype == torch.float64:
        return (_FP64,)
    if dtype == torch.float32:
        return _FP32_FEW_ROWS, _FP32
    return _FEW_ROWS_NARROW, _FEW_ROWS, _SOME_ROWS, _MANY_ROWS


def ptr_tile(m: int, n: int, dtype: torch.dtype, device: Gpu) -> Tile:
    """The tile for [M, K] @ [K, N] whose operands are read through pointers."""

    def programs(tile: Tile) -> int:
        return -(-m // tile.block_m) * -(-n // tile.block_n)

    if dtype == torch.float64:
        return _FP64
    if dtype == torch.float32:
        return _FP32_FEW_ROWS if m <= 16 else _FP32
    if m > 64 and 3 * programs(_MANY_ROWS) >= 2 * device.num_sms:
        return _fitted(_MANY_ROWS, device)
    if device.has_tcgen05 or (m > 16 and 2 * programs(_SOME_ROWS) >= device.num_sms):
        return _fitted(_SOME_ROWS, device)
    return _fitted(_FEW_ROWS if programs(_FEW_ROWS) >= device.num_sms else _FEW_ROWS_NARROW, device)


def _fitted(tile: Tile, device: Gpu) -> Tile:
    """The tile with no more stages than shared memory holds."""
    step = 2 * (tile.block_m + tile.block_n) * tile.block_k
    most = device.shared_memory // step
    return tile if tile.num_stages <= most else replace(tile, num_stages=max(2, most))


_TMA_SHAPES = (
    (16, 64, 256, 4),
    (32, 64, 256, 4),
    (64, 64, 128, 4),
    (64, 128, 128, 4),
    (128, 128, 64, 4),
    (128, 256, 64, 8),
)
"""``block_m``, ``block_n``, ``block_k`` and ``num_warps``."""
_RESERVED = 1024
"""Bytes of shared memory for barriers."""
_FMAS_A_CYCLE = 2048
"""Multiplications of 16-bit operands that the tensor cores of a Hopper multiprocessor do in a cycle."""
_REACHED = 0.8
_BYTES_A_CYCLE = 50
"""Into one multiprocessor; with the figure above and below, fitted to 23 weight shapes and 10 batch sizes on an H200:
within 0.3% of the best of these tiles in the geometric mean.
"""
_EPILOGUE_CYCLES = 500


def tma_tiles(out_bytes: int, device: Gpu) -> tuple[Tile, ...]:
    """The tiles for operands of 16 bits read by the tensor memory accelerator, with as many stages as memory holds.

    Args:
        out_bytes: bytes of an element of the result, a tile of which waits in shared memory, too.
        device: the GPU.
    """
    found = []
    for block_m, block_n, block_k, num_warps in _TMA_SHAPES:
        step = 2 * (block_m + block_n) * block_k
        num_stages = (device.shared_memory - _RESERVED - block_m * block_n * out_bytes) // step
        if num_stages >= 2:
            found.append(Tile(block_m, block_n, block_k, num_warps, num_stages))
    return tuple(found)


@cache
def tma_tile(m: int, n: int, k: int, out_bytes: int, device: Gpu) -> Tile:
    """The tile with the shortest estimated time for [M, K] @ [K, N].

    The estimate: rounds of one tile a multiprocessor, each as long as its FMAs or its bytes take, and an epilogue.
    """

    def cycles(tile: Tile) -> float:
        rounds = -(-(-(-m // tile.block_m) * -(-n // tile.block_n)) // device.num_sms)
        arithmetic = tile.block_m * tile.block_n / (_FMAS_A_CYCLE * _REACHED)
        transfers = 2 * (tile.block_m + tile.block_n) / _BYTES_A_CYCLE
        return rounds * (k * max(arithmetic, transfers) + _EPILOGUE_CYCLES)

    return min(tma_tiles(out_bytes, device), key=cycles)


@dataclass(frozen=True)
class NarrowTile:
    """A tile of the result and how a program of Hopper's narrow kernel works on it."""

    block_m: int
    block_n: int
    block_k: int
    """Elements of K in one step of the loop: a multiple of 64."""
    num_stages: int
    ctas_per_sm: int = 1
    """Programs of a multiprocessor; each has as many tiles as it takes."""
    warpgroups: int = 1
    """That multiply, each for 64 of ``block_n`` columns, where there are several."""

    @property
    def writes_blocks(self) -> bool:
        """Whether a packed tile is so large that it is written through shared memory."""
        return self.block_m >= 128 and self.ctas_per_sm == 1

    @property
    def about(self) -> str:
        shared = f", {self.ctas_per_sm} a multiprocessor" if self.ctas_per_sm > 1 else ""
        return f"narrow tile {self.block_m}x{self.block_n}{shared}"


NARROW_TILES = (
    NarrowTile(16, 16, 256, 5),
    NarrowTile(16, 32, 128, 11),
    NarrowTile(16, 64, 128, 11),
    NarrowTile(16, 64, 128, 5, 2),
    NarrowTile(32, 64, 128, 9),
    NarrowTile(32, 64, 128, 4, 2),
    NarrowTile(64, 64, 128, 7),
    NarrowTile(64, 64, 128, 3, 2),
    NarrowTile(128, 64, 128, 4),
)
"""Those that won somewhere, with as many stages as shared memory holds. Behind a norm, on an H100, with launches that
overlap, the fastest took of cuBLAS's time 0.90 to 0.94 at 8 and 32 rows of Qwen3-8B's four matmuls, 0.92 to 0.99 at 64,
0.96 to 1.04 at 128, where the norm is counted in both; without, 0.95 to 1.02 at 8. Tiles of few columns are for
narrow weights: 0.88 of :func:`tma_tile`'s time at M=1 N=896 K=4864 on an H200.
"""
GATED_TILES = (
    NarrowTile(16, 64, 128, 11),
    NarrowTile(16, 64, 128, 5, 2),
    NarrowTile(16, 192, 128, 4, warpgroups=3),
    NarrowTile(32, 64, 128, 9),
    NarrowTile(32, 64, 128, 4, 2),
    NarrowTile(32, 192, 128, 3, warpgroups=3),
    NarrowTile(64, 64, 128, 7),
    NarrowTile(64, 64, 128, 3, 2),
    NarrowTile(64, 192, 64, 7, warpgroups=3),
    NarrowTile(128, 128, 64, 7, warpgroups=2),
    NarrowTile(128, 192, 64, 5, warpgroups=3),
)
"""The same of gated layers, half of whose columns are gate's and half up's."""
PACKED_TILES = (
    NarrowTile(16, 32, 256, 9, 2),
    NarrowTile(16, 32, 256, 15),
    NarrowTile(16, 64, 256, 6, 2),
    NarrowTile(16, 64, 256, 12),
    NarrowTile(16, 128, 256, 9),
    NarrowTile(32, 32, 256, 5, 2),
    NarrowTile(32, 64, 256, 4, 2),
    NarrowTile(32, 64, 256, 9),
    NarrowTile(32, 128, 256, 6),
    NarrowTile(64, 64, 128, 5, 2),
    NarrowTile(64, 64, 256, 5),
    NarrowTile(64, 128, 128, 9),
    NarrowTile(128, 64, 64, 6, 2),
    NarrowTile(128, 64, 64, 11),
    NarrowTile(128, 128, 64, 9),
    NarrowTile(256, 64, 64, 6),
    NarrowTile(256, 128, 64, 5),
)
"""Of weights of four bits, which are decoded on their way: for few rows a multiprocessor's instructions limit it, not
its memory, so that it wants warps, 4 for 32 or 64 columns and more for more. A tile of 32 columns leaves half of
wgmma's long side zero. What is decoded is multiplied with every row of a tile: with 128 or more of them wgmma is the
limit.
"""
_PACKED_REACHED = {64: 0.42, 128: 0.58, 256: 0.75}
"""Share of the tensor cores' rate, by rows of a packed tile: on an H100, where chunks were decoded as a whole."""
_PACKED_WORTH_IT = 1.3
"""Tiles are timed whose time is estimated at so many times the shortest."""
_SHORT_SIDES = (16, 32, 64, 128)
"""Rows of a tile."""
_WIDE = 64
"""Columns of a tile that a multiprocessor may have several of, one after the other."""
_ROUNDS_OF_SLICES = 3
_SHORTEST_TURN = 128
"""Elements of K between two turns of the loop of a packed tile."""
_MOST_OF_A_TREE = 64 * 128
"""Elements of a packed tile of several slices."""
_WHOLE_K = 32
"""Codes of four bits in 16 bytes, of which rows of a weight are a multiple for TMA."""


def gated_tiles(m: int, device: Gpu) -> tuple[NarrowTile, ...]:
    """The tiles worth timing for a gated layer: of as many rows as M, or half as many.

    For more rows cuBLASLt's tiles, of which several share what they read, are faster with an activation behind them. In
    an engine of 8 B weights on an H100, at its limit of power, 256 rows took them 90.5 us, and the fastest tile here
    95.3, though it took 3% less alone.
    """
    if not device.has_wgmma or m > max(_SHORT_SIDES):
        return ()
    rows = min(side for side in _SHORT_SIDES if side >= m)
    return tuple(tile for tile in GATED_TILES if tile.block_m in (rows, rows // 2))


def narrow_tiles(m: int, n: int, device: Gpu, slice_k: int | None = None) -> tuple[NarrowTile, ...]:
    """The narrow tiles worth timing for 16-bit operands with K as the contiguous side: of as many rows as M, or half as
    many; those of few columns where each has a multiprocessor of its own. A step ends where a slice of ``slice_k``
    elements of K does, if there are several; then more tiles are worth it, because any other schedule is a kernel for
    each slice and one that adds them.
    """
    if not device.has_wgmma or m > max(_SHORT_SIDES):
        return ()
    rows = min(side for side in _SHORT_SIDES if side >= m)
    most = device.num_sms * (_ROUNDS_OF_SLICES if slice_k else 1)

    def is_worth_it(tile: NarrowTile) -> bool:
        fits = tile.block_m in (rows, rows // 2) and tile.block_n == _WIDE
        return fits or -(-m // tile.block_m) * -(-n // tile.block_n) <= most

    return tuple(tile for tile in NARROW_TILES if is_worth_it(tile) and (slice_k or 0) % tile.block_k == 0)


def _narrow(problem: GemmProblem, m: int, device: Gpu) -> tuple[NarrowTile, ...]:
    return narrow_tiles(m, problem.n, device, problem.k_slice.k if problem.spec.k_slices > 1 else None)


def _gated(_: GemmProblem, m: int, device: Gpu) -> tuple[NarrowTile, ...]:
    return gated_tiles(m, device)


def _packed(problem: GemmProblem, m: int, device: Gpu) -> tuple[NarrowTile, ...]:
    """Of as many rows as M, or half as many; a step ends where a slice does. Of more rows than a tile has, those with
    the shortest estimated time; sums of slices are left to others then.
    """
    if not device.has_wgmma or problem.k % _WHOLE_K:
        return ()
    if m <= max(_SHORT_SIDES):
        rows = min(side for side in _SHORT_SIDES if side >= m)
        tiles = (tile for tile in PACKED_TILES if tile.block_m in (rows, rows // 2))
        return tuple(tile for tile in tiles if serves_packed(tile, problem))
    if problem.spec.k_slices > 1:
        return ()
    shortest = 64 if m < 1024 else 128
    cycles = {
        tile: _packed_cycles(tile, m, problem, device)
        for tile in PACKED_TILES
        if tile.block_m >= shortest and tile.block_n >= _WIDE and serves_packed(tile, problem)
    }
    return tuple(tile for tile, count in cycles.items() if count <= _PACKED_WORTH_IT * min(cycles.values()))


def _packed_cycles(tile: NarrowTile, m: int, problem: GemmProblem, device: Gpu) -> float:
    """Estimated for M rows: rounds of tiles, each as long as its multiplications or its bytes take, and an epilogue."""
    tiles = -(-m // tile.block_m) * -(-problem.n // tile.block_n)
    rounds = -(-tiles // (device.num_sms * tile.ctas_per_sm)) * tile.ctas_per_sm
    arithmetic = tile.block_m * tile.block_n / (_FMAS_A_CYCLE * _PACKED_REACHED[tile.block_m])
    transfers = (2 * tile.block_m + tile.block_n / 2) / _BYTES_A_CYCLE
    return rounds * (problem.k * max(arithmetic, transfers) + _EPILOGUE_CYCLES)


def serves_packed(tile: NarrowTile, problem: GemmProblem) -> bool:
    """Whether one of :data:`PACKED_TILES` computes a problem. A thread has a row of gate and one of up, so none of
    wgmma's may be left out; sums of slices find registers in small tiles alone.
    """
    if problem.spec.k_slices > 1:
        small = tile.block_m * tile.block_n <= _MOST_OF_A_TREE
        return small and problem.k_slice.k % max(tile.block_k, _SHORTEST_TURN) == 0
    return not problem.spec.epilogue.gated or tile.block_n >= _WIDE


_FOUR_BITS = tuple(integers(4, group, zeros, False) for group in (32, 64, 128, None) for zeros in (False, True))
TILES = {(PLAIN, NONE): _narrow, (PLAIN, BIAS): _narrow, (PLAIN, SWIGLU): _gated} | {
    (b_format, epilogue): _packed for b_format in _FOUR_BITS for epilogue in EPILOGUES
}
"""By what the narrow kernel reads, and what it makes of a product."""


def reads(b_format: Format, k: int, device: Gpu) -> bool:
    """Whether the narrow kernel reads weights with rows of K elements as a format stores them."""
    return b_format in _FOUR_BITS and device.has_wgmma and k % _WHOLE_K == 0


def sm90_tiles(problem: GemmProblem, m: int, device: Gpu) -> tuple[NarrowTile, ...]:
    """The narrow tiles worth timing for M rows of a problem; none where the kernel does not compute it."""
    of_kind = TILES.get((problem.spec.b_format, problem.spec.epilogue))
    return of_kind(problem, m, device) if of_kind and problem.a_k_major and problem.b_k_major else ()


def redundancy(tiles: int, device: Gpu) -> int:
    """How many times over to compute the ``tiles`` of a GEMM that leaves most multiprocessors idle: 1 or 2.

    A multiprocessor has a limit on what it can request from memory at once. Another one that reads the same columns
    finds half of them in the L2 cache already requested, and the other way round: M=1 N=1280 K=8192 went from 13.8 to
    11.9 us with the columns read twice, and with 120 programs back to 15.1, when the L2 cache had no more to give. The
    copies compute rows beyond the last, which are not written.
    """
    return 2 if 5 * 2 * tiles <= 3 * device.num_sms else 1
