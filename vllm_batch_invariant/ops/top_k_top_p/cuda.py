"""top-k and top-p on a GPU, in Triton: where the cut is, is found among candidates near the largest logit.

Blocks of a row leave their maxima; then the number and the weight of what is at most so far below the row's; then what
is close enough to hold the cut goes into a list. One program a row searches that list (or the row, if the list would be
long) for the last candidate that stays, and blocks again set the rest to -inf. Counts and weights are integers: none of
this can move the cut.
"""

import torch
import triton
import triton.language as tl

from ..common.triton_order import order_key, value_of
from ..common.triton_rows import on_device_of
from .reduction import REDUCTION

_BLOCK = 4096
LONGEST_LIST = 8192
"""Candidates of a row that are put into a list."""
_ONE = tl.constexpr(1 << REDUCTION.unit_bits)
_SCALE = tl.constexpr(float(1 << REDUCTION.unit_bits))
_WEIGHTLESS = tl.constexpr(REDUCTION.weightless)
_DEPTHS = tl.constexpr((1.0, 2.0, 4.0, 6.0, 8.0, 11.0, 14.0))
"""How far below the largest logit a list may reach; or it has the whole row."""
_LEVELS = tl.constexpr(8)
_SMALLEST = tl.constexpr(-(1 << 31))
_LARGEST = tl.constexpr((1 << 31) - 1)


@triton.jit
def _weight(keys, largest):
    """Weights, in units, of logits with those keys in a row whose largest has the key ``largest``."""
    difference = value_of(keys) - value_of(largest)
    weight = tl.where(difference > _WEIGHTLESS, tl.exp(difference) * _SCALE, 0.0).to(tl.int64)
    return tl.where(keys == largest, _ONE, weight)


@triton.jit
def _wanted(p, total):
    """The weight that the candidates that stay must have, of ``total``."""
    share = tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(share, 1), total)


@triton.jit
def _asked(ks_ptr, ps_ptr, row, length):
    """What a row asks for: k, 0 where it keeps all; p; and whether either takes candidates away."""
    k = tl.load(ks_ptr + row)
    k = tl.where((k > 0) & (k < length), k, 0)
    p = tl.load(ps_ptr + row)
    return k, p, (k > 0) | (p < 1.0)


@triton.jit
def _block_of_row(logits_ptr, stride, row, number, length, block: tl.constexpr):
    """Places of a block, which of them are inside the row, and the keys of its logits."""
    places = number * block + tl.arange(0, block)
    inside = places < length
    logits = tl.load(logits_ptr + row * stride + places, mask=inside, other=0.0)
    return places, inside, order_key(logits.to(tl.float32))


@triton.jit
def _largest_of_row(tops_ptr, row, blocks, parts: tl.constexpr):
    part = tl.arange(0, parts)
    return tl.max(tl.load(tops_ptr + row * blocks + part, mask=part < blocks, other=_SMALLEST))


@triton.jit
def _top_kernel(logits_ptr, stride, ks_ptr, ps_ptr, tops_ptr, length, blocks, block: tl.constexpr):
    row, number = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    _k, _p, filters = _asked(ks_ptr, ps_ptr, row, length)
    if filters:
        _places, inside, keys = _block_of_row(logits_ptr, stride, row, number, length, block)
        tl.store(tops_ptr + row * blocks + number, tl.max(tl.where(inside, keys, _SMALLEST)))


