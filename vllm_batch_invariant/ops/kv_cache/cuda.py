"""Keys and values into a cache on a GPU, in Triton: a program has the keys of a token, or its values; of one head where
each has a scale of its own.
"""

import torch
import triton

from ..common.kv_cache import CacheSlots, of_tokens, scale_strides
from ..common.launch import launch
from .triton_kernels import write_kernel, write_scaled_kernel


def write(key: torch.Tensor, value: torch.Tensor, cache: CacheSlots) -> None:
    """See the operation's package."""
    kv_heads, head_size = key.shape[1:]
    key, value = (x if x.stride()[1:] == (head_size, 1) else x.contiguous() for x in (key, value))
    caches = cache.keys, cache.values
    if cache.k_scale is not None:
        caches = cache.keys.view(torch.uint8), cache.values.view(torch.uint8)
    if not len(cache.slots):
        return
    tensors = (key, value, *caches, cache.slots, cache.k_scale, cache.v_scale)
    strides = (key.stride(0), value.stride(0), *cache.keys.stride(), *cache.values.stride())
    shared = {"on": key, "waits": True, "HEAD_DIM": head_size, "PAGE_SIZE": cache.page_size}
    if of_tokens(cache.k_scale):
        launch(
            write_scaled_kernel,
            (len(cache.slots), kv_heads, 2),
            (*tensors, *strides, *scale_strides(cache.k_scale)),
            BLOCK=triton.next_power_of_2(head_size),
            **shared,
        )
        return
    launch(
        write_kernel,
        (len(cache.slots), 2),
        (*tensors, scale_strides(cache.k_scale)[1], *strides),
        HOLDS_CODES=cache.k_scale is not None,
        NUM_KV_HEADS=kv_heads,
        BLOCK=triton.next_power_of_2(kv_heads * head_size),
        **shared,
    )
