"""Keys and values into a cache, by PyTorch: no two elements meet."""

import torch

from ..common.kv_cache import CacheSlots, codes_of, of_tokens, scales_of


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
            continue
        of_rows = scale.view(-1)
        if of_tokens(scale):
            of_rows = scale[page, :, slot] = scales_of(x)
        # PyTorch has no such indices of e4m3.
        held.view(torch.uint8)[page, :, slot] = codes_of(x, of_rows[..., None]).view(torch.uint8)
