"""Keys and values into a cache: numbers by numba, codes by PyTorch. No two elements meet."""

import numpy as np
import torch
from numba import prange

from ..common.kv_cache import CacheSlots, codes_of, of_tokens, scales_of
from ..common.numba_rows import RowKernel, array_at

_BITS = {2: np.empty(0, np.int16), 4: np.empty(0, np.int32)}
"""What the kernel knows a number by, whose bits it copies."""
_SLOT = np.empty(0, np.int64)


def _write_kernel(
    key_ptr, key_stride, value_ptr, value_stride, keys_ptr, values_ptr, strides, sizes, slots_ptr, like, outside
):
    """Copy each token's packed heads to its slot. Strides are in bytes; ``strides`` are of the cache's
    pages, heads and slots, ``sizes`` tokens, heads, slots of a page, the head size and all slots. A slot that is none
    of the cache's sets ``outside``.
    """
    tokens, heads, page_size, size, count = sizes
    slots = array_at(slots_ptr, tokens, _SLOT)
    for token in prange(tokens):
        if slots[token] >= count:
            outside[0] = 1
        elif slots[token] >= 0:
            page, slot = slots[token] // page_size, slots[token] % page_size
            for head in range(heads):
                read, write = head * size * like.itemsize, page * strides[0] + head * strides[1] + slot * strides[2]
                key = array_at(key_ptr + token * key_stride + read, size, like)
                value = array_at(value_ptr + token * value_stride + read, size, like)
                of_key, of_value = array_at(keys_ptr + write, size, like), array_at(values_ptr + write, size, like)
                for i in range(size):
                    of_key[i] = key[i]
                    of_value[i] = value[i]


_write = RowKernel(_write_kernel)


def _write_numbers(key: torch.Tensor, value: torch.Tensor, cache: CacheSlots) -> None:
    keys, values, slots = cache.keys, cache.values, cache.slots.to(torch.int64).contiguous()
    key, value, width = key.to(keys.dtype), value.to(keys.dtype), keys.element_size()
    pages, heads, page, _ = keys.stride()
    tokens, (held, kv_heads, page_size, size) = len(slots), keys.shape
    outside = np.zeros(1, np.int8)
    _write(
        tokens * kv_heads * size,
        *(key.data_ptr(), key.stride(0) * width, value.data_ptr(), value.stride(0) * width),
        *(keys.data_ptr(), values.data_ptr(), (pages * width, heads * width, page * width)),
        *((tokens, kv_heads, page_size, size, held * page_size), slots.data_ptr(), _BITS[width], outside),
    )
    if outside[0]:
        raise IndexError(f"a slot of {slots.tolist()} is outside a cache of {held} pages of {page_size}")


def write(key: torch.Tensor, value: torch.Tensor, cache: CacheSlots) -> None:
    """See the operation's package."""
    slots = cache.slots
    of_heads = (cache.keys.shape[3], 1)
    packed = key.stride()[1:] == value.stride()[1:] == of_heads and cache.keys.stride(3) == 1
    known = packed and cache.keys.element_size() in _BITS and cache.keys.stride() == cache.values.stride()
    if cache.k_scale is None and known:
        _write_numbers(key, value, cache)
        return
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
