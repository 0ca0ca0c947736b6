"""The lists of work of paged attention on a GPU, made there once a step: who computes which splits of which rows.

Decode-like requests are laid in one line of tiles of keys, head after head and key after key. Every CTA gets a share of
the line of the same length, moved to the nearest end of a split or of a head: a share is contiguous, so a head is
shared by neighbours, and all of them end at about the same time.

Prefill-like requests are blocks of rows. Many blocks are computed whole, those with the most keys first; if there are
few, such as a chunk behind a long context has, the splits of each are cut into parts of about the same length. Keys
behind a sliding window are nobody's work. Nothing here can move a bit.
"""

import triton
import triton.language as tl

from ..common.triton_names import aggregate, value
from .splits import split_of, start_of
from .work import WORK_SIZE, store_work

_REQUESTS_AT_ONCE = tl.constexpr(1024)
"""Requests that a CTA looks at in a step."""
_ITEMS_AT_ONCE = tl.constexpr(256)
"""Items of its request that a CTA writes in a step."""
_HEAD_COST = tl.constexpr(2)
"""What it takes to begin a head, and to share one, in tiles of keys."""


@aggregate
class Config:
    """What the plan is compiled for: the layers, the key tile of the reduction, and the rows of the schedules."""

    NUM_KV_HEADS: tl.constexpr
    PADDED_KV_HEADS: tl.constexpr
    QUERIES_PER_KV: tl.constexpr
    KEY_TILE: tl.constexpr
    DECODE_ROWS: tl.constexpr
    BLOCK_M: tl.constexpr
    WINDOW: tl.constexpr  # 0: none


@aggregate
class Request:
    """One request, or several, side by side."""

    idx: value
    blocks: tl.tensor  # of rows
    splits: tl.tensor  # up to its last key, 0 where nothing is to do
    kv_len: tl.tensor
    query_start: tl.tensor
    query_len: tl.tensor
    context_len: tl.tensor


@aggregate
class Line:
    """The tiles of keys of all decode-like heads, one after the other."""

    kv_tiles: tl.tensor  # int64, of all heads
    begin: tl.tensor  # int64, where the heads of the request begin
    cta_shares: tl.tensor  # equal shares that it is cut into


@triton.jit
def _first_key(context_len, config):
    """The first key that a token sees behind so many."""
    first = context_len * 0
    if config.WINDOW:
        first = tl.maximum(context_len - config.WINDOW + 1, 0)
    return first


