"""The values that attention is called with: what a layer asks, where keys and values lie, and a batch of both."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ...errors import NotCovered
from ..common.kv_cache import E4M3, codes_of, of_tokens, scale_fits, scale_strides, scales_of
from .reduction import AttentionReduction

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of queries and results, and of keys and values that are not codes."""
NO_RANGE = (2**31 - 1, -1)
"""A range of no position: it begins behind each, and ends before each."""


@dataclass(frozen=True)
class Added:
    """What a field of a layer makes of plain causal attention."""

    words: str
    """With the field's value."""
    example: Callable[[int], Any]
    """A value for so many query heads, with which it is tested and compiled ahead."""


ADDED = {
    "sliding_window": Added("window {}", lambda _: 100),
    "logits_soft_cap": Added("soft-cap {:g}", lambda _: 30.0),
    "alibi_slopes": Added("ALiBi", lambda heads: torch.linspace(0.0, 0.5, heads)),
    "sinks": Added("sinks", lambda heads: torch.linspace(-2.0, 4.0, heads)),
    "causal": Added("keys of both directions", lambda _: False),
}
"""By the name of the field. An implementation says in ``SERVES`` which of them it has, and others are refused by it."""


def causal_options(heads: int) -> dict[str, Any]:
    """An example of each option of causal attention, for so many query heads."""
    return {name: one.example(heads) for name, one in ADDED.items() if name != "causal"}


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """What a layer's attention is, whatever the batch. Two are equal that ask the same, where of sinks, of which every
    layer has its own values, only counts that there are some. A query sees one interval of its sequence's keys.

    Attributes:
        scale: factor of the scores.
        sliding_window: a query at position p sees p - sliding_window + 1 to p; pages before that are never read.
        logits_soft_cap: scores become ``cap * tanh(score / cap)``.
        alibi_slopes: [query_heads], ``slope * (key position - query position)`` is added to the capped score.
        sinks: [query_heads], a score for each row's softmax that has no value: it is added to the row's sum of weights
            once, after all splits. Neither scaled nor capped.
        causal: whether a query sees no key after its position; else it sees all of its sequence, or with a window
            p - sliding_window + 1 to p + sliding_window - 1.

    Raises:
        ValueError: by the constructor: a number that does not fit.
    """

    scale: float
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    causal: bool = True

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"scale must be above 0, got {self.scale}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1 or None, got {self.sliding_window}")
        if self.logits_soft_cap is not None and not self.logits_soft_cap > 0:
            raise ValueError(f"logits_soft_cap must be above 0 or None, got {self.logits_soft_cap}")

    @cached_property
    def _asked(self) -> tuple[Any, ...]:
        values = {field.name: getattr(self, field.name) for field in fields(self)} | {"sinks": self.sinks is not None}
        return tuple(tuple(value.tolist()) if torch.is_tensor(value) else value for value in values.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttentionSpec) and self._asked == other._asked

    def __hash__(self) -> int:
        return hash(self._asked)

    @cached_property
    def added(self) -> tuple[str, ...]:
        """The fields by which it is more than plain causal attention."""
        return tuple(name for name, plain in _PLAIN.items() if getattr(self, name) is not plain)

    def check(self, serves: Collection[str], by: str) -> None:
        """Refuse what an implementation does not have.

        Args:
            serves: names of :data:`ADDED` that it has.
            by: its name.

        Raises:
            NotCovered: one that it has not.
        """
        if missing := [words for name, words in zip(self.added, self.words, strict=True) if name not in serves]:
            raise NotCovered(
                f"attention with {' and '.join(missing)} by '{by}'",
                "that implementation does not compute it",
                "serve a model without it, or choose another implementation",
            )

    @property
    def words(self) -> list[str]:
        """What these are."""
        return [ADDED[name].words.format(getattr(self, name)) for name in self.added]

    def to(self, device: torch.device) -> "AttentionSpec":
        """The same with slopes there; sinks are where a model has its parameters."""
        slopes = self.alibi_slopes
        if slopes is None or slopes.device == device:
            return self
        return replace(self, alibi_slopes=slopes.to(device))

    def __str__(self) -> str:
        return ", ".join(self.words) or "plain"


