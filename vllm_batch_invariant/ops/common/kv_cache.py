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
        k_scale, v_scale: of keys and of values that are codes in e4m3, fp32: one number, or [kv_heads], packed; else
            None.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    @property
    def scales_fit(self) -> bool:
        """Whether there are scales where codes ask for them, as many of keys as of values, and else none."""
        scales = [scale for scale in (self.k_scale, self.v_scale) if scale is not None]
        counts = {scale.numel() for scale in scales}
        return (
            len(scales) == (2 if self.keys.dtype == E4M3 else 0)
            and len(counts) <= 1
            and counts <= {1, self.keys.shape[1]}
            and all(scale.dtype == torch.float32 and scale.is_contiguous() for scale in scales)
        )


def head_stride(scale: torch.Tensor | None) -> int:
    """From the scale of a head to that of the next: 0 where all have one."""
    return 0 if scale is None or scale.numel() == 1 else 1


def codes_of(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes in e4m3 of keys or values, by PyTorch: ``round(min(max(x / scale, -448), 448))``, the division in fp32 and
    rounded, of two nearest numbers the one with the even code; 0x7f of any NaN. Scales are as many as x has, or one for
    all along an axis.
    """
    numbers = (x.float() / scale).clamp(-LARGEST, LARGEST)
    # A NaN's sign follows the processor: an x86 keeps it in arithmetic, an NVIDIA GPU clears it.
    return torch.where(numbers.isnan(), math.nan, numbers).to(E4M3)


def is_aligned(cache: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can read keys or values [pages, kv_heads, page_size, head_size]: addresses
    of all heads are multiples of 16 bytes.
    """
    strides = [stride * cache.element_size() for stride in cache.stride()[:3]]
    return all(number % 16 == 0 for number in (cache.data_ptr(), *strides))
