"""Paged attention on the CPU: one compiled kernel for prefill and decode, and its schedule."""

from typing import NamedTuple

import numpy as np
import torch

from ..common.kv_cache import of_tokens, scale_strides
from ..common.numba_rows import threads, use_threads
from . import cpu_kernel
from .cpu_kernel import READS_E4M3, READS_LATENT, READS_PACKED, SEES_RANGES, SERVES
from .params import PackedKeys, PagedAttention

__all__ = ["READS_E4M3", "READS_LATENT", "READS_PACKED", "SEES_RANGES", "SERVES", "Plan", "paged_attention"]

BLOCK_M = 64
"""Query rows of a work item, (token, query head of the KV head) pairs."""
BLOCK_N = 32
"""Keys held in fp32 at a time, a power of two."""
SERIAL_BELOW = 1 << 12
"""(query token, key, KV head) triples under which waking threads costs more than they save."""


_NO_PAGES = 1 << 40
"""Slots of a page that begins at a request's first key, more than it has keys."""
_ONE = np.ones(1, np.float32)
"""Scale of numbers that are no codes."""


def _cache(cache: torch.Tensor, packed: bool) -> cpu_kernel.Cache:
    if cache.stride(3) != 1:
        cache = cache.contiguous()
    steps = np.array(cache.stride()[:3])
    if packed:  # a page is a row, and the next slot is in the next row
        steps[2] = steps[0]
    data = _flat(cache).view(torch.uint8).numpy()
    return cpu_kernel.Cache(data, steps, cache.element_size(), cache.dtype == torch.float16)


def _scales(scale: torch.Tensor | None) -> cpu_kernel.Scales:
    data = _ONE if scale is None else _flat(scale).numpy()
    return cpu_kernel.Scales(data, *scale_strides(scale), of_tokens(scale))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """What lies between the first and the last element of a tensor, in the order of memory."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((span,), (1,))


class Plan(NamedTuple):
    """What the layers of a step that ask alike share: it follows from lengths, pages and the layers' heads alone."""

    tokens: int
    table: np.ndarray
    ranges: np.ndarray
    tile_tokens: int
    work: cpu_kernel.Work

    @classmethod
    def of(cls, params: PagedAttention) -> "Plan":
        """That of a call, which has been checked."""
        heads, kv_heads, spec = params.query.shape[1], params.cache.kv_heads, params.spec
        tile_tokens = max(1, min(BLOCK_M // (heads // kv_heads), int(np.diff(params.starts).max(initial=0))))
        ranges, window = params.own_ranges, spec.sliding_window or 0
        work = cpu_kernel.deal(
            params.starts, params.lengths, ranges, kv_heads, tile_tokens, window, spec.causal, threads(), SERIAL_BELOW
        )
        return cls(params.tokens, np.ascontiguousarray(params.cache.table), ranges, tile_tokens, work)


def paged_attention(params: PagedAttention, out: torch.Tensor, plan: Plan | None = None) -> None:
    """Write the attention of ``params`` to ``out``; see the operation's package for the contract."""
    plan = plan or Plan.of(params)
    cache, packed = params.cache, isinstance(params.cache, PackedKeys)
    heads, split_size = params.query.shape[1], params.equal_splits()
    queries_per_kv = heads // cache.kv_heads
    query = params.query[: plan.tokens].float().contiguous()
    result = query.new_empty((*query.shape[:2], cache.value_size))
    use_threads(len(plan.work.indptr) - 1)
    cpu_kernel.attend(
        query.numpy(),
        result.numpy(),
        _cache(cache.keys, packed),
        _cache(cache.values, packed),
        _scales(cache.k_scale),
        _scales(cache.v_scale),
        plan.table,
        _NO_PAGES if packed else cache.page_size,
        cpu_kernel.ScoreMod.of(params.spec, heads),
        plan.ranges,
        split_size,
        queries_per_kv,
        block_m=-(-plan.tile_tokens * queries_per_kv // 4) * 4,
        block_n=min(BLOCK_N, split_size),
        work=plan.work,
    )
    out[: plan.tokens] = result
