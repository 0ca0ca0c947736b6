"""How a matrix product is cut into tiles on a GPU: speed only, since every tile gives an element the same chain."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """A tile of the product and how a program works on it."""

    rows: int
    columns: int
    depth: int
    """Elements of K in one step of the chain."""
    warps: int
    stages: int


_FEW_ROWS_NARROW = Tile(16, 32, 128, warps=4, stages=5)
_FEW_ROWS = Tile(16, 64, 128, warps=4, stages=5)
_SOME_ROWS = Tile(64, 64, 128, warps=4, stages=3)
_MANY_ROWS = Tile(128, 128, 64, warps=8, stages=3)
_FP32_FEW_ROWS = Tile(16, 64, 32, warps=4, stages=3)
_FP32 = Tile(64, 64, 32, warps=8, stages=2)
_FP64 = Tile(32, 32, 16, warps=4, stages=2)
PROCESSORS = 132
"""Multiprocessors of an H100 or H200, where the choice was measured."""


def tiles(dtype: torch.dtype) -> tuple[Tile, ...]:
    """Every tile that :func:`tile_for` may choose for operands of ``dtype``."""
    if dtype == torch.float64:
        return (_FP64,)
    if dtype == torch.float32:
        return _FP32_FEW_ROWS, _FP32
    return _FEW_ROWS_NARROW, _FEW_ROWS, _SOME_ROWS, _MANY_ROWS


def tile_for(rows: int, columns: int, dtype: torch.dtype) -> Tile:
    """The tile for a product of ``rows`` by ``columns`` elements whose operands have ``dtype``."""

    def programs(tile: Tile) -> int:
        return -(-rows // tile.rows) * -(-columns // tile.columns)

    if dtype == torch.float64:
        return _FP64
    if dtype == torch.float32:
        return _FP32_FEW_ROWS if rows <= 16 else _FP32
    if rows > 64 and 3 * programs(_MANY_ROWS) >= 2 * PROCESSORS:
        return _MANY_ROWS
    if rows > 16 and 2 * programs(_SOME_ROWS) >= PROCESSORS:
        return _SOME_ROWS
    return _FEW_ROWS if programs(_FEW_ROWS) >= PROCESSORS else _FEW_ROWS_NARROW
