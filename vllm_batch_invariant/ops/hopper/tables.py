"""The special functions of a Hopper as tables, recorded on a GPU: by how many units each result is off what is computed
here in IEEE arithmetic alone, so that every machine finds the same.

``exp2[i]`` is 2**(i / 2**23) by ``ex2.approx.ftz`` times 2**23, for i from 0 to 2**23 - 1; ``rcp[i]`` is 1 / (1 + i /
2**23) by ``rcp.approx.ftz`` times 2**24. The file has the differences, of -2 to 1 units, two bits each.
"""

import hashlib
import lzma
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ENTRIES = 1 << 23
RECORDED = Path(__file__).with_name("tables.xz")
"""Of an H200, if somebody has recorded one."""
_LEAST = -2
_LN_2 = float.fromhex("0x1.62e42fefa39efp-1")
_SQRT_2 = float.fromhex("0x1.6a09e667f3bcdp+0")
_TERMS = 16


@dataclass(frozen=True)
class Tables:
    """int32 of :data:`ENTRIES` each."""

    exp2: NDArray[np.int32]
    rcp: NDArray[np.int32]

    @property
    def digest(self) -> str:
        """Which tables they are, in 12 hexadecimal digits."""
        return hashlib.sha256(self.exp2.tobytes() + self.rcp.tobytes()).hexdigest()[:12]


def nearest_exp2() -> NDArray[np.int32]:
    """2**(i / 2**23) * 2**23, rounded: by a series of 2**(f - 1/2) in fp64, whose additions and products are IEEE's."""
    x = (np.arange(ENTRIES) / ENTRIES - 0.5) * _LN_2
    value = np.ones_like(x)
    for term in range(_TERMS, 0, -1):
        value = value * x / term + 1.0
    return np.rint(value * _SQRT_2 * 2.0**23).astype(np.int32)


def nearest_rcp() -> NDArray[np.int32]:
    """2**24 / (1 + i / 2**23), rounded."""
    return np.rint(2.0**24 / (1.0 + np.arange(ENTRIES) / ENTRIES)).astype(np.int32)


def packed(tables: Tables) -> bytes:
    """The content of a file.

    Raises:
        ValueError: an entry is farther off than two bits can say.
    """
    parts = []
    for found, nearest in ((tables.exp2, nearest_exp2()), (tables.rcp, nearest_rcp())):
        off = found - nearest - _LEAST
        if off.min() < 0 or off.max() > 3:
            raise ValueError(f"an entry is {off.min() + _LEAST} to {off.max() + _LEAST} units off")
        four = off.astype(np.uint8).reshape(-1, 4)
        parts.append((four << np.array([0, 2, 4, 6], np.uint8)).sum(1, dtype=np.uint8).tobytes())
    return lzma.compress(b"".join(parts), preset=9 | lzma.PRESET_EXTREME)


def unpacked(content: bytes) -> Tables:
    """The tables of a file's content."""
    four = np.frombuffer(lzma.decompress(content), np.uint8).reshape(2, -1, 1)
    off = (four >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(2, -1).astype(np.int32) + _LEAST
    return Tables(nearest_exp2() + off[0], nearest_rcp() + off[1])


@cache
def recorded(path: Path = RECORDED) -> Tables:
    """Those of a file.

    Raises:
        FileNotFoundError: there is none.
    """
    return unpacked(path.read_bytes())


def ideal() -> Tables:
    """Correctly rounded ones, of no GPU: for tests of what does not follow the tables."""
    return Tables(nearest_exp2(), nearest_rcp())
