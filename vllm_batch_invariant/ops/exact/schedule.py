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
    """

    block_m: int
    block_n: int
    num_stages: int
    ctas_per_sm: int = 1
    in_registers: bool = False

    @property
    def long_side(self) -> int:
        """Rows of wgmma's first operand, 64 for each warpgroup."""
        return 64 if self.block_n <= 64 else 128

    @property
    def num_warps(self) -> int:
        """Those that multiply."""
        return self.long_side // 16

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
    H100, for so many multiprocessors. Segments leave a large tile no registers for sums that wait, and are rounded so
    often that small tiles are faster while all of them run at once.
    """
    for tile in (_EIGHT, _SIXTEEN, _SOME):
        if m <= tile.block_m:
            return tile
    if parts > 1:
        at_once = _tiles(_SOME, m, n) <= num_sms
        return _SOME if at_once else _SMALL if m <= _SMALL.block_m else _IN_SEGMENTS
    return _LARGE if m > _SMALL.block_m and _tiles(_LARGE, m, n) >= num_sms else _SMALL


def _tiles(tile: HopperSchedule, m: int, n: int) -> int:
    return -(-m // tile.block_m) * -(-n // tile.block_n)
