"""What decides the bits of attention."""

from dataclasses import dataclass

SMALLEST_SPLIT = 16


@dataclass(frozen=True)
class AttentionReduction:
    """Softmax(query @ keys) @ values over splits of ``split_size`` keys, counted from position 0 of the request.

    Within a split, everything in fp32: ``score = scale * dot(query, key)`` with an order of the dot that the head size
    alone decides, ``weight = exp(score - max)``, the weights and the weighted values are summed by ascending position
    in an order that the split size alone decides. Splits are merged in ascending order, a split without a visible key
    has no part in it, and the result is rounded once to the query's dtype. On a GPU the weights are rounded to the
    values' dtype before they weigh them, and the tile of keys, which the dtype decides, is a part of the reduction.

    Attributes:
        split_size: keys in a split, a power of two; pages of any size fit it, because a split is a range of positions.

    Raises:
        ValueError: a split size that is no power of two or is below 16.
    """

    split_size: int = 256

    def __post_init__(self) -> None:
        if self.split_size < SMALLEST_SPLIT or self.split_size & (self.split_size - 1):
            raise ValueError(f"split_size must be a power of two of at least {SMALLEST_SPLIT}, got {self.split_size}")

    def splits(self, first: int, last: int) -> range:
        """Numbers of the splits that hold the positions ``first`` to ``last`` inclusive, ascending."""
        return range(first // self.split_size, last // self.split_size + 1)
