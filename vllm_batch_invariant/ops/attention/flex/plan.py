"""The block masks of a step for FlexAttention on a GPU, written on the GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ....errors import NotCovered
from ...common.launch import launch
from ..params import PagedAttention
from ..reduction import AttentionReduction
from ..shapes import AttentionShape
from .kernels import FLEX_BLOCK_SIZE, FLEX_ITEM_SIZE, list_blocks, list_items

_LARGEST_HEAD = 256
_ALIGNMENT = 16
OnHost = tuple[np.ndarray, np.ndarray]
"""query_start_loc and seq_lens."""


@dataclass(frozen=True)
class FlexTile:
    """How FlexAttention's kernel is compiled: all but the stages is the reduction's."""

    block_m: int
    """Query rows."""
    block_n: int
    """Keys."""
    num_warps: int
    num_stages: int


def tile_of(shape: AttentionShape) -> FlexTile:
    """The tile of every step: one of 16 rows is faster for decode, but gives rows other bits than one of 64.

    A reduction that names no block has that of :meth:`AttentionReduction.of_device`.
    """
    named = shape.reduction if shape.reduction.block_m else AttentionReduction.of_device("cuda", "flex")
    if shape.dtype == torch.float32:
        return FlexTile(named.block_m // 4, shape.key_tile, 2 * named.num_warps, num_stages=1)
    return FlexTile(named.block_m, shape.key_tile, named.num_warps, num_stages=3 if shape.head_size <= 128 else 2)


@dataclass(frozen=True)
class KeyLayout:
    """Where pages lie: all keys of all heads are one axis, in steps of the distance between two slots.

    Attributes:
        page_size: slots of a page.
        page_stride: slots from one page to the next: more than a page where other heads lie between them.
        num_pages: of the cache.
    """

    page_size: int
    page_stride: int
    num_pages: int

    @classmethod
    def of(cls, cache: torch.Tensor, block_n: int) -> "KeyLayout":
        """The layout of a cache [pages, kv_heads, page_size, head_size], read in tiles of ``block_n`` keys.

        Raises:
            NotCovered: pages that hold no whole tiles, or a cache that cannot be read as one axis.
        """
        num_pages, _, page_size, _ = cache.shape
        stride_page, _, stride_slot, stride_dim = cache.stride()
        if page_size % block_n:
            raise NotCovered(
                f"FlexAttention over pages of {page_size} keys on a GPU",
                f"its kernel takes {block_n} keys at once, from one page",
                f"pass a --block-size that is a multiple of {block_n}, or leave VLLM_BATCH_INVARIANT_ATTENTION out",
            )
        if stride_dim != 1 or stride_slot == 0 or stride_page % (stride_slot * block_n):
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
        if num_pages * stride_page > torch.iinfo(torch.int32).max:
            raise NotCovered(
                f"FlexAttention over a layer's cache of {num_pages * stride_page} elements",
                "its kernel counts them in 32 bits",
                "lower --gpu-memory-utilization, or leave VLLM_BATCH_INVARIANT_ATTENTION out",
            )
        return cls(page_size, stride_page // stride_slot, num_pages)


@dataclass(frozen=True)
class Masks:
    """What FlexAttention and the kernels around it read, for layers of one sliding window."""

    blocks: torch.Tensor
    """[blocks, FLEX_BLOCK_SIZE] int32"""
    item_indptr: torch.Tensor
    """[blocks] int32, the first item of each"""
    items: torch.Tensor
    """[items, FLEX_ITEM_SIZE] int32"""
    kv_num_blocks: torch.Tensor
    """[items] int32, tiles of keys of each"""
    kv_indices: torch.Tensor
    """[items, max_tiles] int32, physical tiles"""
    q_pos: torch.Tensor
    """[items * block_m] int32, positions of the query rows; -1 where there is none"""
    head_in_group: torch.Tensor
    """[items * block_m] int32, the query head of each row among those of its KV head"""

    @classmethod
    def zeros(cls, blocks: int, items: int, tile: FlexTile, max_tiles: int, device: torch.device) -> "Masks":
        sizes = (blocks, FLEX_BLOCK_SIZE.value), (blocks,), (items, FLEX_ITEM_SIZE.value), (items,), (items, max_tiles)
        rows = (items * tile.block_m,), (items * tile.block_m,)
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in (*sizes, *rows)))

    def first(self, blocks: int, items: int, tile: FlexTile) -> "Masks":
        """The memory of the first blocks and items."""
        rows = items * tile.block_m
        return Masks(
            self.blocks[:blocks], self.item_indptr[:blocks], self.items[:items], self.kv_num_blocks[:items],
            self.kv_indices[:items], self.q_pos[:rows], self.head_in_group[:rows],
        )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """One step's work, on the GPU: what every layer of the step does."""

    planner: "Planner"
    tile: FlexTile
    masks: Mapping[int | None, Masks]
    """By sliding window."""
    max_rows: int
    """Rows of the largest block."""


