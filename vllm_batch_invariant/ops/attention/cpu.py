"""Paged attention on the CPU: one compiled kernel for prefill and decode, and its schedule."""

import numba
import numpy as np
import torch

from ..common.numba_rows import threads
from . import cpu_kernel
from .params import PagedAttention

TILE_ROWS = 64
"""Query rows of a work item, (token, head of the group) pairs."""
TILE_KEYS = 32
"""Keys held in fp32 at a time, a power of two."""
SERIAL_BELOW = 1 << 12
"""(query token, key, KV head) triples under which waking threads costs more than they save."""


def _cache(cache: torch.Tensor) -> tuple:
    if cache.stride(3) != 1:
        cache = cache.contiguous()
    strides = cache.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(cache.shape, strides, strict=True))
    data = cache.detach().as_strided((span,), (1,)).view(torch.uint8).numpy()
    return cpu_kernel.Cache(data, np.array(strides[:3]), cache.element_size(), cache.dtype == torch.float16)


def paged_attention(call: PagedAttention, out: torch.Tensor) -> None:
    """Write the attention of ``call`` to ``out``; see the operation's package for the contract."""
    query_heads, kv_heads = call.query.shape[1], call.key_cache.shape[1]
    group = query_heads // kv_heads
    tile_tokens = max(1, TILE_ROWS // group)
    window = call.sliding_window or 0
    items, shares = cpu_kernel.deal(call.starts, call.lengths, kv_heads, tile_tokens, window, threads(), SERIAL_BELOW)
    slopes = torch.zeros(query_heads) if call.alibi_slopes is None else call.alibi_slopes.float().contiguous()
    query = call.query[: call.tokens].float().contiguous()
    result = torch.empty_like(query)
    numba.set_num_threads(len(shares) - 1)
    cpu_kernel.attend(
        query.numpy(),
        result.numpy(),
        _cache(call.key_cache),
        _cache(call.value_cache),
        np.ascontiguousarray(call.table),
        call.page_size,
        cpu_kernel.Scoring(np.float32(call.scale), np.float32(call.logits_soft_cap or 0.0), slopes.numpy(), window),
        call.equal_splits(),
        group,
        (tile_tokens * group + 1) // 2 * 2,
        min(TILE_KEYS, call.equal_splits()),
        items,
        shares,
    )
    out[: call.tokens] = result