@triton.jit
def _weigh_kernel(
    logits_ptr, stride, ks_ptr, ps_ptr, tops_ptr, counts_ptr, weights_ptr, length, blocks, parts: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Count and weigh what a block has down to each depth, and all of it."""
    row, number = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    _k, _p, filters = _asked(ks_ptr, ps_ptr, row, length)
    if filters:
        _places, inside, keys = _block_of_row(logits_ptr, stride, row, number, length, block)
        largest = _largest_of_row(tops_ptr, row, blocks, parts)
        weights = tl.where(inside, _weight(keys, largest), 0)
        out = (row * blocks + number) * _LEVELS
        for level in tl.static_range(_LEVELS - 1):
            close = inside & (keys >= order_key(value_of(largest) - _DEPTHS[level]))
            tl.store(counts_ptr + out + level, tl.sum(close.to(tl.int32)))
            tl.store(weights_ptr + out + level, tl.sum(tl.where(close, weights, 0)))
        tl.store(counts_ptr + out + _LEVELS - 1, tl.sum(inside.to(tl.int32)))
        tl.store(weights_ptr + out + _LEVELS - 1, tl.sum(weights))


@triton.jit
def _level(counts_ptr, weights_ptr, row, number, blocks, k, p, parts: tl.constexpr):
    """The first level that holds the cut, how many candidates it has in the row, how many of them in blocks before
    ``number``, and the weight of the row.
    """
    part, levels = tl.arange(0, parts)[:, None], tl.arange(0, _LEVELS)
    places = (row * blocks + part) * _LEVELS + levels[None, :]
    counts = tl.load(counts_ptr + places, mask=part < blocks, other=0)
    weights = tl.sum(tl.load(weights_ptr + places, mask=part < blocks, other=0), axis=0)
    held, before = tl.sum(counts, axis=0), tl.sum(tl.where(part < number, counts, 0), axis=0)
    total = tl.sum(tl.where(levels == _LEVELS - 1, weights, 0))
    enough = tl.where(k > 0, held >= k, weights >= _wanted(p, total))
    level = tl.min(tl.where(enough, levels, _LEVELS - 1))
    chosen = levels == level
    return level, tl.sum(tl.where(chosen, held, 0)), tl.sum(tl.where(chosen, before, 0)), total


@triton.jit
def _gather_kernel(
    logits_ptr, stride, ks_ptr, ps_ptr, tops_ptr, counts_ptr, weights_ptr, keys_ptr, ids_ptr, length, blocks,
    parts: tl.constexpr, longest: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Put what a block has of a row's candidates into the row's list."""
    row, number = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    k, p, filters = _asked(ks_ptr, ps_ptr, row, length)
    if filters:
        level, held, before, _total = _level(counts_ptr, weights_ptr, row, number, blocks, k, p, parts)
        if held <= longest:
            places, inside, keys = _block_of_row(logits_ptr, stride, row, number, length, block)
            top = value_of(_largest_of_row(tops_ptr, row, blocks, parts))
            lowest = tl.cast(_SMALLEST, tl.int32)
            for shallow in tl.static_range(_LEVELS - 1):
                lowest = tl.where(level == shallow, order_key(top - _DEPTHS[shallow]), lowest)
            close = inside & (keys >= lowest)
            entry = row * longest + before + tl.cumsum(close.to(tl.int32)) - 1
            tl.store(keys_ptr + entry, keys, mask=close)
            tl.store(ids_ptr + entry, places, mask=close)


@triton.jit
def _candidates(logits_ptr, keys_ptr, ids_ptr, start, held, listed, block: tl.constexpr):
    """Keys and indices of some candidates, from the list or from the row, and which of them exist."""
    places = start + tl.arange(0, block)
    exists = places < held
    if listed:
        keys, ids = tl.load(keys_ptr + places, mask=exists, other=0), tl.load(ids_ptr + places, mask=exists, other=0)
    else:
        keys, ids = order_key(tl.load(logits_ptr + places, mask=exists, other=0.0).to(tl.float32)), places
    return keys, ids, exists


@triton.jit
def _last_key(
    logits_ptr, keys_ptr, ids_ptr, held, listed, largest, wanted, weigh: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """The largest key such that candidates with it or a larger one are ``wanted`` many, or weigh that much."""
    low, high = tl.cast(_SMALLEST, tl.int64), largest.to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        reached, above, below = tl.cast(0, tl.int64), tl.cast(_LARGEST, tl.int32), tl.cast(_SMALLEST, tl.int32)
        for start in range(0, held, block):
            keys, _ids, exists = _candidates(logits_ptr, keys_ptr, ids_ptr, start, held, listed, block)
            over = exists & (keys >= middle)
            measure = _weight(keys, largest) if weigh else tl.full((block,), 1, tl.int64)
            reached += tl.sum(tl.where(over, measure, 0))
            above = tl.minimum(above, tl.min(tl.where(over, keys, _LARGEST)))
            below = tl.maximum(below, tl.max(tl.where(exists & (keys < middle), keys, _SMALLEST)))
        # No candidate lies between these and the middle.
        if reached >= wanted:
            low = above.to(tl.int64)
        else:
            high = below.to(tl.int64) + 1
    return low.to(tl.int32)


@triton.jit
def _above(logits_ptr, keys_ptr, ids_ptr, held, listed, largest, last, block: tl.constexpr):
    """How many candidates have a larger key than ``last``, what they weigh, and how many have that key."""
    count, weight, equal = tl.cast(0, tl.int64), tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    for start in range(0, held, block):
        keys, _ids, exists = _candidates(logits_ptr, keys_ptr, ids_ptr, start, held, listed, block)
        over = exists & (keys > last)
        count += tl.sum(over.to(tl.int64))
        weight += tl.sum(tl.where(over, _weight(keys, largest), 0))
        equal += tl.sum((exists & (keys == last)).to(tl.int64))
    return count, weight, equal


@triton.jit
def _cut_kernel(
    logits_ptr, stride, ks_ptr, ps_ptr, tops_ptr, counts_ptr, weights_ptr, keys_ptr, ids_ptr, last_keys_ptr,
    last_ids_ptr, length, blocks, parts: tl.constexpr, longest: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Find the last candidate of a row that stays."""
    row = tl.program_id(0).to(tl.int64)
    k, p, filters = _asked(ks_ptr, ps_ptr, row, length)
    if filters:
        _number, held, _before, total = _level(counts_ptr, weights_ptr, row, 0, blocks, k, p, parts)
        largest = _largest_of_row(tops_ptr, row, blocks, parts)
        listed = held <= longest
        held = tl.where(listed, held, length)
        logits_ptr += row * stride
        keys_ptr += row * longest
        ids_ptr += row * longest
        last, staying, equal = tl.cast(0, tl.int32), tl.cast(0, tl.int64), tl.cast(0, tl.int64)
        if k > 0:
            last = _last_key(logits_ptr, keys_ptr, ids_ptr, held, listed, largest, k, False, block)
            count, weight, equal = _above(logits_ptr, keys_ptr, ids_ptr, held, listed, largest, last, block)
            staying = k - count
            total = weight + staying * _weight(last, largest)
        if p < 1.0:
            wanted = _wanted(p, total)
            last = _last_key(logits_ptr, keys_ptr, ids_ptr, held, listed, largest, wanted, True, block)
            count, weight, equal = _above(logits_ptr, keys_ptr, ids_ptr, held, listed, largest, last, block)
            staying = tl.cdiv(wanted - weight, _weight(last, largest))
        # Of the candidates with the last key, the first ones stay.
        before, after = tl.cast(-1, tl.int32), length - 1
        if staying < equal:
            while after - before > 1:
                middle = before + (after - before) // 2
                found = tl.cast(0, tl.int64)
                for start in range(0, held, block):
                    keys, ids, exists = _candidates(logits_ptr, keys_ptr, ids_ptr, start, held, listed, block)
                    found += tl.sum((exists & (keys == last) & (ids <= middle)).to(tl.int64))
                if found >= staying:
                    after = middle
                else:
                    before = middle
        tl.store(last_keys_ptr + row, last)
        tl.store(last_ids_ptr + row, after)


@triton.jit
def _mask_kernel(
    logits_ptr, stride, ks_ptr, ps_ptr, last_keys_ptr, last_ids_ptr, length, blocks, block: tl.constexpr
):  # fmt: skip
    row, number = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    _k, _p, filters = _asked(ks_ptr, ps_ptr, row, length)
    if filters:
        places, inside, keys = _block_of_row(logits_ptr, stride, row, number, length, block)
        last, last_id = tl.load(last_keys_ptr + row), tl.load(last_ids_ptr + row)
        goes = inside & ((keys < last) | ((keys == last) & (places > last_id)))
        tl.store(logits_ptr + row * stride + places, -float("inf"), mask=goes)


def top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """See the operation's package."""
    rows, length = logits.shape
    device = logits.device
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    k = torch.full((rows,), length, dtype=torch.int32, device=device) if k is None else k.to(torch.int32).contiguous()
    p = torch.ones(rows, device=device) if p is None else p.to(torch.float32).contiguous()
    blocks = triton.cdiv(length, _BLOCK)
    numbers = {"dtype": torch.int32, "device": device}
    tops = torch.empty(rows, blocks, **numbers)
    counts = torch.empty(rows, blocks, _LEVELS.value, **numbers)
    weights = torch.empty_like(counts, dtype=torch.int64)
    keys, ids = torch.empty(2, rows, LONGEST_LIST, **numbers)
    last_keys, last_ids = torch.empty(rows, **numbers), torch.empty(rows, **numbers)
    row, sizes = (logits, logits.stride(0), k, p), (length, blocks)
    parts, every_block = {"parts": triton.next_power_of_2(blocks)}, (rows * blocks,)
    fixed = {"block": _BLOCK, "num_warps": 8}
    with on_device_of(logits):
        _top_kernel[every_block](*row, tops, *sizes, **fixed)
        _weigh_kernel[every_block](*row, tops, counts, weights, *sizes, **parts, **fixed)
        found = (*row, tops, counts, weights, keys, ids)
        _gather_kernel[every_block](*found, *sizes, **parts, longest=LONGEST_LIST, **fixed)
        _cut_kernel[(rows,)](*found, last_keys, last_ids, *sizes, **parts, longest=LONGEST_LIST, **fixed)
        _mask_kernel[every_block](*row, last_keys, last_ids, *sizes, **fixed)
    return logits
