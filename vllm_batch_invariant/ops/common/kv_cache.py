"""Keys and values in the pages of an engine's cache, which attention reads and other operations write."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CacheSlots:
    """Where the keys and values of tokens go in an engine's cache.

    Attributes:
        keys, values: [pages, kv_heads, page_size, head_size], of the same strides, aligned as :func:`is_aligned` says.
        slots: [tokens or fewer] int64, page * page_size + place in it of the first tokens. The other tokens are
            padding, as those with a negative one.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]


def is_aligned(cache: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can read keys or values [pages, kv_heads, page_size, head_size]: addresses
    of all heads are multiples of 16 bytes.
    """
    strides = [stride * cache.element_size() for stride in cache.stride()[:3]]
    return all(number % 16 == 0 for number in (cache.data_ptr(), *strides))
