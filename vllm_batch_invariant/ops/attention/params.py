"""The arguments of paged attention, checked, with what every implementation asks of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from .reduction import AttentionReduction

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PagedAttention:
    """The arguments of one ``paged_attention``, shapes as there; to be checked before use."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scale: float
    reduction: AttentionReduction
    sliding_window: int | None
    logits_soft_cap: float | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None = None

    @property
    def page_size(self) -> int:
        return self.key_cache.shape[2]

    @cached_property
    def table(self) -> np.ndarray:
        """[requests, max_pages], on the host."""
        return self.block_table.cpu().numpy().astype(np.int32, copy=False)

    @cached_property
    def lengths(self) -> np.ndarray:
        """[requests] keys of each request, on the host."""
        return self.seq_lens.cpu().numpy().astype(np.int64, copy=False)

    @cached_property
    def starts(self) -> np.ndarray:
        """[requests + 1] first row of each request, on the host."""
        return self.query_start_loc.cpu().numpy().astype(np.int64, copy=False)

    @property
    def tokens(self) -> int:
        """Rows that hold a token; the rest is padding."""
        return int(self.starts[-1])

    def first_key(self, position: int) -> int:
        """The first position that a query at ``position`` sees."""
        return 0 if self.sliding_window is None else max(0, position - self.sliding_window + 1)

    def requests(self) -> Iterator[tuple[int, slice, range]]:
        """(request, its rows, their positions) of each request that has a query."""
        for request, length in enumerate(self.lengths.tolist()):
            start, stop = self.starts[request : request + 2].tolist()
            if stop > start:
                yield request, slice(start, stop), range(length - (stop - start), length)

    def split_positions(self, split: int, query_positions: range) -> range:
        """The positions of a split that some of the queries see."""
        start, stop = self.reduction.start_of(split), self.reduction.start_of(split + 1)
        return range(max(start, self.first_key(query_positions[0])), min(stop, query_positions[-1] + 1))

    def equal_splits(self) -> int:
        """The size of the splits, for an implementation that takes one.

        Raises:
            ValueError: the reduction has more than one.
        """
        if self.reduction.early:
            raise ValueError(f"this implementation of attention takes splits of one size, got {self.reduction}")
        return self.reduction.split_size

    def gather(self, request: int, positions: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value [kv_heads, len(positions), head_size] of a request, copied out of its pages."""
        place = np.arange(positions.start, positions.stop)
        pages = torch.from_numpy(self.table[request, place // self.page_size].astype(np.int64)).to(self.query.device)
        slots = torch.from_numpy(place % self.page_size).to(self.query.device)
        return tuple(cache[pages, :, slots].transpose(0, 1) for cache in (self.key_cache, self.value_cache))

    def check(self, values: bool = True) -> None:
        """Refuse arguments that do not fit, and pages that would be read outside the cache.

        Args:
            values: look at lengths and pages, too, which waits for the device.

        Raises:
            ValueError: one line that names the argument.
        """
        self._check_tensors()
        self._check_options()
        if values:
            self._check_requests()

    def _check_tensors(self) -> None:
        query, key, value = self.query, self.key_cache, self.value_cache
        if query.dim() != 3 or key.dim() != 4 or key.shape != value.shape:
            raise ValueError(
                "attention takes query [tokens, heads, head_size] and key and value caches "
                "[pages, kv_heads, page_size, head_size], "
                f"got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
            )
        if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
            raise ValueError(
                f"query and caches must all be fp32, bf16 or fp16, got {query.dtype}, {key.dtype} and {value.dtype}"
            )
        if query.shape[2] != key.shape[3] or query.shape[2] % 16 or query.shape[2] == 0:
            raise ValueError(
                "head_size must be a multiple of 16 and the same in query and cache, "
                f"got {query.shape[2]} and {key.shape[3]}"
            )
        if key.shape[1] == 0 or query.shape[1] % key.shape[1] or query.shape[1] == 0:
            raise ValueError(f"query heads must be a multiple of KV heads, got {query.shape[1]} and {key.shape[1]}")
        requests = self.seq_lens.shape[0] if self.seq_lens.dim() == 1 else -1
        table, starts = list(self.block_table.shape), list(self.query_start_loc.shape)
        if len(table) != 2 or table[0] != requests or starts != [requests + 1]:
            raise ValueError(
                "attention takes seq_lens [requests], block_table [requests, max_pages] and query_start_loc "
                f"[requests + 1], got {list(self.seq_lens.shape)}, {table} and {starts}"
            )
        for name in ("seq_lens", "block_table", "query_start_loc"):
            if getattr(self, name).dtype not in (torch.int32, torch.int64):
                raise ValueError(f"{name} must be int32 or int64, got {getattr(self, name).dtype}")

    def _check_options(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"scale must be above 0, got {self.scale}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1 or None, got {self.sliding_window}")
        if self.logits_soft_cap is not None and not self.logits_soft_cap > 0:
            raise ValueError(f"logits_soft_cap must be above 0 or None, got {self.logits_soft_cap}")
        for name in ("alibi_slopes", "sinks"):
            given = getattr(self, name)
            if given is not None and given.shape != self.query.shape[1:2]:
                raise ValueError(f"{name} must be [{self.query.shape[1]}], one a query head, got {list(given.shape)}")

    def _check_requests(self) -> None:
        query_lens = np.diff(self.starts)
        if self.starts[0] != 0 or self.tokens > self.query.shape[0] or (query_lens < 0).any():
            raise ValueError(
                f"query_start_loc must ascend from 0 to at most {self.query.shape[0]}, the rows of query, "
                f"got {self.starts.tolist()}"
            )
        room = self.table.shape[1] * self.page_size
        wrong = (query_lens > 0) & ((self.lengths < query_lens) | (self.lengths > room))
        if wrong.any():
            request = int(wrong.argmax())
            raise ValueError(
                f"request {request} has seq_len {self.lengths[request]}, outside {query_lens[request]} (its queries) "
                f"to {room} (the positions of its row of block_table)"
            )
        self._check_pages(query_lens)

    def _check_pages(self, query_lens: np.ndarray) -> None:
        pages = self.key_cache.shape[0]
        if self.table.size == 0 or (self.table.min() >= 0 and self.table.max() < pages):
            return
        # Only the pages that are read count: the rest of a row may be padding, or freed behind a sliding window.
        oldest = self.lengths - query_lens
        first = 0 if self.sliding_window is None else np.maximum(0, oldest - self.sliding_window + 1) // self.page_size
        column = np.arange(self.table.shape[1])
        needed = (query_lens > 0) & (column[:, None] >= first) & (column[:, None] < -(-self.lengths // self.page_size))
        outside = needed.T & ((self.table < 0) | (self.table >= pages))
        if outside.any():
            request, place = (int(axis[0]) for axis in outside.nonzero())
            raise ValueError(
                f"block_table[{request}, {place}] is {self.table[request, place]}, but the cache has {pages} pages"
            )
