"""What decides the bits of attention."""

from dataclasses import dataclass

SMALLEST_SPLIT = 16


@dataclass(frozen=True)
class AttentionReduction:
    """Softmax(query @ keys) @ values over splits of the keys at fixed positions of the request: the first
    ``early_keys`` of them in splits of ``early_size``, the others in splits of ``split_size``.

    Within a split, everything in fp32: ``score = scale * dot(query, key)`` with an order of the dot that the head size
    alone decides, ``weight = exp(score - max)``, the weights and the weighted values are summed by ascending position
    in an order that the split size alone decides. Splits are merged in ascending order, a split without a visible key
    has no part in it, and the result is rounded once to the query's dtype. On a GPU the weights are rounded to the
    values' dtype before they weigh them, and the tile of keys, which the dtype decides, is a part of the reduction.

    Attributes:
        split_size: keys in a split, a power of two; pages of any size fit it, because a split is a range of positions.
        early_size: the same for the first keys. A request that is alone and short has only its splits to spread over a
            GPU, and one that is long has more of them than that takes.
        early_keys: how many keys that are, a multiple of both sizes.

    Raises:
        ValueError: a split size that is no power of two or is below 16, or early keys that are no multiple.
    """

    split_size: int = 256
    early_size: int = 256
    early_keys: int = 0

    def __post_init__(self) -> None:
        for size in (self.split_size, self.early_size):
            if size < SMALLEST_SPLIT or size & (size - 1):
                raise ValueError(f"split_size must be a power of two of at least {SMALLEST_SPLIT}, got {size}")
        if self.early_keys % self.split_size or self.early_keys % self.early_size:
            raise ValueError(
                f"early_keys must be a multiple of {self.early_size} and {self.split_size}, got {self.early_keys}"
            )

    @classmethod
    def of_device(cls, device_type: str, implementation: str = "auto") -> "AttentionReduction":
        """The reduction that an implementation is fastest with on a device."""
        if device_type != "cuda":
            return cls()
        # FlexAttention gives each split a query block of its own.
        return cls(1024, 512, 2048) if implementation == "flex" else cls(512, 256, 4096)

    def split_of(self, position: int) -> int:
        """The number of the split that a position is in."""
        if position < self.early_keys:
            return position // self.early_size
        return self.early_keys // self.early_size + (position - self.early_keys) // self.split_size

    def start_of(self, split: int) -> int:
        """The first position of a split."""
        early = self.early_keys // self.early_size
        return split * self.early_size if split < early else self.early_keys + (split - early) * self.split_size

    def splits(self, first: int, last: int) -> range:
        """Numbers of the splits that hold the positions ``first`` to ``last`` inclusive, ascending."""
        return range(self.split_of(first), self.split_of(last) + 1)

    def __str__(self) -> str:
        early = f"{self.early_size} (the first {self.early_keys}) and " if self.early_keys else ""
        return f"splits of {early}{self.split_size} keys"
