"""Keys and values that are written to a cache as codes."""

import torch

from vllm_batch_invariant.ops.common.kv_cache import E4M3, CacheSlots

KV_HEADS, SIZE, PAGE = 2, 16, 4


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """[tokens, KV_HEADS, SIZE] of a dtype: every one of 16 bits, or of fp32 those next to every border of codes."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(-1, KV_HEADS, SIZE)
    codes = torch.arange(256).to(torch.uint8).view(E4M3).float()
    middles = (codes[1:127] + codes[:126]) / 2
    near = torch.cat([codes, middles, -middles]).view(torch.int32)
    near = torch.cat([near - 1, near, near + 1]).view(torch.float32)
    near = torch.cat([near, torch.tensor([448.0, 464.0, 465.0, 1e30, torch.inf, -torch.inf, torch.nan, -torch.nan])])
    return torch.nn.functional.pad(near, (0, -len(near) % (KV_HEADS * SIZE))).view(-1, KV_HEADS, SIZE)


Scales = float | list[float]


def empty(tokens: int, k_scale: Scales, v_scale: Scales, device: str = "cpu") -> CacheSlots:
    """A cache with room for so many tokens, in an order of its own and with bytes of 7 in it; strided as an engine's:
    keys and values side by side.
    """
    pages = -(-tokens // PAGE) + 1
    cache = torch.full((pages, KV_HEADS, PAGE, 2 * SIZE), 7, dtype=torch.uint8, device=device).view(E4M3)
    slots = torch.randperm(pages * PAGE, generator=torch.Generator().manual_seed(1))[:tokens].to(device)
    scales = [torch.tensor(scale, device=device) for scale in (k_scale, v_scale)]
    return CacheSlots(*cache.split(SIZE, dim=-1), slots, *scales)


def empty_of_tokens(tokens: int, device: str = "cpu") -> CacheSlots:
    """The same with room for a scale of each token and head behind its keys, and behind its values, of bytes of 7."""
    cache = empty(tokens, 1.0, 1.0, device)
    held = torch.full((*cache.keys.shape[:3], 2 * (SIZE + 4)), 7, dtype=torch.uint8, device=device)
    halves = held.split(SIZE + 4, dim=-1)
    scales = [half[..., SIZE:].view(torch.float32)[..., 0] for half in halves]
    return CacheSlots(*(half[..., :SIZE].view(E4M3) for half in halves), cache.slots, *scales)


def written_scales(cache: CacheSlots) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [slots, KV_HEADS] of keys and of values, in the order of the slots."""
    at = cache.slots // PAGE, slice(None), cache.slots % PAGE
    return cache.k_scale[at], cache.v_scale[at]


def written(cache: CacheSlots) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [slots, KV_HEADS, SIZE] of keys and of values, in the order of the slots."""
    at = cache.slots // PAGE, slice(None), cache.slots % PAGE
    return cache.keys.view(torch.uint8)[at], cache.values.view(torch.uint8)[at]