@triton.jit
def _shape_of_work(
    query_start_loc_ptr, seq_lens_ptr, idx, exists, config, SPLIT_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Of requests: whether each is decode-like, its blocks of rows, its splits, its keys, the parts that each of its
    blocks can be cut into, and the first key that it sees.
    """
    query_start = tl.load(query_start_loc_ptr + idx, mask=exists, other=0)
    rows = (tl.load(query_start_loc_ptr + idx + 1, mask=exists, other=0) - query_start).to(
        tl.int32
    ) * config.QUERIES_PER_KV
    kv_len = tl.load(seq_lens_ptr + idx, mask=exists, other=0).to(tl.int32)
    works = (rows > 0) & (kv_len > 0)
    decode_like = works & (rows <= config.DECODE_ROWS)
    blocks = tl.where(decode_like, 1, tl.cdiv(rows, config.BLOCK_M))
    splits = split_of(kv_len - 1, SPLIT_SEGMENTS) + 1
    # Every part of every block is as long as a split, so that there is the end of one in it.
    shortest = (
        kv_len
        - rows // config.QUERIES_PER_KV
        + tl.minimum(config.BLOCK_M // config.QUERIES_PER_KV, rows // config.QUERIES_PER_KV)
    )
    if config.WINDOW:
        shortest = tl.minimum(shortest, config.WINDOW)
    longest_split = start_of(splits, SPLIT_SEGMENTS) - start_of(splits - 1, SPLIT_SEGMENTS)
    max_parts = tl.maximum(shortest // longest_split, 1)
    first_key = _first_key(kv_len - rows // config.QUERIES_PER_KV, config)
    return decode_like, blocks, tl.where(works, splits, 0), kv_len, max_parts, first_key


@triton.jit
def _parts_of_blocks(blocks, splits, workspace, ctas, NUM_KV_HEADS: tl.constexpr):
    """Parts of a prefill-like block: as many as keep ``ctas`` CTAs busy, or 1 without room for partial results."""
    parts = tl.maximum(ctas // tl.maximum(blocks * NUM_KV_HEADS, 1), 1)
    return tl.where(splits <= workspace, parts, 1)


@triton.jit
def _first_share(place, line):
    """The first share of the line that begins at a place of it or later."""
    return tl.cdiv(place * line.cta_shares, line.kv_tiles).to(tl.int32)


@triton.jit
def _first_of(request, config, SPLIT_SEGMENTS: tl.constexpr):
    """The first tile that a decode-like request sees, and the split that it is in."""
    first_key = _first_key(request.context_len, config)
    return first_key // config.KEY_TILE, split_of(first_key, SPLIT_SEGMENTS)


@triton.jit
def _cut(share, line, head_tiles, request, may_cut, config, SPLIT_SEGMENTS: tl.constexpr):
    """The split of its head that a share begins with; ``request.splits`` for what follows the head, which is
    ``head_tiles`` long on the line.
    """
    KEY_TILE: tl.constexpr = config.KEY_TILE
    first_tile, first_split = _first_of(request, config, SPLIT_SEGMENTS)
    tiles = tl.cdiv(request.kv_len, KEY_TILE)
    tile = (share.to(tl.int64) * line.kv_tiles // line.cta_shares - line.begin) % head_tiles
    tile = first_tile + tl.maximum(tile - _HEAD_COST, 0).to(tl.int32)
    split = split_of(tile * KEY_TILE, SPLIT_SEGMENTS)
    before = tile - tl.maximum(start_of(split, SPLIT_SEGMENTS) // KEY_TILE, first_tile)
    after = tl.minimum(start_of(split + 1, SPLIT_SEGMENTS) // KEY_TILE, tiles) - tile
    nearest = tl.where(before < after, split, split + 1)
    # A head that is cut is more work, so its ends are nearer than they seem.
    reach = tl.minimum(before, after) + _HEAD_COST
    of_head = tile - first_tile
    nearest = tl.where(tiles - tile <= reach, request.splits, nearest)
    nearest = tl.where((of_head <= reach) & (of_head <= tiles - tile), first_split, nearest)
    return tl.where(may_cut, nearest, tl.where(of_head < tiles - tile, first_split, request.splits))


@triton.jit
def _store_items(item_ptrs, request, row_or_head, first_split, num_splits, workspace_idx, mask):
    store_work(
        item_ptrs, request.idx, row_or_head, first_split, num_splits, workspace_idx, request.query_start,
        request.query_len, request.context_len, mask,
    )  # fmt: skip


@triton.jit
def _store_decode_work(
    work_ptr, work_indptr, request, line, first_item, workspace_idx, may_cut, config, SPLIT_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """The items of a request on the line, the first of them number ``first_item`` but for those that begin shares."""
    splits = request.splits
    first_tile, first_split = _first_of(request, config, SPLIT_SEGMENTS)
    head_tiles = (tl.cdiv(request.kv_len, config.KEY_TILE) - first_tile).to(tl.int64) + _HEAD_COST
    # The item that begins with a head belongs to the share before the first one that begins in it.
    head = tl.arange(0, config.PADDED_KV_HEADS)
    before = _first_share(line.begin + head * head_tiles, line)
    of_first = _cut(before, line, head_tiles, request, may_cut, config, SPLIT_SEGMENTS)
    of_first = tl.where(before < _first_share(line.begin + (head + 1) * head_tiles, line), of_first, splits)
    _store_items(
        work_ptr + (first_item + head + before).to(tl.int64) * WORK_SIZE, request, head, head * 0 + first_split,
        of_first - first_split, tl.where(of_first < splits, workspace_idx, -1), head < config.NUM_KV_HEADS,
    )  # fmt: skip

    end_share = _first_share(line.begin + config.NUM_KV_HEADS * head_tiles, line)
    for first in range(_first_share(line.begin, line), end_share, _ITEMS_AT_ONCE):
        share = first + tl.arange(0, _ITEMS_AT_ONCE)
        mask = share < end_share
        of_head = ((share.to(tl.int64) * line.kv_tiles // line.cta_shares - line.begin) // head_tiles).to(tl.int32)
        begin = _cut(share, line, head_tiles, request, may_cut, config, SPLIT_SEGMENTS)
        end = _cut(share + 1, line, head_tiles, request, may_cut, config, SPLIT_SEGMENTS)
        end = tl.where(share + 1 < _first_share(line.begin + (of_head + 1) * head_tiles, line), end, splits)
        item = first_item + of_head + share + 1
        _store_items(
            work_ptr + item.to(tl.int64) * WORK_SIZE, request, of_head, begin, end - begin,
            tl.where(end - begin < splits - first_split, workspace_idx, -1), mask,
        )  # fmt: skip
        tl.store(work_indptr + share, item, mask=mask)


@triton.jit
def _blocks_beyond(tiles, requests, config):
    """How many blocks of prefill-like requests have more than so many tiles of keys."""
    last_token = tl.maximum(tiles * config.KEY_TILE - requests.context_len, 0)
    first_block = tl.maximum(tl.cdiv(last_token * config.QUERIES_PER_KV + 1, config.BLOCK_M) - 1, 0)
    return tl.where(last_token < requests.query_len, tl.maximum(requests.blocks - first_block, 0), 0)


@triton.jit
def _keys_of_block(block, request, config):
    """Keys that some row of a block sees."""
    last_row = block * config.BLOCK_M + config.BLOCK_M - 1
    return request.context_len + tl.minimum(last_row // config.QUERIES_PER_KV, request.query_len - 1) + 1


@triton.jit
def _store_ranked(work_ptr, request, requests, config):
    """The items of a request's blocks, each block whole, at their places among those of all ``requests`` by falling
    numbers of keys, so that CTAs that take turns end together.
    """
    for number in range(request.blocks):
        block = request.blocks - 1 - number
        tiles = tl.cdiv(_keys_of_block(block, request, config), config.KEY_TILE)
        more = _blocks_beyond(tiles, requests, config)
        as_many = _blocks_beyond(tiles - 1, requests, config) - more
        before = tl.where(requests.idx < request.idx, as_many, 0)
        own_more = tl.sum(tl.where(requests.idx == request.idx, more, 0))
        rank = tl.sum(more) + tl.sum(before) + number - own_more
        zero = tl.arange(0, 1)
        item_ptrs = work_ptr + rank.to(tl.int64) * WORK_SIZE + zero
        _store_items(item_ptrs, request, block * config.BLOCK_M, zero, request.splits, -1, zero == 0)


@triton.jit
def _first_of_part(part, parts, first_key, keys, splits, SPLIT_SEGMENTS: tl.constexpr):
    """The split that a part of a block begins with: the nearest to an equal share of the block's keys, which end at
    ``keys``.
    """
    key = first_key + ((keys - first_key).to(tl.int64) * part // parts).to(tl.int32)
    split = split_of(key, SPLIT_SEGMENTS)
    nearer = key - start_of(split, SPLIT_SEGMENTS) < start_of(split + 1, SPLIT_SEGMENTS) - key
    return tl.where(part < parts, tl.where(nearer | (part == 0), split, split + 1), splits)


@triton.jit
def _store_parts(work_ptr, request, parts, workspace_idx, config, SPLIT_SEGMENTS: tl.constexpr):
    """The items of a request's blocks, each block in parts."""
    for first in range(0, request.blocks * parts, _ITEMS_AT_ONCE):
        number = first + tl.arange(0, _ITEMS_AT_ONCE)
        block = request.blocks - 1 - number // parts
        part = number % parts
        keys = _keys_of_block(block, request, config)
        first_key = _first_key(request.context_len + block * config.BLOCK_M // config.QUERIES_PER_KV, config)
        begin = _first_of_part(part, parts, first_key, keys, request.splits, SPLIT_SEGMENTS)
        end = _first_of_part(part + 1, parts, first_key, keys, request.splits, SPLIT_SEGMENTS)
        own_idx = tl.where(parts > 1, workspace_idx + block * request.splits, -1)
        mask = number < request.blocks * parts
        row = block * config.BLOCK_M
        _store_items(work_ptr + number * WORK_SIZE, request, row, begin, end - begin, own_idx, mask)


@triton.jit
def _clear(semaphores_ptr, semaphores):
    """Zero this CTA's share of the semaphores. Attention leaves them 0, but memory that a sleeping engine gave away
    comes back with anything in it.
    """
    AT_ONCE: tl.constexpr = _REQUESTS_AT_ONCE
    for first in range(tl.program_id(0) * AT_ONCE, semaphores, tl.num_programs(0) * AT_ONCE):
        idx = first + tl.arange(0, AT_ONCE)
        tl.store(semaphores_ptr + idx, idx * 0, mask=idx < semaphores)


@triton.jit(
    do_not_specialize=[
        "requests", "semaphores", "decode_workspace", "prefill_workspace", "cta_shares", "prefill_ctas",
    ]
)  # fmt: skip
def plan_kernel(
    query_start_loc_ptr,
    seq_lens_ptr,
    work_indptr,
    decode_work_ptr,
    prefill_count_ptr,
    prefill_work_ptr,
    semaphores_ptr,
    requests,
    semaphores,
    decode_workspace,
    prefill_workspace,
    cta_shares,
    prefill_ctas,
    NUM_KV_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    QUERIES_PER_KV: tl.constexpr,
    SPLIT_SEGMENTS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    DECODE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Writes the items of one request, of ``DECODE_ROWS`` rows or of more. Every CTA adds up what comes before it, so
    that one launch suffices.

    Args:
        work_indptr: [cta_shares + 1], the first item of ``decode_work_ptr`` of each CTA, and the end.
        prefill_count_ptr: [1], items of ``prefill_work_ptr``.
        semaphores_ptr: [semaphores] of finished splits, which the step's attention finds at 0.
        decode_workspace, prefill_workspace: room for partial results of decode-like and of prefill-like requests.
        cta_shares: CTAs that work on decode-like requests at the same time.
        prefill_ctas: CTAs that work on prefill-like blocks at the same time, each for one KV head.
        WINDOW: keys that a token sees, its own among them; 0: all.
    """
    config = Config(NUM_KV_HEADS, PADDED_KV_HEADS, QUERIES_PER_KV, KEY_TILE, DECODE_ROWS, BLOCK_M, WINDOW)
    request_idx = tl.program_id(0)
    lanes = tl.arange(0, _REQUESTS_AT_ONCE)
    _clear(semaphores_ptr, semaphores)
    nothing = tl.zeros((_REQUESTS_AT_ONCE,), tl.int32)
    decode_splits, prefill_splits, decode_splits_before, prefill_splits_before = nothing, nothing, nothing, nothing
    kv_tiles, kv_tiles_before, decode_before = nothing.to(tl.int64), nothing.to(tl.int64), nothing
    decode_count, prefill_blocks = nothing, nothing
    for first in range(0, requests, _REQUESTS_AT_ONCE):
        idx = first + lanes
        decode_like, blocks, splits, kv_len, _, first_key = _shape_of_work(
            query_start_loc_ptr, seq_lens_ptr, idx, idx < requests, config, SPLIT_SEGMENTS
        )
        before = idx < request_idx
        of_decode = tl.where(decode_like, splits, 0)
        of_prefill = tl.where(decode_like, 0, blocks * splits)
        on_line = tl.where(decode_like, tl.cdiv(kv_len, KEY_TILE) - first_key // KEY_TILE + _HEAD_COST, 0)
        decode_splits += of_decode
        prefill_splits += of_prefill
        prefill_blocks += tl.where(decode_like | (splits == 0), 0, blocks)
        decode_splits_before += tl.where(before, of_decode, 0)
        prefill_splits_before += tl.where(before, of_prefill, 0)
        kv_tiles += on_line
        kv_tiles_before += tl.where(before, on_line, 0)
        decode_count += decode_like.to(tl.int32)
        decode_before += tl.where(before, decode_like.to(tl.int32), 0)
    parts = _parts_of_blocks(
        tl.sum(prefill_blocks), tl.sum(prefill_splits), prefill_workspace, prefill_ctas, NUM_KV_HEADS
    )

    items, items_before = nothing, nothing
    for first in range(0, requests, _REQUESTS_AT_ONCE):
        idx = first + lanes
        decode_like, blocks, splits, kv_len, max_parts, _ = _shape_of_work(
            query_start_loc_ptr, seq_lens_ptr, idx, idx < requests, config, SPLIT_SEGMENTS
        )
        of_prefill = tl.where(decode_like | (splits == 0), 0, blocks * tl.minimum(max_parts, parts))
        items += of_prefill
        items_before += tl.where(idx < request_idx, of_prefill, 0)
    all_decode = tl.sum(decode_count)
    if request_idx == 0:
        tl.store(prefill_count_ptr, tl.sum(items))
        tl.store(work_indptr + cta_shares, all_decode * NUM_KV_HEADS + tl.where(all_decode == 0, 0, cta_shares))
        if all_decode == 0:
            for first in range(0, cta_shares, _ITEMS_AT_ONCE):
                share = first + tl.arange(0, _ITEMS_AT_ONCE)
                tl.store(work_indptr + share, share * 0, mask=share < cta_shares)

    decode_like, blocks, splits, kv_len, max_parts, _own_first_key = _shape_of_work(
        query_start_loc_ptr, seq_lens_ptr, request_idx, request_idx < requests, config, SPLIT_SEGMENTS
    )
    query_start = tl.load(query_start_loc_ptr + request_idx).to(tl.int32)
    query_len = tl.load(query_start_loc_ptr + request_idx + 1).to(tl.int32) - query_start
    if decode_like:
        request = Request(request_idx, blocks, splits, kv_len, query_start, query_len, kv_len - query_len)
        line = Line(tl.sum(kv_tiles) * NUM_KV_HEADS, tl.sum(kv_tiles_before) * NUM_KV_HEADS, cta_shares)
        _store_decode_work(
            decode_work_ptr, work_indptr, request, line, tl.sum(decode_before) * NUM_KV_HEADS,
            tl.sum(decode_splits_before), tl.sum(decode_splits) <= decode_workspace, config, SPLIT_SEGMENTS,
        )  # fmt: skip
    elif (parts == 1) & (requests <= _REQUESTS_AT_ONCE):
        starts = tl.load(query_start_loc_ptr + lanes, mask=lanes < requests, other=0)
        query_lens = (tl.load(query_start_loc_ptr + lanes + 1, mask=lanes < requests, other=0) - starts).to(tl.int32)
        are_decode, all_blocks, all_splits, kv_lens, _, _ = _shape_of_work(
            query_start_loc_ptr, seq_lens_ptr, lanes, lanes < requests, config, SPLIT_SEGMENTS
        )
        all_blocks = tl.where(are_decode | (all_splits == 0), 0, all_blocks)
        blocks = tl.where(splits > 0, blocks, 0)
        request = Request(request_idx, blocks, splits, kv_len, query_start, query_len, kv_len - query_len)
        all_requests = Request(lanes, all_blocks, all_splits, kv_lens, starts, query_lens, kv_lens - query_lens)
        _store_ranked(prefill_work_ptr, request, all_requests, config)
    else:
        first_ptr = prefill_work_ptr + tl.sum(items_before) * WORK_SIZE
        blocks = tl.where(splits > 0, blocks, 0)
        request = Request(request_idx, blocks, splits, kv_len, query_start, query_len, kv_len - query_len)
        own_parts = tl.minimum(max_parts, parts)
        _store_parts(first_ptr, request, own_parts, tl.sum(prefill_splits_before), config, SPLIT_SEGMENTS)
