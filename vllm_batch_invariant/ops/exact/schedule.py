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
        in_registers: unfinished sums of segments wait there, and else in memory.
        partitions: 2 if two warpgroups wait for copies alone, not for each other, so that one multiplies while the
            other rounds. Its tiles were compared for one segment only, and are not timed: none of them serves.
    """

    block_m: int
    block_n: int
    num_stages: int
    ctas_per_sm: int = 1
    in_registers: bool = False
    partitions: int = 1

    @property
    def long_side(self) -> int:
        """Rows of wgmma's first operand, 64 for each warpgroup."""
        return 64 if self.block_n <= 64 else 128

    @property
    def num_warps(self) -> int:
        """Of a partition that multiplies."""
        return self.long_side // 16 // self.partitions

    @property
    def registers(self) -> int:
        """Of a thread, on average over the warpgroups that multiply and that of the warp that copies."""
        return 128 if self.long_side == 64 else 168

    @property
    def shared_memory(self) -> int:
        """Bytes of the ring."""
        return self.num_stages * 2 * 128 * (self.block_m + self.long_side)


_EIGHT, _SIXTEEN = HopperSchedule(8, 64, 6, 2, True), HopperSchedule(16, 32, 5, 2, True)
_SOME = HopperSchedule(32, 64, 9, 1, True)
_SMALL, _IN_SEGMENTS, _LARGE = HopperSchedule(64, 64, 6), HopperSchedule(64, 128, 4), HopperSchedule(128, 128, 3)
HOPPER_SCHEDULES = (_EIGHT, _SIXTEEN, _SOME, _SMALL, _IN_SEGMENTS, _LARGE)
"""Those that serve, of ascending size."""


def hopper_schedule(m: int, n: int, parts: int, num_sms: int) -> HopperSchedule:
    """The tile for so many rows of x and of a weight in so many segments, as `benchmarks.exact_tiles` found them on an
    H100, for so many multiprocessors. Segments leave a large tile no registers for sums that wait.
    """
    for tile in (_EIGHT, _SIXTEEN, _SOME, _SMALL):
        if m <= tile.block_m:
            return tile
    if parts > 1:
        return _IN_SEGMENTS
    fills_the_gpu = m * n >= num_sms * _LARGE.block_m * _LARGE.block_n
    return _LARGE if fills_the_gpu else _SMALL
