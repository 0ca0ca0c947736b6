"""The block masks of a step for FlexAttention on a GPU, written on the GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ....errors import NotCovered
from ..params import PagedAttention
from ..plan import AttentionShape
from ..reduction import AttentionReduction
from .kernels import BLOCK, ENTRY, list_blocks, list_entries

_LARGEST_HEAD = 256
_ALIGNMENT = 16
OnHost = tuple[np.ndarray, np.ndarray]
"""query_start_loc and seq_lens."""


@dataclass(frozen=True)
class Tile:
    """How FlexAttention's kernel is compiled: a part of the reduction."""

    rows: int
    keys: int
    warps: int
    stages: int


def tile_of(head_size: int, dtype: torch.dtype) -> Tile:
    """The tile of every step: one of 16 rows is faster for decode, but gives rows other bits than one of 64."""
    if dtype == torch.float32:
        return Tile(16, 32, warps=8, stages=1)
    return Tile(64, 64, warps=4, stages=3 if head_size <= 128 else 2)


@dataclass(frozen=True)
class KeyLayout:
    """Where pages lie: all keys of all heads are one axis, in steps of the distance between two slots.

    Attributes:
        page_size: slots of a page.
        page_stride: slots from one page to the next: more than a page where other heads lie between them.
        pages: of the cache.
    """

    page_size: int
    page_stride: int
    pages: int

    @classmethod
    def of(cls, cache: torch.Tensor, tile: int) -> "KeyLayout":
        """The layout of a cache [pages, kv_heads, page_size, head_size].

        Raises:
            NotCovered: pages that hold no whole tiles, or a cache that cannot be read as one axis.
        """
        pages, _, page_size, _ = cache.shape
        page, _, slot, dim = cache.stride()
        if page_size % tile:
            raise NotCovered(
                f"FlexAttention over pages of {page_size} keys on a GPU",
                f"its kernel takes {tile} keys at once, from one page",
                f"pass a --block-size that is a multiple of {tile}, or leave VLLM_BATCH_INVARIANT_ATTENTION out",
            )
        if dim != 1 or slot == 0 or page % (slot * tile):
            raise NotCovered(
                f"FlexAttention over a cache with strides {list(cache.stride())}",
                "its keys do not lie on one axis",
                "lay it out as [pages, page_size, kv_heads, head_size]",
            )
        if cache.data_ptr() % _ALIGNMENT or any(n * cache.element_size() % _ALIGNMENT for n in cache.stride()[:3]):
            raise NotCovered(
                f"FlexAttention over a cache at {cache.data_ptr():#x} with strides {list(cache.stride())}",
                f"its rows do not begin at multiples of {_ALIGNMENT} bytes",
                "use heads of a size that is a multiple of 16",
            )
        if pages * page > torch.iinfo(torch.int32).max:
            raise NotCovered(
                f"FlexAttention over a layer's cache of {pages * page} elements",
                "its kernel counts them in 32 bits",
                "lower --gpu-memory-utilization, or leave VLLM_BATCH_INVARIANT_ATTENTION out",
            )
        return cls(page_size, page // slot, pages)


@dataclass(frozen=True)
class Masks:
    """What FlexAttention and the kernels around it read, for layers of one sliding window."""

    blocks: torch.Tensor
    """[blocks, BLOCK] int32"""
    first_entries: torch.Tensor
    """[blocks] int32"""
    entries: torch.Tensor
    """[entries, ENTRY] int32"""
    key_blocks: torch.Tensor
    """[entries] int32, tiles of keys"""
    key_tiles: torch.Tensor
    """[entries, tiles of a split] int32"""
    positions: torch.Tensor
    """[entries * rows] int32, of the query rows"""
    members: torch.Tensor
    """[entries * rows] int32, heads in the group"""

    @classmethod
    def none(cls, blocks: int, entries: int, tile: Tile, most_tiles: int, device: torch.device) -> "Masks":
        sizes = (blocks, BLOCK), (blocks,), (entries, ENTRY), (entries,), (entries, most_tiles)
        rows = (entries * tile.rows,), (entries * tile.rows,)
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in (*sizes, *rows)))

    def start(self, blocks: int, entries: int, tile: Tile) -> "Masks":
        """The memory of the first blocks and entries."""
        rows = entries * tile.rows
        return Masks(
            self.blocks[:blocks], self.first_entries[:blocks], self.entries[:entries], self.key_blocks[:entries],
            self.key_tiles[:entries], self.positions[:rows], self.members[:rows],
        )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """One step's work, on the GPU: what every layer of the step does."""

    planner: "Planner"
    tile: Tile
    masks: Mapping[int | None, Masks]
    """By sliding window."""
    most_rows: int
    """Rows of the largest block."""


