"""top-k and top-p on a GPU, in Triton: where the cut is, is found among candidates near the largest logit.

    weight = floor(exp(x - max(x)) * 2**40); of the first k, the fewest first ones stay that have p of their weight

Blocks of a row leave their maxima; then the number and the weight of what is at most so far below the row's; then what
is close enough to hold the cut goes into a list. One program a row searches that list (or the row, if the list would be
long) for the last candidate that stays, and blocks again set the rest to -inf. Counts and weights are integers: none of
this can move the cut.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.launch import launch
from ..common.triton_exact_math import mass
from ..common.triton_rows import order_key, value_of
from .reduction import TopKTopPReduction

_BLOCK = 4096
_NUM_WARPS = 8
LONGEST_LIST = 8192
_REDUCTION = TopKTopPReduction.of_device("cuda")
_ONE = tl.constexpr(1 << _REDUCTION.unit_bits)
_SCALE = tl.constexpr(float(1 << _REDUCTION.unit_bits))
_WEIGHTLESS = tl.constexpr(_REDUCTION.weightless)
_DEPTHS = tl.constexpr((1.0, 2.0, 4.0, 6.0, 8.0, 11.0, 14.0))
"""How far below the largest logit a list may reach; or it has the whole row."""
_LEVELS = tl.constexpr(8)
_SMALLEST = tl.constexpr(-(1 << 31))
_LARGEST = tl.constexpr((1 << 31) - 1)


@dataclass(frozen=True)
class FilterSchedule:
    """How a row is shared out among programs.

    Attributes:
        block: logits of a program.
        num_warps: its warps.
        num_blocks: programs of a row.
        padded_blocks: the power of two that holds what each of them leaves.
        longest_list: candidates of a row that are put into a list.
    """

    block: int
    num_warps: int
    num_blocks: int
    padded_blocks: int
    longest_list: int


def schedule_for(length: int) -> FilterSchedule:
    """The schedule for rows of ``length`` logits."""
    num_blocks = triton.cdiv(length, _BLOCK)
    return FilterSchedule(_BLOCK, _NUM_WARPS, num_blocks, triton.next_power_of_2(num_blocks), LONGEST_LIST)


@triton.jit
def _weight(keys, largest, EXACT: tl.constexpr):
    """Weights, in units, of logits with those keys in a row whose largest has the key ``largest``; ``EXACT``: those of
    exact arithmetic.
    """
    difference = value_of(keys) - value_of(largest)
    if EXACT:
        weight = mass(difference)
    else:
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
def _block_of_row(logits_ptr, stride_row, row, block_id, length, BLOCK: tl.constexpr):
    """Offsets of a block, which of them are inside the row, and the keys of its logits: [BLOCK] each."""
    offs = block_id * BLOCK + tl.arange(0, BLOCK)
    mask = offs < length
    logits = tl.load(logits_ptr + row * stride_row + offs, mask=mask, other=0.0)
    return offs, mask, order_key(logits.to(tl.float32))


@triton.jit
def _row_max(max_keys_ptr, row, num_blocks, PADDED_BLOCKS: tl.constexpr):
    block_ids = tl.arange(0, PADDED_BLOCKS)
    return tl.max(tl.load(max_keys_ptr + row * num_blocks + block_ids, mask=block_ids < num_blocks, other=_SMALLEST))


@triton.jit
def _max_kernel(logits_ptr, stride_row, ks_ptr, ps_ptr, max_keys_ptr, length, num_blocks, BLOCK: tl.constexpr):
    row, block_id = (tl.program_id(0) // num_blocks).to(tl.int64), tl.program_id(0) % num_blocks
    _k, _p, filters = _asked(ks_ptr, ps_ptr, row, length)
    if filters:
        _offs, mask, keys = _block_of_row(logits_ptr, stride_row, row, block_id, length, BLOCK)
        tl.store(max_keys_ptr + row * num_blocks + block_id, tl.max(tl.where(mask, keys, _SMALLEST)))


@triton.jit
def _weigh_kernel(
    logits_ptr, stride_row, ks_ptr, ps_ptr, max_keys_ptr, counts_ptr, weights_ptr, length, num_blocks,
    EXACT: tl.constexpr, PADDED_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count and weigh what a block has down to each depth, and all of it."""
    row, block_id = (tl.program_id(0) // num_blocks).to(tl.int64), tl.program_id(0) % num_blocks
    _k, _p, filters = _asked(ks_ptr, ps_ptr, row, length)
    if filters:
        _offs, mask, keys = _block_of_row(logits_ptr, stride_row, row, block_id, length, BLOCK)
        largest = _row_max(max_keys_ptr, row, num_blocks, PADDED_BLOCKS)
        weights = tl.where(mask, _weight(keys, largest, EXACT), 0)
        out = (row * num_blocks + block_id) * _LEVELS
        for level in tl.static_range(_LEVELS - 1):
            close = mask & (keys >= order_key(value_of(largest) - _DEPTHS[level]))
            tl.store(counts_ptr + out + level, tl.sum(close.to(tl.int32)))
            tl.store(weights_ptr + out + level, tl.sum(tl.where(close, weights, 0)))
        tl.store(counts_ptr + out + _LEVELS - 1, tl.sum(mask.to(tl.int32)))
        tl.store(weights_ptr + out + _LEVELS - 1, tl.sum(weights))


@triton.jit
def _level(counts_ptr, weights_ptr, row, block_id, num_blocks, k, p, PADDED_BLOCKS: tl.constexpr):
    """The first level that holds the cut, how many candidates it has in the row, how many of them in blocks before
    ``block_id``, and the weight of the row.
    """
    block_ids, levels = tl.arange(0, PADDED_BLOCKS)[:, None], tl.arange(0, _LEVELS)
    offs = (row * num_blocks + block_ids) * _LEVELS + levels[None, :]
    counts = tl.load(counts_ptr + offs, mask=block_ids < num_blocks, other=0)  # [PADDED_BLOCKS, _LEVELS]
    weights = tl.sum(tl.load(weights_ptr + offs, mask=block_ids < num_blocks, other=0), axis=0)
    held, before = tl.sum(counts, axis=0), tl.sum(tl.where(block_ids < block_id, counts, 0), axis=0)
    total = tl.sum(tl.where(levels == _LEVELS - 1, weights, 0))
    enough = tl.where(k > 0, held >= k, weights >= _wanted(p, total))
    level = tl.min(tl.where(enough, levels, _LEVELS - 1))
    chosen = levels == level
    return level, tl.sum(tl.where(chosen, held, 0)), tl.sum(tl.where(chosen, before, 0)), total


# This kernel and the next have more than 12 parameters: a pointer for each thing that the kernels before them leave.
@triton.jit
def _gather_kernel(
    logits_ptr, stride_row, ks_ptr, ps_ptr, max_keys_ptr, counts_ptr, weights_ptr, keys_ptr, ids_ptr, length,
    num_blocks, PADDED_BLOCKS: tl.constexpr, LONGEST_LIST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put what a block has of a row's candidates into the row's list."""
    row, block_id = (tl.program_id(0) // num_blocks).to(tl.int64), tl.program_id(0) % num_blocks
    k, p, filters = _asked(ks_ptr, ps_ptr, row, length)
    if filters:
        level, held, before, _total = _level(counts_ptr, weights_ptr, row, block_id, num_blocks, k, p, PADDED_BLOCKS)
        if held <= LONGEST_LIST:
            offs, mask, keys = _block_of_row(logits_ptr, stride_row, row, block_id, length, BLOCK)
            row_max = value_of(_row_max(max_keys_ptr, row, num_blocks, PADDED_BLOCKS))
            lowest = tl.cast(_SMALLEST, tl.int32)
            for shallow in tl.static_range(_LEVELS - 1):
                lowest = tl.where(level == shallow, order_key(row_max - _DEPTHS[shallow]), lowest)
            close = mask & (keys >= lowest)
            list_offs = row * LONGEST_LIST + before + tl.cumsum(close.to(tl.int32)) - 1
            tl.store(keys_ptr + list_offs, keys, mask=close)
            tl.store(ids_ptr + list_offs, offs, mask=close)


@triton.jit
def _candidates(logits_ptr, keys_ptr, ids_ptr, start, held, listed, BLOCK: tl.constexpr):
    """Keys and indices of some candidates, from the list or from the row, and which of them exist: [BLOCK] each."""
    offs = start + tl.arange(0, BLOCK)
    exists = offs < held
    if listed:
        keys, ids = tl.load(keys_ptr + offs, mask=exists, other=0), tl.load(ids_ptr + offs, mask=exists, other=0)
    else:
        keys, ids = order_key(tl.load(logits_ptr + offs, mask=exists, other=0.0).to(tl.float32)), offs
    return keys, ids, exists


@triton.jit
def _last_key(
    logits_ptr, keys_ptr, ids_ptr, held, listed, largest, wanted, WEIGH: tl.constexpr, EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key such that candidates with it or a larger one are ``wanted`` many, or weigh that much."""
    low, high = tl.cast(_SMALLEST, tl.int64), largest.to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        reached, above, below = tl.cast(0, tl.int64), tl.cast(_LARGEST, tl.int32), tl.cast(_SMALLEST, tl.int32)
        for start in range(0, held, BLOCK):
            keys, _ids, exists = _candidates(logits_ptr, keys_ptr, ids_ptr, start, held, listed, BLOCK)
            over = exists & (keys >= middle)
            measure = _weight(keys, largest, EXACT) if WEIGH else tl.full((BLOCK,), 1, tl.int64)
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
def _above(logits_ptr, keys_ptr, ids_ptr, held, listed, largest, last, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    """How many candidates have a larger key than ``last``, what they weigh, and how many have that key."""
    count, weight, equal = tl.cast(0, tl.int64), tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    for start in range(0, held, BLOCK):
        keys, _ids, exists = _candidates(logits_ptr, keys_ptr, ids_ptr, start, held, listed, BLOCK)
        over = exists & (keys > last)
        count += tl.sum(over.to(tl.int64))
        weight += tl.sum(tl.where(over, _weight(keys, largest, EXACT), 0))
        equal += tl.sum((exists & (keys == last)).to(tl.int64))
    return count, weight, equal


@triton.jit
def _cut_kernel(
    logits_ptr, stride_row, ks_ptr, ps_ptr, max_keys_ptr, counts_ptr, weights_ptr, keys_ptr, ids_ptr, last_keys_ptr,
    last_ids_ptr, length, num_blocks, EXACT: tl.constexpr, PADDED_BLOCKS: tl.constexpr, LONGEST_LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the last candidate of a row that stays."""
    row = tl.program_id(0).to(tl.int64)
    k, p, filters = _asked(ks_ptr, ps_ptr, row, length)
    if filters:
        _level_id, held, _before, total = _level(counts_ptr, weights_ptr, row, 0, num_blocks, k, p, PADDED_BLOCKS)
        largest = _row_max(max_keys_ptr, row, num_blocks, PADDED_BLOCKS)
        listed = held <= LONGEST_LIST
        held = tl.where(listed, held, length)
        logits_ptr += row * stride_row
        keys_ptr += row * LONGEST_LIST
        ids_ptr += row * LONGEST_LIST
        last, staying, equal = tl.cast(0, tl.int32), tl.cast(0, tl.int64), tl.cast(0, tl.int64)
        if k > 0:
            last = _last_key(logits_ptr, keys_ptr, ids_ptr, held, listed, largest, k, False, EXACT, BLOCK)
            count, weight, equal = _above(logits_ptr, keys_ptr, ids_ptr, held, listed, largest, last, EXACT, BLOCK)
            staying = k - count
            total = weight + staying * _weight(last, largest, EXACT)
        if p < 1.0:
            wanted = _wanted(p, total)
            last = _last_key(logits_ptr, keys_ptr, ids_ptr, held, listed, largest, wanted, True, EXACT, BLOCK)
            count, weight, equal = _above(logits_ptr, keys_ptr, ids_ptr, held, listed, largest, last, EXACT, BLOCK)
            staying = tl.cdiv(wanted - weight, _weight(last, largest, EXACT))
        # Of the candidates with the last key, the first ones stay.
        before, after = tl.cast(-1, tl.int32), length - 1
        if staying < equal:
            while after - before > 1:
                middle = before + (after - before) // 2
                found = tl.cast(0, tl.int64)
                for start in range(0, held, BLOCK):
                    keys, ids, exists = _candidates(logits_ptr, keys_ptr, ids_ptr, start, held, listed, BLOCK)
                    found += tl.sum((exists & (keys == last) & (ids <= middle)).to(tl.int64))
                if found >= staying:
                    after = middle
                else:
                    before = middle
        tl.store(last_keys_ptr + row, last)
        tl.store(last_ids_ptr + row, after)


@triton.jit
def _mask_kernel(
    logits_ptr, stride_row, ks_ptr, ps_ptr, last_keys_ptr, last_ids_ptr, length, num_blocks, BLOCK: tl.constexpr
):  # fmt: skip
    row, block_id = (tl.program_id(0) // num_blocks).to(tl.int64), tl.program_id(0) % num_blocks
    _k, _p, filters = _asked(ks_ptr, ps_ptr, row, length)
    if filters:
        offs, mask, keys = _block_of_row(logits_ptr, stride_row, row, block_id, length, BLOCK)
        last, last_id = tl.load(last_keys_ptr + row), tl.load(last_ids_ptr + row)
        masked = mask & ((keys < last) | ((keys == last) & (offs > last_id)))
        tl.store(logits_ptr + row * stride_row + offs, -float("inf"), mask=masked)


def top_k_top_p(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, exact: bool = False
) -> torch.Tensor:
    """See the operation's package; ``exact``: candidates weigh what they weigh in exact arithmetic."""
    rows, length = logits.shape
    device = logits.device
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    k = torch.full((rows,), length, dtype=torch.int32, device=device) if k is None else k.to(torch.int32).contiguous()
    p = torch.ones(rows, device=device) if p is None else p.to(torch.float32).contiguous()
    schedule = schedule_for(length)
    num_blocks, longest_list = schedule.num_blocks, schedule.longest_list
    numbers = {"dtype": torch.int32, "device": device}
    max_keys = torch.empty(rows, num_blocks, **numbers)
    counts = torch.empty(rows, num_blocks, _LEVELS.value, **numbers)
    weights = torch.empty_like(counts, dtype=_REDUCTION.accumulate)
    keys, ids = torch.empty(2, rows, longest_list, **numbers)
    last_keys, last_ids = torch.empty(rows, **numbers), torch.empty(rows, **numbers)
    row, sizes = (logits, logits.stride(0), k, p), (length, num_blocks)
    padded, listed = {"PADDED_BLOCKS": schedule.padded_blocks}, {"LONGEST_LIST": longest_list}
    every_block = (rows * num_blocks,)
    tile = {"BLOCK": schedule.block, "num_warps": schedule.num_warps}
    launch(_max_kernel, every_block, (*row, max_keys, *sizes), on=logits, **tile)
    launch(
        _weigh_kernel, every_block, (*row, max_keys, counts, weights, *sizes), on=logits, EXACT=exact, **padded, **tile
    )
    found = (*row, max_keys, counts, weights, keys, ids)
    launch(_gather_kernel, every_block, (*found, *sizes), on=logits, **padded, **listed, **tile)
    launch(_cut_kernel, rows, (*found, last_keys, last_ids, *sizes), on=logits, EXACT=exact, **padded, **listed, **tile)
    launch(_mask_kernel, every_block, (*row, last_keys, last_ids, *sizes), on=logits, **tile)
    return logits
