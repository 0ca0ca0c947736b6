"""Inputs of attention to time: queries, and a paged cache as vLLM lays it out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from benchmarks.attention_cases import Case, Request
from vllm_batch_invariant.ops.common.dtypes import E4M3


@dataclass(frozen=True)
class Layer:
    """What a layer adds to plain causal attention."""

    window: int | None = None
    """Keys that a token sees, its own among them."""
    sinks: torch.Tensor | None = None
    """[heads] bf16"""
    encodes: bool = False
    """Whether tokens see all keys of their request, which lie in its order: pages have one key."""

    @property
    def added(self) -> dict[str, object]:
        """The same as fields of :class:`vllm_batch_invariant.ops.attention.AttentionSpec`."""
        return {"sliding_window": self.window, "sinks": self.sinks, "causal": not self.encodes}


@dataclass(frozen=True)
class Batch:
    """The attention of one layer in one step."""

    requests: tuple[Request, ...]
    query: torch.Tensor
    """[tokens, heads, head_size], one request after the other."""
    cache: torch.Tensor
    """[pages, page_size, kv_heads, 2 * head_size], values beside their keys; bf16, or e4m3 with scales of 1."""
    table: torch.Tensor
    """[requests, most pages] int32, the pages of each request."""
    seq_lens: torch.Tensor
    """[requests] int32"""
    query_start_loc: torch.Tensor
    """[requests + 1] int32"""
    layer: Layer

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        query: torch.Tensor,
        cache: torch.Tensor,
        table: torch.Tensor,
        layer: Layer | None = None,
    ) -> "Batch":
        """With the lengths of the requests on the query's device."""
        lengths = [request.context for request in requests]
        starts = list(accumulate((request.tokens for request in requests), initial=0))
        on_device = (torch.tensor(numbers, dtype=torch.int32, device=query.device) for numbers in (lengths, starts))
        return cls(tuple(requests), query, cache, table, *on_device, layer or Layer())

    def with_requests(self, requests: Sequence[Request], query: torch.Tensor, table: torch.Tensor) -> "Batch":
        """Others that see the same pages in the same layer."""
        return Batch.of(requests, query, self.cache, table, self.layer)

    @property
    def keys(self) -> torch.Tensor:
        """[pages, page_size, kv_heads, head_size]"""
        return self.cache[..., : self.query.shape[2]]

    @property
    def values(self) -> torch.Tensor:
        """[pages, page_size, kv_heads, head_size]"""
        return self.cache[..., self.query.shape[2] :]

    @property
    def in_codes(self) -> bool:
        """Whether keys and values are e4m3."""
        return self.cache.dtype == E4M3

    @property
    def page_size(self) -> int:
        return self.cache.shape[1]

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.cache.shape[2]

    @property
    def head_size(self) -> int:
        return self.query.shape[2]

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    @cached_property
    def most_tokens(self) -> int:
        """New tokens of the request that has the most."""
        return max(request.tokens for request in self.requests)

    @cached_property
    def longest_context(self) -> int:
        return max(request.context for request in self.requests)

    @cached_property
    def rows(self) -> tuple[slice, ...]:
        """The rows of each request."""
        starts = accumulate((request.tokens for request in self.requests), initial=0)
        return tuple(slice(*ends) for ends in pairwise(starts))

    def pages(self, place: int) -> torch.Tensor:
        """The pages of a request."""
        return self.table[place, : -(-self.requests[place].context // self.page_size)].long()

    def pick(self, places: Sequence[int]) -> "Batch":
        """Some of the requests, in this order."""
        requests = [self.requests[place] for place in places]
        query = torch.cat([self.query[self.rows[place]] for place in places])
        table = torch.stack([self.table[place] for place in places])
        if self.layer.encodes:
            cache = torch.cat([self.cache[self.rows[place]] for place in places])
            return Batch.of(requests, query, cache, in_order(requests, query.device), self.layer)
        return self.with_requests(requests, query, table)


def in_order(requests: Sequence[Request], device: torch.device | str) -> torch.Tensor:
    """[requests, most keys] int32: the pages of one key of requests one after the other; 0 behind their end."""
    lengths = torch.tensor([request.context for request in requests], device=device)
    place = torch.arange(int(lengths.max()), device=device)
    table = (lengths.cumsum(0) - lengths)[:, None] + place
    return torch.where(place < lengths[:, None], table, 0).int()


def batches_of(case: Case, page_size: int, copies: int, device: str) -> list[Batch]:
    """A batch with random bf16 queries, keys and values, and more with other caches, as if they were other layers of
    the same step: all caches are one allocation, pages lie in random order, the same in each.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape = case.shape
    page_size = 1 if shape.encodes else page_size
    counts = torch.tensor([-(-request.context // page_size) for request in case.requests], device=device)
    pages, tokens = int(counts.sum()), sum(request.tokens for request in case.requests)
    sizes = copies, pages, page_size, shape.kv_heads, 2 * shape.head_size
    caches = torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    caches = caches.to(E4M3) if case.in_codes else caches
    exists = torch.arange(int(counts.max()), device=device) < counts[:, None]
    table = torch.zeros(exists.shape, dtype=torch.int32, device=device)
    table[exists] = torch.randperm(pages, generator=generator, device=device).int()
    if shape.encodes:
        table = in_order(case.requests, device)
    query = torch.randn(tokens, shape.heads, shape.head_size, generator=generator, dtype=torch.bfloat16, device=device)
    sinks = torch.linspace(-2, 4, shape.heads, dtype=torch.bfloat16, device=device) if shape.sinks else None
    first = Batch.of(case.requests, query, caches[0], table, Layer(case.window, sinks, shape.encodes))
    return [replace(first, cache=cache) for cache in caches]