class Planner:
    """Plans steps. Those of decode are written to memory that stays, so that its addresses can be part of a CUDA graph:
    a plan of decode replaces the last.

    Args:
        shape: of the layers.
        layout: of their caches.
        device: the GPU.
        most_requests: in a step of decode.
        longest: keys of a request at most.
        windows: sliding windows of the layers.
        most_keys: of all requests of a step together, if they share no pages.

    Raises:
        NotCovered: a head size above 256.
        ValueError: splits that are no whole tiles of keys.
    """

    def __init__(
        self,
        shape: AttentionShape,
        layout: KeyLayout,
        device: torch.device,
        most_requests: int,
        longest: int,
        windows: Sequence[int | None] = (None,),
        most_keys: int | None = None,
    ) -> None:
        if shape.head_size > _LARGEST_HEAD:
            raise NotCovered(
                f"attention heads of size {shape.head_size}",
                f"the kernel has sizes up to {_LARGEST_HEAD}",
                "serve another model",
            )
        self.shape, self.layout, self.device = shape, layout, device
        self.longest, self.most_keys, self.windows = longest, most_keys, tuple(dict.fromkeys(windows))
        self.tile = tile_of(shape.head_size, shape.dtype)
        sizes = [size for _, size, _ in shape.reduction.split_segments]
        if any(size % self.tile.keys for size in sizes):
            raise ValueError(f"splits must be multiples of {self.tile.keys} keys, got {shape.reduction}")
        self.most_tiles = max(sizes) // self.tile.keys
        tiles = layout.pages * layout.page_stride // self.tile.keys
        self.first_keys = torch.zeros(tiles, dtype=torch.int32, device=device)
        """[tiles of the cache] int32, the position of the first key of each that a plan lists."""
        rows = 2, shape.kv_heads, self.tile.rows
        self.kept = [torch.empty(size, device=device) for size in (rows, rows, (*rows, shape.padded_head_size))]
        """Running results of a block of rows, twice: read from one, written to the other."""
        self._masks = {window: self._empty(self.tile, window, most_requests) for window in self.windows}

    @cached_property
    def _blocks_of_a_token(self) -> int:
        return -(-self.shape.queries_per_kv // self.tile.rows)

    def _empty(self, tile: Tile, window: int | None, requests: int) -> Masks:
        blocks = requests * self._blocks_of_a_token
        entries = self._entries_of_decode(requests, window)
        return Masks.none(max(blocks, 1), entries, tile, self.most_tiles, self.device)

    def _entries_of_decode(self, requests: int, window: int | None) -> int:
        """No step of decode with so many requests has more, however long they are."""
        reduction = self.shape.reduction
        most = requests * min(_splits_of_a_window(reduction, window, 1), reduction.split_of(self.longest - 1) + 1)
        if self.most_keys is not None:
            # Those of the last size, and all before them.
            early = reduction.split_segments[-1][2]
            most = min(most, requests * (1 + early) + self.most_keys // reduction.split_size)
        return _even(most * self._blocks_of_a_token)

    def plan(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        decode: bool,
        on_host: OnHost | None = None,
    ) -> Plan:
        """Plan a step; launches two kernels for each sliding window.

        Calls that were captured with the plan of a step of decode serve every other such step with as many requests.

        Args:
            query_start_loc: [requests + 1] on the GPU.
            seq_lens: [requests] on the GPU.
            block_table: [requests, pages] on the GPU.
            decode: no request has more than one token.
            on_host: a step that is not all decode needs them; without, they are read back.
        """
        requests = len(seq_lens)
        tile = self.tile
        if not decode and on_host is None:
            on_host = query_start_loc.cpu().numpy(), seq_lens.cpu().numpy()
        masks = {}
        for window in self.windows:
            if decode:
                blocks, entries = requests * self._blocks_of_a_token, self._entries_of_decode(requests, window)
                masks[window] = self._masks[window].start(blocks, entries, tile)
            else:
                blocks, entries = _count(*on_host, self.shape, tile, window)
                masks[window] = Masks.none(blocks, entries, tile, self.most_tiles, self.device)
            if blocks:
                self._write(masks[window], query_start_loc, seq_lens, block_table, tile, window)
        rows = self.shape.queries_per_kv if decode else tile.rows
        return Plan(self, tile, masks, min(rows, tile.rows))

    def _write(
        self,
        masks: Masks,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        tile: Tile,
        window: int | None,
    ) -> None:
        reduction, blocks = self.shape.reduction, len(masks.blocks)
        common: dict[str, Any] = {
            "group": self.shape.queries_per_kv,
            "block_rows": tile.rows,
            "levels": reduction.split_segments,
            "window": window or 0,
        }
        with torch.cuda.device(self.device):
            list_blocks[(len(seq_lens),)](query_start_loc, seq_lens, masks.blocks, len(seq_lens), blocks, **common)
            list_entries[(blocks,)](
                block_table,
                masks.blocks,
                masks.first_entries,
                masks.entries,
                masks.key_blocks,
                masks.key_tiles,
                masks.positions,
                masks.members,
                self.first_keys,
                blocks,
                len(masks.key_blocks),
                self.layout.page_size // tile.keys,
                self.layout.page_stride // tile.keys,
                len(self.first_keys),
                block_table.stride(0),
                **common,
                tile=tile.keys,
                most_tiles=self.most_tiles,
            )


def plan_alone(call: PagedAttention) -> Plan:
    """A plan for one call, with memory of its own.

    Raises:
        ValueError: requests have a page in common, but at different places.
    """
    device = call.query.device
    heads, head_size = call.query.shape[1:]
    shape = AttentionShape(heads, call.key_cache.shape[1], head_size, call.query.dtype, call.reduction)
    layout = KeyLayout.of(call.key_cache, tile_of(head_size, call.query.dtype).keys)
    _check_shared_pages(call)
    planner = Planner(shape, layout, device, len(call.seq_lens), int(call.lengths.max()), (call.sliding_window,))
    starts, lengths, table = (t.to(device) for t in (call.query_start_loc, call.seq_lens, call.block_table))
    decode = int(np.diff(call.starts).max()) <= 1
    return planner.plan(starts, lengths, table.contiguous(), decode, (call.starts, call.lengths))


def _check_shared_pages(call: PagedAttention) -> None:
    """A page has one place in every request, as in a prefix cache: the mask finds a key's position by its page."""
    places = np.broadcast_to(np.arange(call.table.shape[1]), call.table.shape)
    oldest = call.lengths - np.diff(call.starts)
    first = np.array([call.first_key(int(position)) for position in oldest]) // call.page_size
    needed = (np.diff(call.starts) > 0)[:, None] & (places >= first[:, None])
    needed &= places < -(-call.lengths // call.page_size)[:, None]
    pairs = np.unique(np.stack([call.table[needed], places[needed]]), axis=1)
    pages, counts = np.unique(pairs[0], return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"page {pages[counts > 1][0]} is at several places of block_table, FlexAttention allows one")


def _even(count: int) -> int:
    """At least 2, and even: PyTorch compiles sizes of 1 apart."""
    return max(count + count % 2, 2)


def _splits_of_a_window(reduction: AttentionReduction, window: int | None, tokens: int) -> int:
    """No run of so many tokens sees keys of more splits."""
    if window is None:
        return torch.iinfo(torch.int32).max
    return (window + tokens) // reduction.smallest + 2


def _split_of(positions: np.ndarray, reduction: AttentionReduction) -> np.ndarray:
    """``AttentionReduction.split_of`` of many."""
    numbers = np.zeros_like(positions)
    for start, size, first in reduction.split_segments:
        numbers = np.where(positions < start, numbers, first + (positions - start) // size)
    return numbers


def _count(
    starts: np.ndarray, lengths: np.ndarray, shape: AttentionShape, tile: Tile, window: int | None
) -> tuple[int, int]:
    """Blocks and entries of a step."""
    tokens = np.diff(starts).astype(np.int64)
    rows = tokens * shape.queries_per_kv
    counts = -(-rows // tile.rows)
    request = np.repeat(np.arange(len(tokens)), counts)
    first_row = (np.arange(len(request)) - np.repeat(counts.cumsum() - counts, counts)) * tile.rows
    past = lengths.astype(np.int64)[request] - tokens[request]
    last = past + (np.minimum(first_row + tile.rows, rows[request]) - 1) // shape.queries_per_kv
    first = (
        np.zeros_like(last) if window is None else np.maximum(past + first_row // shape.queries_per_kv - window + 1, 0)
    )
    splits = _split_of(last, shape.reduction) - _split_of(first, shape.reduction) + 1
    return len(request), _even(int(splits.sum()))
