"""Keys and values in the pages of an engine's cache, which attention reads and other operations write."""

import math
from dataclasses import dataclass

import torch

from .dtypes import E4M3

LARGEST = 448.0
"""E4M3's largest number."""


@dataclass(frozen=True)
class CacheSlots:
    """Where the keys and values of tokens go in an engine's cache.

    Attributes:
        keys, values: [pages, kv_heads, page_size, head_size], of the same strides, aligned as :func:`is_aligned` says.
        slots: [tokens or fewer] int64, page * page_size + place in it of the first tokens. The other tokens are
            padding, as those with a negative one.
        k_scale, v_scale: one fp32 number of keys, and one of values, where these are codes in e4m3; else None.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]


def codes_of(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes in e4m3 of keys or values, by PyTorch: ``round(min(max(x / scale, -448), 448))``, the division in fp32 and
    rounded, of two nearest numbers the one with the even code; 0x7f of any NaN.
    """
    numbers = (x.float() / scale.reshape(())).clamp(-LARGEST, LARGEST)
    # A NaN's sign follows the processor: an x86 keeps it in arithmetic, an NVIDIA GPU clears it.
    return torch.where(numbers.isnan(), math.nan, numbers).to(E4M3)


def is_aligned(cache: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can read keys or values [pages, kv_heads, page_size, head_size]: addresses
    of all heads are multiples of 16 bytes.
    """
    strides = [stride * cache.element_size() for stride in cache.stride()[:3]]
    return all(number % 16 == 0 for number in (cache.data_ptr(), *strides))