_PLAIN = {field.name: field.default for field in fields(AttentionSpec) if field.name != "scale"}


@dataclass(frozen=True)
class PagedCache:
    """Keys and values of all requests, in pages: numbers, or codes that a scale stands beside.

    Attributes:
        keys: [pages, kv_heads, page_size, head_size] fp32, bf16, fp16 or e4m3, any strides.
        values: as ``keys``; or the first columns of numbers in ``keys``, a view (:meth:`latent`).
        block_table: [requests, max_pages] int32 or int64, the physical pages of each request.
        stored: keys and values in a format of an implementation's own, as :class:`..exact.cuda.Cache`, where ``keys``
            and ``values`` only have the shape; None where they are what is read.
        k_scale: of codes, fp32 on their device, above 0: one number or [kv_heads], packed, one a head; or
            [pages, kv_heads, page_size], any strides, one a token and head. A key is ``code * k_scale``. None of
            numbers.
        v_scale: the same of values, with the same strides.
    """

    keys: torch.Tensor
    values: torch.Tensor
    block_table: torch.Tensor
    stored: Any = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @classmethod
    def latent(cls, keys: torch.Tensor, value_size: int, block_table: torch.Tensor) -> "PagedCache":
        """Of keys whose first ``value_size`` columns are the values, too, as multi-head latent attention has them."""
        return cls(keys, keys[..., :value_size], block_table)

    @property
    def value_size(self) -> int:
        return self.values.shape[3]

    @property
    def tail(self) -> int:
        """Columns of a key behind those that are its value; 0 where values are numbers of their own."""
        return self.keys.shape[3] - self.values.shape[3]

    @property
    def holds_codes(self) -> bool:
        """Whether keys and values are codes in e4m3."""
        return self.keys.dtype == E4M3

    @property
    def scales_of_tokens(self) -> bool:
        """Whether codes have a scale a token and head."""
        return of_tokens(self.k_scale)

    @property
    def num_pages(self) -> int:
        return self.keys.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    @cached_property
    def table(self) -> np.ndarray:
        """[requests, max_pages], on the host."""
        return self.block_table.cpu().numpy().astype(np.int32, copy=False)

    def coded(self, k_scale: float | list[float] = 1.0, v_scale: float | list[float] = 1.0) -> "PagedCache":
        """The same keys and values as codes with these scales, packed; for certificates and tests."""
        device, parts = self.keys.device, (self.keys, self.values)
        scales = [torch.tensor(scale, dtype=torch.float32, device=device) for scale in (k_scale, v_scale)]
        codes = [codes_of(one, of.view(-1, 1, 1)).contiguous() for one, of in zip(parts, scales, strict=True)]
        return replace(self, keys=codes[0], values=codes[1], k_scale=scales[0], v_scale=scales[1])

    def coded_by_tokens(self) -> "PagedCache":
        """The same as codes with a scale a token and head, packed; for certificates and tests."""
        parts = self.keys, self.values
        scales = [scales_of(one) for one in parts]
        codes = [codes_of(one, of[..., None]).contiguous() for one, of in zip(parts, scales, strict=True)]
        return replace(self, keys=codes[0], values=codes[1], k_scale=scales[0], v_scale=scales[1])

    def gather(self, request: int, positions: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value [kv_heads, len(positions), their size] of a request as they are stored, copied out of its
        pages.
        """
        place = np.arange(positions.start, positions.stop)
        pages = torch.from_numpy(self.table[request, place // self.page_size].astype(np.int64)).to(self.keys.device)
        slots = torch.from_numpy(place % self.page_size).to(self.keys.device)
        # PyTorch has no such indices of e4m3 on every device.
        bytes_or_numbers = [one.view(torch.uint8) if self.holds_codes else one for one in (self.keys, self.values)]
        key, value = (one[pages, :, slots].transpose(0, 1).view(self.keys.dtype) for one in bytes_or_numbers)
        return key, value

    def gather_scales(self, request: int, positions: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales of tokens' keys and values [kv_heads, len(positions)] of a request."""
        assert self.k_scale is not None
        assert self.v_scale is not None
        place = np.arange(positions.start, positions.stop)
        pages, slots = self.table[request, place // self.page_size], place % self.page_size
        keys, values = (scale[pages.tolist(), :, slots.tolist()].T for scale in (self.k_scale, self.v_scale))
        return keys, values


@dataclass(frozen=True)
class PackedKeys(PagedCache):
    """Keys and values that no cache holds: those of a step's own tokens, request after request as its queries lie.

    ``keys`` and ``values`` are [tokens, kv_heads, 1, head_size], any strides, and ``block_table`` [requests, 1] has the
    row of each request's first key, which the others follow.
    """

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, query_start_loc: torch.Tensor) -> "PackedKeys":
        """Of [tokens, kv_heads, head_size] and the [requests + 1] at which requests begin."""
        return cls(keys.unsqueeze(2), values.unsqueeze(2), query_start_loc[:-1, None])

    def gather(self, request: int, positions: range) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`PagedCache.gather`, views."""
        first = int(self.table[request, 0])
        rows = slice(first + positions.start, first + positions.stop)
        return self.keys[rows, :, 0].transpose(0, 1), self.values[rows, :, 0].transpose(0, 1)


@dataclass(frozen=True)
class PagedAttention:
    """The newest tokens of each request and what they see; to be checked before use.

    Attributes:
        query: [tokens, query_heads, head_size] of the cache's dtype, or fp32, bf16 or fp16 beside codes; head_size a
            multiple of 16. Requests lie one after the other.
        cache: with the keys and values of the new tokens.
        seq_lens: [requests] int32 or int64, keys of each request, its new tokens included.
        query_start_loc: [requests + 1] int32 or int64, ascending from 0: the rows of each request, its last positions.
            Empty ones are skipped.
        spec: of the layer.
        reduction: what decides the bits.
        ranges: [tokens, 2] int32 or None: the first and the last position of a range around each row, which it sees
            beside what ``spec`` has it see: that of its image, say. It is the same for every position in it, and a row
            without one has its own position twice, or :data:`NO_RANGE`. A range's tokens come in one call.
    """

    query: torch.Tensor
    cache: PagedCache
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    spec: AttentionSpec
    reduction: AttentionReduction
    ranges: torch.Tensor | None = None

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

    @cached_property
    def own_ranges(self) -> np.ndarray:
        """``ranges`` on the host; [0, 2] where there are none."""
        ranges = np.empty((0, 2), np.int32) if self.ranges is None else self.ranges.cpu().numpy()
        return np.ascontiguousarray(ranges, dtype=np.int64)

    def first_key(self, position: int, row: int) -> int:
        """The first position that a query at ``position`` sees, which is row ``row`` of the call."""
        window = self.spec.sliding_window
        first = 0 if window is None else max(0, position - window + 1)
        return first if self.ranges is None else min(first, int(self.own_ranges[row, 0]))

    def last_key(self, position: int, row: int, length: int) -> int:
        """The last position of so many keys that it sees."""
        if self.spec.causal:
            return position if self.ranges is None else max(position, int(self.own_ranges[row, 1]))
        window = self.spec.sliding_window
        return length - 1 if window is None else min(length - 1, position + window - 1)

    def requests(self) -> Iterator[tuple[int, slice, range]]:
        """(request, its rows, their positions) of each request that has a query."""
        for request, length in enumerate(self.lengths.tolist()):
            start, stop = self.starts[request : request + 2].tolist()
            if stop > start:
                yield request, slice(start, stop), range(length - (stop - start), length)

    def split_positions(self, split: int, rows: slice, query_positions: range) -> range:
        """The positions of a split that some of the queries see, a request's last ones."""
        start, stop = self.reduction.start_of(split), self.reduction.start_of(split + 1)
        last = self.last_key(query_positions[-1], rows.stop - 1, query_positions.stop)
        return range(max(start, self.first_key(query_positions[0], rows.start)), min(stop, last + 1))

    def equal_splits(self) -> int:
        """The size of the splits, for an implementation that takes one.

        Raises:
            ValueError: the reduction has more than one.
        """
        if self.reduction.early:
            raise ValueError(f"this implementation of attention takes splits of one size, got {self.reduction}")
        return self.reduction.split_size

    def check(self, values: bool = True) -> None:
        """Refuse arguments that do not fit, and pages that would be read outside the cache.

        Args:
            values: look at lengths and pages, too, which waits for the device.

        Raises:
            ValueError: one line that names the argument.
        """
        self._check_tensors()
        self._check_heads()
        if values:
            self._check_requests()

    def _check_tensors(self) -> None:
        query, key, value = self.query, self.cache.keys, self.cache.values
        if query.dim() != 3 or key.dim() != 4 or value.dim() != 4 or not self._sizes_fit():
            raise ValueError(
                "attention takes query [tokens, heads, head_size] and key and value caches "
                "[pages, kv_heads, page_size, head_size], or the first columns of keys in pages as values, "
                f"got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
            )
        if query.dtype not in DTYPES or key.dtype not in (query.dtype, E4M3) or value.dtype != key.dtype:
            raise ValueError(
                "query and caches must all be fp32, bf16 or fp16, or the caches e4m3, "
                f"got {query.dtype}, {key.dtype} and {value.dtype}"
            )
        self._check_scales()
        if query.shape[2] != key.shape[3] or query.shape[2] % 16 or query.shape[2] == 0:
            raise ValueError(
                "head_size must be a multiple of 16 and the same in query and cache, "
                f"got {query.shape[2]} and {key.shape[3]}"
            )
        if key.shape[1] == 0 or query.shape[1] % key.shape[1] or query.shape[1] == 0:
            raise ValueError(f"query heads must be a multiple of KV heads, got {query.shape[1]} and {key.shape[1]}")
        requests = self.seq_lens.shape[0] if self.seq_lens.dim() == 1 else -1
        table, starts = list(self.cache.block_table.shape), list(self.query_start_loc.shape)
        if len(table) != 2 or table[0] != requests or starts != [requests + 1]:
            raise ValueError(
                "attention takes seq_lens [requests], block_table [requests, max_pages] and query_start_loc "
                f"[requests + 1], got {list(self.seq_lens.shape)}, {table} and {starts}"
            )
        self._check_ranges()
        for name, given in (
            ("seq_lens", self.seq_lens),
            ("block_table", self.cache.block_table),
            ("query_start_loc", self.query_start_loc),
        ):
            if given.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"{name} must be int32 or int64, got {given.dtype}")

    def _sizes_fit(self) -> bool:
        """Whether values are as many as keys: numbers of their size, or the first columns of them."""
        key, value = self.cache.keys, self.cache.values
        if key.shape == value.shape:
            return True
        is_view = value.data_ptr() == key.data_ptr() and value.stride() == key.stride()
        are_numbers = not (self.cache.holds_codes or isinstance(self.cache, PackedKeys))
        is_part = key.shape[:3] == value.shape[:3] and 0 < value.shape[3] < key.shape[3] and value.shape[3] % 16 == 0
        return is_view and are_numbers and is_part

    @property
    def out_shape(self) -> torch.Size:
        """Of the result, [tokens, query_heads, the values' size]."""
        return torch.Size((*self.query.shape[:2], self.cache.value_size))

    def _check_ranges(self) -> None:
        if self.ranges is None:
            return
        if self.ranges.shape != (len(self.query), 2) or self.ranges.dtype != torch.int32 or not self.spec.causal:
            raise ValueError(
                f"ranges must be int32 [{len(self.query)}, 2], of causal attention, got {self.ranges.dtype} "
                f"{list(self.ranges.shape)}, causal {self.spec.causal}"
            )

    def _check_places_of_ranges(self) -> None:
        for request, rows, positions in self.requests():
            of_request, position = self.own_ranges[rows], np.arange(positions.start, positions.stop)
            fits = (of_request[:, 0] >= 0) & (of_request[:, 0] <= position)
            fits &= (position <= of_request[:, 1]) & (of_request[:, 1] < positions.stop)
            fits |= (of_request == NO_RANGE).all(1)
            if not fits.all():
                row = int((~fits).argmax())
                raise ValueError(
                    f"the range of position {position[row]} of request {request} is {of_request[row].tolist()}: it "
                    f"must hold that position and end before {positions.stop}"
                )

    def _check_scales(self) -> None:
        cache = self.cache
        shapes = f"one number or [{cache.kv_heads}], packed, or {list(cache.keys.shape[:3])}"
        wanted = f"fp32 on their device, {shapes}" if cache.holds_codes else "None"
        for name in ("k_scale", "v_scale"):
            scale = getattr(cache, name)
            fits = scale is not None and scale.device == cache.keys.device and scale_fits(scale, cache.keys)
            if fits if cache.holds_codes else scale is None:
                continue
            raise ValueError(f"{name} of keys and values in {cache.keys.dtype} must be {wanted}, got {scale}")
        if scale_strides(cache.k_scale) != scale_strides(cache.v_scale):
            raise ValueError("k_scale and v_scale must both be one number, one a head, or one a token of equal strides")

    def _check_heads(self) -> None:
        for name in ("alibi_slopes", "sinks"):
            given = getattr(self.spec, name)
            if given is not None and given.shape != self.query.shape[1:2]:
                raise ValueError(f"{name} must be [{self.query.shape[1]}], one a query head, got {list(given.shape)}")

    def _check_requests(self) -> None:
        query_lens = np.diff(self.starts)
        if self.starts[0] != 0 or self.tokens > self.query.shape[0] or (query_lens < 0).any():
            raise ValueError(
                f"query_start_loc must ascend from 0 to at most {self.query.shape[0]}, the rows of query, "
                f"got {self.starts.tolist()}"
            )
        if self.ranges is not None:
            self._check_places_of_ranges()
        if isinstance(self.cache, PackedKeys):
            self._check_packed(query_lens)
            return
        room = self.cache.table.shape[1] * self.cache.page_size
        wrong = (query_lens > 0) & ((self.lengths < query_lens) | (self.lengths > room))
        if wrong.any():
            request = int(wrong.argmax())
            raise ValueError(
                f"request {request} has seq_len {self.lengths[request]}, outside {query_lens[request]} (its queries) "
                f"to {room} (the positions of its row of block_table)"
            )
        self._check_pages(query_lens)

    def _check_packed(self, query_lens: np.ndarray) -> None:
        if (self.lengths != query_lens).any() or self.tokens > len(self.cache.keys):
            raise ValueError(
                f"keys without pages must be those of the queries, of {self.tokens} tokens in requests of "
                f"{query_lens.tolist()}, got {len(self.cache.keys)} in requests of {self.lengths.tolist()}"
            )
        if (self.cache.table[:, 0] != self.starts[:-1]).any():
            raise ValueError("keys without pages must begin where the queries of their request do")

    def _check_pages(self, query_lens: np.ndarray) -> None:
        table, pages, page_size = self.cache.table, self.cache.num_pages, self.cache.page_size
        if table.size == 0 or (table.min() >= 0 and table.max() < pages):
            return
        # Only the pages that are read count: the rest of a row may be padding, or freed behind a sliding window.
        oldest = self.lengths - query_lens
        window = self.spec.sliding_window
        first = 0 if window is None else np.maximum(0, oldest - window + 1) // page_size
        column = np.arange(table.shape[1])
        needed = (query_lens > 0) & (column[:, None] >= first) & (column[:, None] < -(-self.lengths // page_size))
        outside = needed.T & ((table < 0) | (table >= pages))
        if outside.any():
            request, place = (int(axis[0]) for axis in outside.nonzero())
            raise ValueError(
                f"block_table[{request}, {place}] is {table[request, place]}, but the cache has {pages} pages"
            )
