"""What decides the bits of attention."""

from dataclasses import dataclass
from functools import cached_property

SMALLEST_SPLIT = 16
_SMALLEST_TILE = 32
"""Half of it, in fp32, is the K of a dot: at least 16."""
_LARGE_HEAD = 256
"""Of larger heads a tile has half as many keys: every GPU's shared memory has room for one."""


@dataclass(frozen=True)
class AttentionReduction:
    """Softmax(query @ keys) @ values over splits of the keys at fixed positions of the request: the first keys in
    splits of the ``early`` sizes, the others in splits of ``split_size``.

    Within a split, everything in fp32: ``score = scale * dot(query, key)`` with an order of the dot that the head size
    alone decides, ``weight = exp(score - max)``, the weights and the weighted values are summed by ascending position
    in an order that the split size alone decides. Splits are merged in ascending order, a split without a visible key
    has no part in it, a sink is added once after the last, and the result is rounded once to the query's dtype. On a
    GPU the weights are rounded to the values' dtype before they weigh them, and the maximum and the sums go on from
    tile to tile of the keys.

    Attributes:
        split_size: keys in a split, a power of two; pages of any size fit it, because a split is a range of positions.
        early: pairs of a split size and the position up to which splits have it, ascending. A request that is alone and
            short has only its splits to spread over a GPU, and one that is long has more of them than that takes.
        key_tile: keys in a step of the online softmax over 16-bit keys, a power of two; half of it in fp32, half for
            heads of more than 256 elements, and never more than the smallest splits have. On a CPU a split is one step.
        block_m: query rows of a block over 16-bit keys, a quarter of it in fp32. Only FlexAttention on a GPU gives a
            row other bits in a block of other rows; None elsewhere.
        num_warps: of such a block, twice as many in fp32.

    Raises:
        ValueError: a split size that is no power of two or is below 16, a tile that is none or is below 32, or
            positions that do not ascend or at which a split of the size before them and one of the size after them do
            not both begin.
    """

    split_size: int = 256
    early: tuple[tuple[int, int], ...] = ()
    key_tile: int = 64
    block_m: int | None = None
    num_warps: int | None = None

    def __post_init__(self) -> None:
        sizes = [*(size for size, _ in self.early), self.split_size]
        for size in sizes:
            if size < SMALLEST_SPLIT or size & (size - 1):
                raise ValueError(f"split_size must be a power of two of at least {SMALLEST_SPLIT}, got {size}")
        if self.key_tile < _SMALLEST_TILE or self.key_tile & (self.key_tile - 1):
            raise ValueError(f"key_tile must be a power of two of at least {_SMALLEST_TILE}, got {self.key_tile}")
        before = 0
        for (size, end), next_size in zip(self.early, sizes[1:], strict=True):
            if end <= before or end % size or end % next_size:
                raise ValueError(f"splits of {size} keys cannot end at {end}, where those of {next_size} begin")
            before = end

    @cached_property
    def split_segments(self) -> tuple[tuple[int, int, int], ...]:
        """(start, size, first split) of the splits of each size, ascending: the position at which they begin, the keys
        in one, and the number of the first of them.
        """
        segments, start, first = [], 0, 0
        for size, end in (*self.early, (self.split_size, None)):
            segments.append((start, size, first))
            if end is not None:
                start, first = end, first + (end - start) // size
        return tuple(segments)

    @property
    def smallest(self) -> int:
        """The size of the smallest splits."""
        return min(size for _, size, _ in self.split_segments)

    def key_tile_of(self, itemsize: int, head_size: int) -> int:
        """Keys in a step of the online softmax over keys of so many elements, of so many bytes each."""
        halvings = (itemsize > 2) + (head_size > _LARGE_HEAD)
        return min(max(self.key_tile >> halvings, SMALLEST_SPLIT), self.smallest)

    @classmethod
    def of_device(cls, device_type: str, implementation: str = "auto") -> "AttentionReduction":
        """The reduction that an implementation is fastest with on a device."""
        by_implementation = _FASTEST.get(device_type, {})
        return by_implementation.get(implementation) or by_implementation.get("auto") or cls(key_tile=cls.split_size)

    def split_of(self, position: int) -> int:
        """The number of the split that a position is in."""
        start, size, first = max(segment for segment in self.split_segments if segment[0] <= position)
        return first + (position - start) // size

    def start_of(self, split: int) -> int:
        """The first position of a split."""
        start, size, first = max(segment for segment in self.split_segments if segment[2] <= split)
        return start + (split - first) * size

    def splits(self, first: int, last: int) -> range:
        """Numbers of the splits that hold the positions ``first`` to ``last`` inclusive, ascending."""
        return range(self.split_of(first), self.split_of(last) + 1)

    def __str__(self) -> str:
        early = ", ".join(f"{size} up to {end}" for size, end in self.early)
        return f"splits of {early}{', then ' if early else ''}{self.split_size} keys"


_ON_GPUS = AttentionReduction(1024, ((256, 2048), (512, 32768)))
_FASTEST = {
    "cpu": {"exact": _ON_GPUS},
    "cuda": {
        "auto": _ON_GPUS,
        # Each split has a query block of its own.
        "flex": AttentionReduction(1024, ((512, 2048),), block_m=64, num_warps=4),
    },
}
"""By device type and implementation. On the others a split is one step of the online softmax."""
