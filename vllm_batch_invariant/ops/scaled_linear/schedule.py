"""How a product of codes is cut into tiles on a GPU: speed only, since its sums are exact."""

from dataclasses import dataclass

from ..common.gpu import Gpu


@dataclass(frozen=True)
class ScaledLinearSchedule:
    """A tile of the result.

    Attributes:
        block_m: rows of x.
        block_n: rows of the weight.
        block_k: elements of K in one step, a power of two.
        num_warps: of a program.
        num_stages: of the loop over K.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


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