class Planner:
    """Plans steps. Those of decode are written to memory that stays, so that its addresses can be part of a CUDA graph:
    a plan of decode replaces the last.

    Args:
        shape: of the layers.
        layout: of their caches.
        device: the GPU.
        max_requests: in a step of decode.
        max_len: keys of a request at most.
        windows: sliding windows of the layers.
        max_keys: of all requests of a step together, if they share no pages.

    Raises:
        NotCovered: a head size above 256.
        ValueError: splits that are no whole tiles of keys.
    """

    def __init__(
        self,
        shape: AttentionShape,
        layout: KeyLayout,
        device: torch.device,
        max_requests: int,
        max_len: int,
        windows: Sequence[int | None] = (None,),
        max_keys: int | None = None,
    ) -> None:
        if shape.head_size > _LARGEST_HEAD:
            raise NotCovered(
                f"attention heads of size {shape.head_size}",
                f"the kernel has sizes up to {_LARGEST_HEAD}",
                "serve another model",
            )
        self.shape, self.layout, self.device = shape, layout, device
        self.max_len, self.max_keys, self.windows = max_len, max_keys, tuple(dict.fromkeys(windows))
        self.tile = tile_of(shape)
        sizes = [size for _, size, _ in shape.reduction.split_segments]
        if any(size % self.tile.block_n for size in sizes):
            raise ValueError(f"splits must be multiples of {self.tile.block_n} keys, got {shape.reduction}")
        self.max_tiles = max(sizes) // self.tile.block_n
        tiles = layout.num_pages * layout.page_stride // self.tile.block_n
        self.first_keys = torch.zeros(tiles, dtype=torch.int32, device=device)
        """[tiles of the cache] int32, the position of the first key of each that a plan lists."""
        rows = 2, shape.kv_heads, self.tile.block_m
        self.running = [torch.empty(size, device=device) for size in (rows, rows, (*rows, shape.padded_head_size))]
        """Running results of a block of rows, twice: read from one, written to the other."""
        self._masks = {window: self._empty(self.tile, window, max_requests) for window in self.windows}

    @cached_property
    def _blocks_per_token(self) -> int:
        return -(-self.shape.queries_per_kv // self.tile.block_m)

    def _empty(self, tile: FlexTile, window: int | None, requests: int) -> Masks:
        blocks = requests * self._blocks_per_token
        items = self._decode_items(requests, window)
        return Masks.zeros(max(blocks, 1), items, tile, self.max_tiles, self.device)

    def _decode_items(self, requests: int, window: int | None) -> int:
        """No step of decode with so many requests has more, however long they are."""
        reduction = self.shape.reduction
        most = requests * min(_splits_of_a_window(reduction, window, 1), reduction.split_of(self.max_len - 1) + 1)
        if self.max_keys is not None:
            # Those of the last size, and all before them.
            early = reduction.split_segments[-1][2]
            most = min(most, requests * (1 + early) + self.max_keys // reduction.split_size)
        return _round_up_even(most * self._blocks_per_token)

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
                blocks, items = requests * self._blocks_per_token, self._decode_items(requests, window)
                masks[window] = self._masks[window].first(blocks, items, tile)
            else:
                blocks, items = _count(*on_host, self.shape, tile, window)
                masks[window] = Masks.zeros(blocks, items, tile, self.max_tiles, self.device)
            if blocks:
                self._write(masks[window], query_start_loc, seq_lens, block_table, tile, window)
        rows = self.shape.queries_per_kv if decode else tile.block_m
        return Plan(self, tile, masks, min(rows, tile.block_m))

    def _write(
        self,
        masks: Masks,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        tile: FlexTile,
        window: int | None,
    ) -> None:
        reduction, blocks = self.shape.reduction, len(masks.blocks)
        common: dict[str, Any] = {
            "QUERIES_PER_KV": self.shape.queries_per_kv,
            "BLOCK_M": tile.block_m,
            "SPLIT_SEGMENTS": reduction.split_segments,
            "WINDOW": window or 0,
        }
        launch(
            list_blocks,
            len(seq_lens),
            (query_start_loc, seq_lens, masks.blocks, len(seq_lens), blocks),
            on=seq_lens,
            **common,
        )
        launch(
            list_items,
            blocks,
            (
                block_table,
                masks.blocks,
                masks.item_indptr,
                masks.items,
                masks.kv_num_blocks,
                masks.kv_indices,
                masks.q_pos,
                masks.head_in_group,
                self.first_keys,
                blocks,
                len(masks.kv_num_blocks),
                self.layout.page_size // tile.block_n,
                self.layout.page_stride // tile.block_n,
                len(self.first_keys),
                block_table.stride(0),
            ),
            on=seq_lens,
            **common,
            BLOCK_N=tile.block_n,
            MAX_TILES=self.max_tiles,
        )


def plan_alone(params: PagedAttention) -> Plan:
    """A plan for one call, with memory of its own.

    Raises:
        ValueError: requests have a page in common, but at different places.
    """
    device = params.query.device
    shape, cache = AttentionShape.of(params), params.cache
    layout = KeyLayout.of(cache.keys, tile_of(shape).block_n)
    _check_shared_pages(params)
    windows = (params.spec.sliding_window,)
    planner = Planner(shape, layout, device, len(params.seq_lens), int(params.lengths.max()), windows)
    starts, lengths, table = (t.to(device) for t in (params.query_start_loc, params.seq_lens, cache.block_table))
    decode = int(np.diff(params.starts).max()) <= 1
    return planner.plan(starts, lengths, table.contiguous(), decode, (params.starts, params.lengths))


def _check_shared_pages(params: PagedAttention) -> None:
    """A page has one column in every request, as in a prefix cache: the mask finds a key's position by its page."""
    table, page_size = params.cache.table, params.cache.page_size
    columns = np.broadcast_to(np.arange(table.shape[1]), table.shape)
    oldest = params.lengths - np.diff(params.starts)
    rows = zip(oldest.tolist(), params.starts.tolist(), strict=False)
    first = np.array([params.first_key(position, row) for position, row in rows]) // page_size
    needed = (np.diff(params.starts) > 0)[:, None] & (columns >= first[:, None])
    needed &= columns < -(-params.lengths // page_size)[:, None]
    pairs = np.unique(np.stack([table[needed], columns[needed]]), axis=1)
    pages, counts = np.unique(pairs[0], return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"page {pages[counts > 1][0]} is at several places of block_table, FlexAttention allows one")


def _round_up_even(count: int) -> int:
    """At least 2, and even: PyTorch compiles sizes of 1 apart."""
    return max(count + count % 2, 2)


def _splits_of_a_window(reduction: AttentionReduction, window: int | None, tokens: int) -> int:
    """No run of so many tokens sees keys of more splits."""
    if window is None:
        return torch.iinfo(torch.int32).max
    return (window + tokens) // reduction.smallest + 2


def _split_of(positions: np.ndarray, reduction: AttentionReduction) -> np.ndarray:
    """``AttentionReduction.split_of`` of many."""
    splits = np.zeros_like(positions)
    for start, size, first in reduction.split_segments:
        splits = np.where(positions < start, splits, first + (positions - start) // size)
    return splits


def _count(
    starts: np.ndarray, lengths: np.ndarray, shape: AttentionShape, tile: FlexTile, window: int | None
) -> tuple[int, int]:
    """Blocks and items of a step."""
    query_lens = np.diff(starts).astype(np.int64)
    rows = query_lens * shape.queries_per_kv
    counts = -(-rows // tile.block_m)
    request = np.repeat(np.arange(len(query_lens)), counts)
    first_row = (np.arange(len(request)) - np.repeat(counts.cumsum() - counts, counts)) * tile.block_m
    context_len = lengths.astype(np.int64)[request] - query_lens[request]
    last = context_len + (np.minimum(first_row + tile.block_m, rows[request]) - 1) // shape.queries_per_kv
    first = (
        np.zeros_like(last)
        if window is None
        else np.maximum(context_len + first_row // shape.queries_per_kv - window + 1, 0)
    )
    splits = _split_of(last, shape.reduction) - _split_of(first, shape.reduction) + 1
    return len(request), _round_up_even(int(splits.sum()))
