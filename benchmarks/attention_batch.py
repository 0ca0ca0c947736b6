"""Inputs of attention to time: queries, and a paged cache as vLLM lays it out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from benchmarks.attention_cases import Case, Request
from vllm_batch_invariant.ops.common.dtypes import E4M3


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

    @classmethod
    def of(cls, requests: Sequence[Request], query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor) -> "Batch":
        """With the lengths of the requests on the query's device."""
        lengths = [request.context for request in requests]
        starts = list(accumulate((request.tokens for request in requests), initial=0))
        on_device = (torch.tensor(numbers, dtype=torch.int32, device=query.device) for numbers in (lengths, starts))
        return cls(tuple(requests), query, cache, table, *on_device)

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
        query = torch.cat([self.query[self.rows[place]] for place in places])
        table = torch.stack([self.table[place] for place in places])
        return Batch.of([self.requests[place] for place in places], query, self.cache, table)


def batches_of(case: Case, page_size: int, copies: int, device: str) -> list[Batch]:
    """A batch with random bf16 queries, keys and values, and more with other caches, as if they were other layers of
    the same step: all caches are one allocation, pages lie in random order, the same in each.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape = case.shape
    counts = torch.tensor([-(-request.context // page_size) for request in case.requests], device=device)
    pages, tokens = int(counts.sum()), sum(request.tokens for request in case.requests)
    sizes = copies, pages, page_size, shape.kv_heads, 2 * shape.head_size
    caches = torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    caches = caches.to(E4M3) if case.in_codes else caches
    exists = torch.arange(int(counts.max()), device=device) < counts[:, None]
    table = torch.zeros(exists.shape, dtype=torch.int32, device=device)
    table[exists] = torch.randperm(pages, generator=generator, device=device).int()
    query = torch.randn(tokens, shape.heads, shape.head_size, generator=generator, dtype=torch.bfloat16, device=device)
    first = Batch.of(case.requests, query, caches[0], table)
    return [replace(first, cache=cache) for cache in caches]
