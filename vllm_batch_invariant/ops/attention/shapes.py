"""What plans of attention on a GPU, their kernels and their memory know of layers and of each other."""

from dataclasses import dataclass

import torch
import triton

from .params import PagedAttention
from .reduction import AttentionReduction


@dataclass(frozen=True)
class AttentionShape:
    """What a plan depends on, apart from the batch."""

    heads: int
    kv_heads: int
    head_size: int
    """Of values, and of keys without their tail."""
    dtype: torch.dtype
    """Of queries."""
    reduction: AttentionReduction
    cache_dtype: torch.dtype | None = None
    """Of keys and values as they are stored, if it is another."""
    scales_of_tokens: bool = False
    """Whether these have a scale a token and head."""
    tail: int = 0
    """Elements of a key behind those that are its value, too."""

    @classmethod
    def of(cls, call: PagedAttention) -> "AttentionShape":
        heads, cache, dtype = call.query.shape[1], call.cache, call.query.dtype
        stored = cache.keys.dtype if cache.holds_codes else None
        return cls(
            heads,
            cache.kv_heads,
            cache.value_size,
            dtype,
            call.reduction,
            stored,
            cache.scales_of_tokens,
            cache.tail,
        )

    def __str__(self) -> str:
        dtype, stored = (str(one).removeprefix("torch.") for one in (self.dtype, self.cache_dtype))
        over = f"{self.heads} query heads over {self.kv_heads} KV heads of size {self.head_size} in {dtype}"
        scales = " with one scale a token and head" if self.scales_of_tokens else ""
        over += f", keys with {self.tail} more elements than values" if self.tail else ""
        return over if self.cache_dtype is None else f"{over}, keys and values in {stored}{scales}"

    @property
    def queries_per_kv(self) -> int:
        return self.heads // self.kv_heads

    @property
    def padded_head_size(self) -> int:
        return triton.next_power_of_2(self.head_size)

    @property
    def padded_tail(self) -> int:
        return triton.next_power_of_2(self.tail) if self.tail else 0

    @property
    def key_tile(self) -> int:
        return self.reduction.key_tile_of(self.dtype.itemsize, self.head_size)


@dataclass(frozen=True)
class Schedule:
    """How a CTA of the Triton kernel holds its query rows: speed only."""

    block_m: int
    """Query rows."""
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1
    """CTAs that fit on a multiprocessor."""
    maxnreg: int | None = None
    """Limit of a thread's registers, to make them fit."""
