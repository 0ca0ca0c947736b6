"""How a product of codes is cut into tiles on a GPU: speed only, since sums of int8 are exact, and those of e4m3 are of
the same 128 elements, by one kind of instruction, in every tile.
"""

from dataclasses import dataclass

from ..common.gpu import Gpu
from .reduction import GROUP


@dataclass(frozen=True)
class ScaledLinearSchedule:
    """A tile of the result.

    Attributes:
        block_m: rows of x.
        block_n: rows of the weight.
        block_k: elements of K in one step, a power of two.
        num_warps: of a program.
        num_stages: of the loop over K.
        swap_ab: whether rows of the weight are the first operand of the tensor core, the one with the longer side.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap_ab: bool = False


_FEW_ROWS_NARROW = ScaledLinearSchedule(16, 32, 256, 4, 5)
_FEW_ROWS = ScaledLinearSchedule(16, 64, 256, 4, 4)
_SOME_ROWS = ScaledLinearSchedule(64, 64, 128, 4, 4)
_MANY_ROWS = ScaledLinearSchedule(128, 128, 128, 8, 3)
SCHEDULES = (_FEW_ROWS_NARROW, _FEW_ROWS, _SOME_ROWS, _MANY_ROWS)
"""Each fits the 99 KiB of shared memory that the smallest GPU here has for a program."""


def scaled_linear_schedule(m: int, n: int, gpu: Gpu) -> ScaledLinearSchedule:
    """The tile for M rows of x and a weight of N rows, chosen as tiles of matmuls of 16 bits are; not measured yet."""

    def programs(tile: ScaledLinearSchedule) -> int:
        return -(-m // tile.block_m) * -(-n // tile.block_n)

    if m > 64 and 3 * programs(_MANY_ROWS) >= 2 * gpu.num_sms:
        return _MANY_ROWS
    if m > 16 and 2 * programs(_SOME_ROWS) >= gpu.num_sms:
        return _SOME_ROWS
    return _FEW_ROWS if programs(_FEW_ROWS) >= gpu.num_sms else _FEW_ROWS_NARROW


_E4M3_FEW_ROWS = ScaledLinearSchedule(16, 64, GROUP, 4, 5, swap_ab=True)
_E4M3_FEW_ROWS_WIDE = ScaledLinearSchedule(16, 128, GROUP, 4, 4, swap_ab=True)
_E4M3_SOME_ROWS_SWAPPED = ScaledLinearSchedule(32, 128, GROUP, 4, 4, swap_ab=True)
_E4M3_SOME_ROWS = ScaledLinearSchedule(64, 64, GROUP, 4, 4)
_E4M3_MANY_ROWS = ScaledLinearSchedule(128, 128, GROUP, 8, 3)
E4M3_SCHEDULES = (
    _E4M3_FEW_ROWS,
    _E4M3_FEW_ROWS_WIDE,
    _E4M3_SOME_ROWS_SWAPPED,
    _E4M3_SOME_ROWS,
    _E4M3_MANY_ROWS,
)
"""Of codes of e4m3: a step is one sum of the tensor core, and rows of the weight have one scale, so that its side is a
divisor of 128. The first operand has 64 rows or more: with fewer Triton takes neither Hopper's wgmma nor
Blackwell's tcgen05.mma, but mma.sync, which adds otherwise. Each fits 99 KiB of shared memory.
"""


def e4m3_schedule(m: int, n: int, gpu: Gpu) -> ScaledLinearSchedule:
    """The tile for M rows of e4m3 and a weight of N rows; not measured yet."""

    def programs(tile: ScaledLinearSchedule) -> int:
        return -(-m // tile.block_m) * -(-n // tile.block_n)

    if m > 64 and 3 * programs(_E4M3_MANY_ROWS) >= 2 * gpu.num_sms:
        return _E4M3_MANY_ROWS
    if m > 32 and 2 * programs(_E4M3_SOME_ROWS) >= gpu.num_sms:
        return _E4M3_SOME_ROWS
    for tile in (_E4M3_SOME_ROWS_SWAPPED,) * (m > 16) + (_E4M3_FEW_ROWS_WIDE,):
        if programs(tile) >= gpu.num_sms:
            return tile
    return _E4M3_FEW_ROWS
