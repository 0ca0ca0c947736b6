"""What decides the bits of the gradients of RMSNorm on a GPU."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from ..common.row_reduction import REDUCTIONS_KEPT, gpu_block, gpu_warps

LARGEST_BLOCK = 16_384
"""Elements of a row that a program holds: a row is loaded once."""
_TILE = 4096
"""Elements of all rows that a program holds at a time, where rows are short."""
_FEWEST_WARPS, _MOST_WARPS = 4, 16


@dataclass(frozen=True)
class NormBackwardReduction:
    """Squares of a row, and products of its gradient with what it is normalised to, are added as
    :func:`..common.triton_rows.row_sums` says. The weight's gradient is added over the tiles of a program one after the
    other, then over all that are left by :func:`..reduce.sum`.
    """

    length: int
    block: int
    num_warps: int
    rows_per_program: int
    """Rows of a tile."""
    tiles_per_program: int = 8

    @classmethod
    @lru_cache(REDUCTIONS_KEPT)
    def of_length(cls, length: int) -> Self:
        """That of rows of so many elements, up to :data:`LARGEST_BLOCK`."""
        block = gpu_block(length, LARGEST_BLOCK)
        return cls(length, block, gpu_warps(max(block, _TILE), _FEWEST_WARPS, _MOST_WARPS), max(_TILE // block, 1))
