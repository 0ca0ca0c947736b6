"""How a product of codes of FP8 is cut into tiles on a Hopper: speed only, since every tile has the same bits."""

from dataclasses import dataclass
from functools import cache

import torch

from ..common.gpu import Gpu
from ..linear.problem import ALIGNMENT, LARGEST_SIDE, leading_dim

STEP_K = 128
"""Elements of K in a step: those of which the tensor cores' sum is promoted."""
LONG_SIDE = 64
"""Rows of wgmma's first operand, of each warpgroup."""
_RESERVED = 1024
"""Bytes of shared memory for barriers."""


@dataclass(frozen=True)
class Sm90Schedule:
    """A tile of the result."""

    block_m: int
    """Rows of x."""
    block_n: int
    """Rows of the weight, all in one block of 128 that has a scale."""
    num_stages: int
    swapped: bool = True
    """Whether wgmma's long side takes rows of the weight; else it takes those of x."""
    warpgroups: int = 1
    """That multiply, each for 64 of the long side."""
    accumulators: int = 2
    """Of a warpgroup: with two, one is promoted while the other is added to."""
    ctas_per_sm: int = 1

    @property
    def short(self) -> int:
        """Rows of wgmma's short side."""
        return self.block_m if self.swapped else self.block_n

    @property
    def long(self) -> int:
        """Rows of its long side that are loaded."""
        return self.block_n if self.swapped else self.block_m

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a program takes, about."""
        long = max(self.long, LONG_SIDE)
        return self.num_stages * ((self.short + long) * STEP_K + 4 * (self.block_m + 4)) + _RESERVED

    @property
    def about(self) -> str:
        side = "weight first" if self.swapped else "x first"
        shared = f", {self.ctas_per_sm} a multiprocessor" if self.ctas_per_sm > 1 else ""
        one = ", one accumulator" if self.accumulators == 1 else ""
        return f"{self.block_m}x{self.block_n}, {side}{shared}{one}"


SM90_SCHEDULES = (
    Sm90Schedule(8, 32, 24),
    Sm90Schedule(8, 64, 24),
    Sm90Schedule(8, 64, 11, ctas_per_sm=2),
    Sm90Schedule(16, 32, 22),
    Sm90Schedule(16, 64, 22),
    Sm90Schedule(16, 64, 10, ctas_per_sm=2),
    Sm90Schedule(16, 128, 12, warpgroups=2),
    Sm90Schedule(32, 32, 18),
    Sm90Schedule(32, 64, 18),
    Sm90Schedule(32, 64, 8, ctas_per_sm=2),
    Sm90Schedule(32, 128, 10, warpgroups=2),
    Sm90Schedule(64, 32, 13),
    Sm90Schedule(64, 64, 13),
    Sm90Schedule(64, 64, 6, ctas_per_sm=2),
    Sm90Schedule(64, 128, 9, warpgroups=2),
    Sm90Schedule(128, 32, 10, swapped=False, warpgroups=2),
    Sm90Schedule(128, 64, 8, swapped=False, warpgroups=2),
    Sm90Schedule(128, 128, 6, swapped=False, warpgroups=2, accumulators=1),
    Sm90Schedule(128, 128, 6, swapped=False, warpgroups=2),
)
"""Not timed yet."""
_FMAS_A_CYCLE = 4096
"""Multiplications of codes that the tensor cores of a multiprocessor do in a cycle."""
_REACHED = 0.76
"""Of these, this and what follows fitted to the times in benchmarks/data/fp8_tiles.csv, of an H100."""
_BYTES_A_CYCLE = 59
"""Into one multiprocessor."""
_STEP_CYCLES = 250
"""That a step takes at least, divided by the programs of a multiprocessor: to start sums, to wait and to promote."""
_PROMOTION_CYCLES = 1.5
"""Of a step for each row of the short side, where each has a scale of its own."""
_ONE_ACCUMULATOR = 1.3
"""Longer sums take where they wait for their promotion."""
_EPILOGUE_CYCLES = 600


def serves(codes: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, device: Gpu) -> bool:
    """Whether the tiles are for codes [M, K] and a weight [N, K] of e4m3, and weight_scale [blocks, groups] or [N]."""
    if not device.has_wgmma or weight_scale.stride(-1) != 1:
        return False
    for operand in (codes, weight):
        found = leading_dim(operand)
        if min(operand.shape) == 0 or max(operand.shape) > LARGEST_SIDE or found is None or not found[1]:
            return False
        if found[0] < operand.shape[1] or found[0] % ALIGNMENT or operand.data_ptr() % ALIGNMENT:
            return False
    return True


@cache
def sm90_schedule(m: int, n: int, k: int, device: Gpu) -> Sm90Schedule:
    """The tile with the shortest estimated time for codes [M, K] and [N, K]: rounds of the tiles that a multiprocessor
    has at once, each as long as its sums or its bytes take, and an epilogue.
    """

    def cycles(tile: Sm90Schedule) -> tuple[float, int]:
        tiles = -(-m // tile.block_m) * -(-n // tile.block_n)
        here = -(-tiles // device.num_sms)  # tiles of the multiprocessor with the most
        at_once = min(tile.ctas_per_sm, here)
        arithmetic = tile.short * max(tile.long, LONG_SIDE) * STEP_K / (_FMAS_A_CYCLE * _REACHED)
        arithmetic += _PROMOTION_CYCLES * tile.short * tile.swapped
        arithmetic *= _ONE_ACCUMULATOR if tile.accumulators == 1 else 1.0
        transfers = (tile.short + tile.long) * STEP_K / _BYTES_A_CYCLE
        step = max(arithmetic, transfers, _STEP_CYCLES / at_once)
        return here * (-(-k // STEP_K) * step + _EPILOGUE_CYCLES / at_once), tile.block_m * tile.block_n

    return min(SM90_SCHEDULES, key=cycles)
