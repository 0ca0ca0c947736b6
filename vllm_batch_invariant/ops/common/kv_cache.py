"""Keys and values in the pages of an engine's cache, which attention reads and other operations write."""

import math
from dataclasses import dataclass

import torch

from .dtypes import E4M3

LARGEST = 448.0
"""E4M3's largest number."""
LEAST_SCALE = 1e-6
"""That a token is given, as vLLM has it."""


@dataclass(frozen=True)
class CacheSlots:
    """Where the keys and values of tokens go in an engine's cache.

    Attributes:
        keys, values: [pages, kv_heads, page_size, head_size], of the same strides, aligned as :func:`is_aligned` says.
        slots: [tokens or fewer] int64, page * page_size + place in it of the first tokens. The other tokens are
            padding, as those with a negative one.
        k_scale, v_scale: of keys and of values that are codes in e4m3, fp32: one number, or [kv_heads], packed; or
            those of tokens and heads, [pages, kv_heads, page_size] of the same strides, which are written, too. Else
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
        """Whether there are scales where codes ask for them, of keys and of values alike, and else none."""
        if self.k_scale is None or self.v_scale is None or self.keys.dtype != E4M3:
            return self.k_scale is self.v_scale and self.keys.dtype != E4M3
        strides = [scale_strides(scale) for scale in (self.k_scale, self.v_scale)]
        return strides[0] == strides[1] and all(scale_fits(one, self.keys) for one in (self.k_scale, self.v_scale))


def of_tokens(scale: torch.Tensor | None) -> bool:
    """Whether each token has one in each head."""
    return scale is not None and scale.dim() == 3


def scale_fits(scale: torch.Tensor, codes: torch.Tensor) -> bool:
    """Whether a scale can be that of codes [pages, kv_heads, page_size, head_size]."""
    given = scale.dim() <= 1 and scale.is_contiguous() and scale.numel() in (1, codes.shape[1])
    return scale.dtype == torch.float32 and (given or scale.shape == codes.shape[:3])


def scale_strides(scale: torch.Tensor | None) -> tuple[int, ...]:
    """From the scale of a page, of a KV head and of a slot to that of the next: 0 where they have one."""
    if scale is not None and of_tokens(scale):
        return scale.stride()
    return 0, 0 if scale is None or scale.numel() == 1 else 1, 0


def scales_of(x: torch.Tensor) -> torch.Tensor:
    """Scales fp32 [...] of keys or values [..., head_size] of a token and head, by PyTorch: ``max(max(|x|) / 448,
    1e-6)``, the division in fp32 and rounded; NaN counts as 0.
    """
    x = x.float()
    return (torch.where(x.isnan(), 0.0, x.abs()).amax(-1) / LARGEST).clamp(min=LEAST_SCALE)


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
