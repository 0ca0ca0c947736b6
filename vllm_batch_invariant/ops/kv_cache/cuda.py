"""Keys and values into a cache on a GPU, in Triton: a program has the keys of a token, or its values."""

import torch
import triton

from ..common.kv_cache import CacheSlots, head_stride
from ..common.launch import launch
from .triton_kernels import write_kernel


def write(key: torch.Tensor, value: torch.Tensor, cache: CacheSlots) -> None:
    """See the operation's package."""
    kv_heads, head_size = key.shape[1:]
    key, value = (x if x.stride()[1:] == (head_size, 1) else x.contiguous() for x in (key, value))
    caches = cache.keys, cache.values
    if cache.k_scale is not None:
        caches = cache.keys.view(torch.uint8), cache.values.view(torch.uint8)
    if len(cache.slots):
        launch(
            write_kernel,
            (len(cache.slots), 2),
            (
                key,
                value,
                *caches,
                cache.slots,
                cache.k_scale,
                cache.v_scale,
                head_stride(cache.k_scale),
                key.stride(0),
                value.stride(0),
                *cache.keys.stride(),
                *cache.values.stride(),
            ),
            on=key,
            waits=True,
            HOLDS_CODES=cache.k_scale is not None,
            NUM_KV_HEADS=kv_heads,
            HEAD_DIM=head_size,
            PAGE_SIZE=cache.page_size,
            BLOCK=triton.next_power_of_2(kv_heads * head_size),
        )
