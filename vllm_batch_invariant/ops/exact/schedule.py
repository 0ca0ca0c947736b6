"""Tiles of exact products: none of them moves a bit."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HopperSchedule:
    """A tile of :mod:`.sm90_linear`.

    Attributes:
        block_m: rows of x, a power of two from 8 to 128.
        block_n: rows of the weight, a power of two from 16 to 128.
        num_stages: steps of K in shared memory.
        ctas_per_sm: programs of a multiprocessor.
    """

    block_m: int
    block_n: int
    num_stages: int
    ctas_per_sm: int = 1

    @property
    def long_side(self) -> int:
        """Rows of wgmma's first operand."""
        return 64 if self.block_n <= 64 else 128

    @property
    def num_warps(self) -> int:
        """Of those that multiply: a warpgroup has four."""
        return self.long_side // 16

    @property
    def registers(self) -> int:
        """Of a thread, on average over warps that multiply and the warpgroup of the one that copies."""
        return 128 if self.long_side == 64 else 168

    @property
    def shared_memory(self) -> int:
        """Bytes of the ring."""
        return self.num_stages * 2 * 128 * (self.block_m + self.long_side)


HOPPER_SCHEDULES = (
    HopperSchedule(8, 32, 6, 2),
    HopperSchedule(16, 32, 5, 2),
    HopperSchedule(32, 64, 4, 2),
    HopperSchedule(64, 64, 3, 2),
    HopperSchedule(64, 128, 4),
    HopperSchedule(128, 128, 3),
)
"""Those that serve, of ascending size."""


def hopper_schedule(m: int, n: int, parts: int) -> HopperSchedule:  # noqa: ARG001 - what a tile may be chosen by
    """The tile for so many rows of x and of a weight."""
    for tile in HOPPER_SCHEDULES[:4]:
        if m <= tile.block_m:
            return tile
    return HOPPER_SCHEDULES[4] if m <= 128 else HOPPER_SCHEDULES[5]
