"""Lines over two axes, in numbers that a template draws: what runs over time, and distributions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter

Point = tuple[float, float]
SIDE = 1000
"""Units of a drawing's width and of its height; the page stretches both."""


@dataclass(frozen=True)
class Line:
    """A line from point to point, with its name in the key."""

    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Chart:
    """Lines over axes that begin at 0.

    Attributes:
        description: what the lines show, for screen readers.
        x_label: what the x axis counts.
        y_label: what the y axis counts.
        lines: at least one point in all.
    """

    description: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]

    @property
    def width(self) -> float:
        """Where the x axis ends."""
        return max(x for line in self.lines for x, _ in line.points) or 1.0

    @property
    def height(self) -> float:
        """Where the y axis ends."""
        return max(y for line in self.lines for _, y in line.points) or 1.0

    @property
    def x_ticks(self) -> tuple[tuple[float, str], ...]:
        """(share of the width, number) of each tick."""
        return _ticks(self.width)

    @property
    def y_ticks(self) -> tuple[tuple[float, str], ...]:
        """(share of the height, number) of each tick."""
        return _ticks(self.height)

    def polyline(self, line: Line) -> str:
        """The points of a line for SVG, from the upper left corner of ``SIDE`` times ``SIDE`` units."""
        width, height = self.width, self.height
        scaled = [(round(SIDE * x / width), round(SIDE * (1 - y / height))) for x, y in line.points]
        return " ".join(f"{x},{y}" for x, y in _thinned(scaled))


def steps(values: Sequence[Point]) -> tuple[Point, ...]:
    """The points of a line that holds each value until the next one."""
    found = [point for before, after in pairwise(values) for point in (before, (after[0], before[1]))]
    return (*found, *values[-1:])


def distribution(values: Sequence[float]) -> tuple[Point, ...]:
    """The points (value, share of the values that are not above it), beginning at (0, 0)."""
    return steps(((0.0, 0.0), *((value, (place + 1) / len(values)) for place, value in enumerate(sorted(values)))))


def _thinned(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Where several points have one x, only the first, the lowest, the highest and the last: nothing else is seen."""
    found = []
    for x, column in groupby(points, key=itemgetter(0)):
        heights = [y for _, y in column]
        kept = [heights[0], min(heights), max(heights), heights[-1]] if len(heights) > 2 else heights
        found += [(x, y) for y, _ in groupby(kept)]
    return found


def _ticks(end: float, most: int = 5) -> tuple[tuple[float, str], ...]:
    """Round numbers from 0 to ``end``, with 1, 2 or 5 times a power of ten between them."""
    power = 10.0 ** math.floor(math.log10(end / most))
    step = next(factor * power for factor in (1, 2, 5, 10) if end / (factor * power) <= most)
    return tuple((place * step / end, f"{place * step:.6g}") for place in range(math.floor(end / step + 1e-9) + 1))
