"""Keys and values into a cache, by PyTorch: no two elements meet."""

import torch

from ..common.kv_cache import CacheSlots, codes_of


def write(key: torch.Tensor, value: torch.Tensor, cache: CacheSlots) -> None:
    """See the operation's package."""
    slots = cache.slots
    key, value = key[: len(slots)], value[: len(slots)]
    real = slots >= 0
    if not bool(real.all()):
        slots, key, value = slots[real], key[real], value[real]
    page, slot = slots // cache.page_size, slots % cache.page_size
    for x, held, scale in ((key, cache.keys, cache.k_scale), (value, cache.values, cache.v_scale)):
        if scale is None:
            held[page, :, slot] = x.to(held.dtype)
        else:
            # PyTorch has no such indices of e4m3.
            held.view(torch.uint8)[page, :, slot] = codes_of(x, scale.view(-1, 1)).view(torch.uint8)
