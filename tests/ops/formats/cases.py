"""Formats and what they may store."""

from collections.abc import Sequence

import torch

from vllm_batch_invariant.ops.formats import FORMATS, PLAIN, Format

DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64
Stored = Sequence[torch.Tensor]
PACKED = [one for one in FORMATS if one is not PLAIN]


def decoded(format: Format, stored: Stored, dtype: torch.dtype, k: int) -> torch.Tensor:
    return format.decode(stored, torch.empty(len(stored[0]), k, dtype=dtype))


def finite(dtype: torch.dtype, stride: int) -> torch.Tensor:
    """Every ``stride``-th finite number of 16 bits; of wider dtypes so many at random, of every size."""
    if dtype.itemsize == 2:
        every = torch.arange(-(2**15), 2**15, stride, dtype=torch.int16).view(dtype)
    else:
        draw = torch.Generator().manual_seed(0)
        words = torch.randint(-(2**31), 2**31, (2**16 // stride,), generator=draw)
        every = words.int().view(torch.float32).to(dtype)
    return every[every.isfinite()]


def random_stored(format: Format, n: int = 24, k: int = 256) -> tuple[torch.Tensor, ...]:
    """Scales of groups that differ, unlike those of certificates."""
    draw = torch.Generator().manual_seed(1)
    stored = list(format.stored(torch.randn(n, k, generator=draw).bfloat16()))
    if stored[1].dtype == torch.uint8:
        stored[1] = torch.randint(100, 140, stored[1].shape, generator=draw, dtype=torch.uint8)
    else:
        stored[1] = (torch.rand(stored[1].shape, generator=draw) + 0.5).to(stored[1].dtype)
    return tuple(stored)
