"""Writes a step's keys and values to an engine's cache, as they are or as codes in e4m3."""

import torch

from ..common.kv_cache import CacheSlots
from ..dispatch import implementation

__all__ = ["write"]


def write(key: torch.Tensor, value: torch.Tensor, cache: CacheSlots) -> None:
    """Write keys and values to their slots. A code is a function of its number alone: with s the scale of the keys, or
    that of the values, of all heads or of its own, in fp32::

        code = round(min(max(x / s, -448), 448))

    where the division is rounded, and ``round`` is to the nearest number of e4m3, of two the even one. The code of NaN
    is 0x7f, whatever its sign. That is what vLLM's kernels compute, but for the last bit of a division that is not
    IEEE 754's. Where each token has a scale in each head, it is written beside the codes, and is of what it scales,
    ``s = max(max(|x|) / 448, 1e-6)`` with a rounded division, in which NaN counts as 0.

    Args:
        key: [tokens, kv_heads, head_size] fp32, bf16 or fp16, heads packed; tokens may be any stride apart.
        value: as ``key``.
        cache: where they go. Numbers are written in its dtype; codes need its scales.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotCovered: a device without an implementation.
    """
    keys, values, slots = cache.keys, cache.values, cache.slots
    fits = (
        key.shape == value.shape
        and key.dtype == value.dtype
        and keys.shape == values.shape
        and key.shape[1:] == (keys.shape[1], keys.shape[3])
        and slots.dim() == 1
        and len(slots) <= len(key)
        and cache.scales_fit
    )
    if not fits:
        given = ", ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor in (key, value, keys, values, slots))
        scales = [None if scale is None else list(scale.shape) for scale in (cache.k_scale, cache.v_scale)]
        raise ValueError(f"no cache is written with {given} and scales {scales[0]} and {scales[1]}")
    scales = [scale for scale in (cache.k_scale, cache.v_scale) if scale is not None]
    implementation("kv_cache", key, value, keys, values, slots, *scales).write(key, value, cache)
