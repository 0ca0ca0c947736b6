"""The candidates of a row on a GPU: PyTorch finds the largest values, and what is equal to the last is chosen again.

torch.topk is right about values and free about which of equal ones it takes and in what order it lists them. So only
its values above the smallest count, and the rest are the first indices of the row that have the smallest one.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.launch import launch
from ..common.triton_rows import order_key

LONGEST_LIST = 1024
"""Candidates that one program holds; for more the whole row is sorted."""
_SMALLEST_PADDED_COUNT = 32
"""One code serves most numbers of candidates."""
_BLOCK = 4096
_BLOCK_OF_FIRST = 8192
_ROWS_SORTED_AT_ONCE = 64
"""A sort of a vocabulary takes some 20 bytes a value."""


@dataclass(frozen=True)
class RankingSchedule:
    """How a row is shared out among programs. Ranks are counted in integers, so there is no reduction beside it.

    Attributes:
        block: values of a program.
        num_blocks: programs of a row.
        padded_count: the power of two that holds the candidates, 0 where no program lists them.
    """

    block: int
    num_blocks: int
    padded_count: int


@dataclass(frozen=True)
class FirstSchedule:
    """The same where one index is wanted.

    Attributes:
        block: values of a program.
        num_blocks: programs of a row.
        padded_blocks: the power of two that holds what they find.
    """

    block: int
    num_blocks: int
    padded_blocks: int

    @classmethod
    def of(cls, length: int) -> "FirstSchedule":
        """The schedule for rows of ``length`` values."""
        num_blocks = triton.cdiv(length, _BLOCK_OF_FIRST)
        return cls(_BLOCK_OF_FIRST, num_blocks, triton.next_power_of_2(num_blocks))


def schedule_for(length: int, count: int) -> RankingSchedule:
    """The schedule for ``count`` candidates of rows of ``length`` values."""
    listed = 0 < count <= LONGEST_LIST
    padded_count = max(triton.next_power_of_2(count), _SMALLEST_PADDED_COUNT) if listed else 0
    return RankingSchedule(_BLOCK, triton.cdiv(length, _BLOCK), padded_count)


@triton.jit
def _smallest_key(best_ptr, row, count, PADDED_COUNT: tl.constexpr):
    """Keys of a row's largest values and which of them there are, [PADDED_COUNT] each, and the smallest key."""
    offs = tl.arange(0, PADDED_COUNT)
    held = offs < count
    keys = order_key(tl.load(best_ptr + row * count + offs, mask=held, other=0.0).to(tl.float32))
    return keys, held, tl.min(tl.where(held, keys, 0x7FFFFFFF))


@triton.jit(do_not_specialize=["count"])
def _count_kernel(
    values_ptr, stride_row, chosen_ptr, ranks_ptr, best_ptr, enough_ptr, length, count, num_blocks,
    PADDED_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count what is before the chosen index in a block of a row, and what is not below the smallest of the best."""
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    offs = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = offs < length
    keys = order_key(tl.load(values_ptr + row * stride_row + offs, mask=mask, other=0.0).to(tl.float32))
    chosen = tl.load(chosen_ptr + row)
    exists = (chosen >= 0) & (chosen < length)  # vLLM asks for places after a prompt's last token, too
    key = order_key(tl.load(values_ptr + row * stride_row + chosen, mask=exists, other=0.0).to(tl.float32))
    before = mask & ((keys > key) | ((keys == key) & (offs < chosen)))
    tl.atomic_add(ranks_ptr + row, tl.sum(before.to(tl.int64)))
    if PADDED_COUNT > 0:
        _keys, _held, smallest = _smallest_key(best_ptr, row, count, PADDED_COUNT)
        tl.atomic_add(enough_ptr + row, tl.sum((mask & (keys >= smallest)).to(tl.int32)))


@triton.jit(do_not_specialize=["count"])
def _settle_kernel(
    values_ptr, stride_row, best_ptr, ids_ptr, enough_ptr, out_ptr, length, count, PADDED_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each candidate of a row as a number that sorts: its key, falling, and its index."""
    row = tl.program_id(0).to(tl.int64)
    keys, held, smallest = _smallest_key(best_ptr, row, count, PADDED_COUNT)
    offs = tl.arange(0, PADDED_COUNT)
    ids = tl.load(ids_ptr + row * count + offs, mask=held, other=0)
    above = held & (keys > smallest)
    last = (~smallest).to(tl.int64) << 32
    if tl.load(enough_ptr + row) == count:  # no value is equal to the smallest one and not in the list
        tl.store(out_ptr + row * count + offs, ((~keys).to(tl.int64) << 32) | ids, mask=held)
    else:
        tl.store(
            out_ptr + row * count + tl.cumsum(above.to(tl.int32)) - 1, ((~keys).to(tl.int64) << 32) | ids, mask=above
        )
        taken = tl.sum(above.to(tl.int32))
        start = 0
        while taken < count:
            row_offs = start + tl.arange(0, BLOCK)  # [BLOCK]
            x = tl.load(values_ptr + row * stride_row + row_offs, mask=row_offs < length, other=0.0).to(tl.float32)
            equal = ((row_offs < length) & (order_key(x) == smallest)).to(tl.int32)
            found = tl.sum(equal)
            if found > 0:
                out_offs = taken + tl.cumsum(equal) - 1
                tl.store(
                    out_ptr + row * count + out_offs,
                    last | row_offs.to(tl.int64),
                    mask=(equal > 0) & (out_offs < count),
                )
                taken += found
            start += BLOCK


@triton.jit
def _first_of_block_kernel(values_ptr, stride_row, best_ptr, length, num_blocks, BLOCK: tl.constexpr):
    """Write the largest key of a block of a row, and how far from the end of int32 its first index is: together they
    grow as the order says.
    """
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    offs = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = offs < length
    keys = order_key(tl.load(values_ptr + row * stride_row + offs, mask=mask, other=float("-inf")).to(tl.float32))
    largest = tl.max(keys)
    index = tl.min(tl.where(mask & (keys == largest), offs, 0x7FFFFFFF))
    tl.store(best_ptr + tl.program_id(0), (largest.to(tl.int64) << 32) | (0x7FFFFFFF - index))


@triton.jit
def _first_of_row_kernel(best_ptr, out_ptr, num_blocks, PADDED_BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, PADDED_BLOCKS)
    best = tl.load(best_ptr + row * num_blocks + offs, mask=offs < num_blocks, other=-0x7FFFFFFFFFFFFFFF)
    tl.store(out_ptr + row, 0x7FFFFFFF - (tl.max(best) & 0xFFFFFFFF))


def first(values: torch.Tensor) -> torch.Tensor:
    """See the operation's package."""
    rows, length = values.shape
    if values.stride(1) != 1:
        values = values.contiguous()
    schedule = FirstSchedule.of(length)
    best = torch.empty(rows, schedule.num_blocks, dtype=torch.int64, device=values.device)
    out = torch.empty(rows, dtype=torch.int64, device=values.device)
    if rows:
        launch(
            _first_of_block_kernel,
            rows * schedule.num_blocks,
            (values, values.stride(0), best, length, schedule.num_blocks),
            on=values,
            BLOCK=schedule.block,
            num_warps=8,
        )
        launch(
            _first_of_row_kernel,
            rows,
            (best, out, schedule.num_blocks),
            on=values,
            PADDED_BLOCKS=schedule.padded_blocks,
            num_warps=1,
        )
    return out


def top_and_ranks(values: torch.Tensor, count: int, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    rows, length = values.shape
    if values.stride(1) != 1:
        values = values.contiguous()
    chosen = chosen.contiguous()
    ranks = torch.ones(rows, dtype=torch.int64, device=values.device)
    if not rows:
        return ranks.new_empty(0, count), ranks
    schedule = schedule_for(length, count)
    listed = schedule.padded_count > 0
    best, ids, enough = values, ranks, ranks
    if listed:
        best, ids = torch.topk(values, count)
        enough = torch.zeros(rows, dtype=torch.int32, device=values.device)
    tile = {"PADDED_COUNT": schedule.padded_count, "BLOCK": schedule.block}
    launch(
        _count_kernel,
        rows * schedule.num_blocks,
        (values, values.stride(0), chosen, ranks, best, enough, length, count, schedule.num_blocks),
        on=values,
        **tile,
    )
    if not listed:
        return (_sorted(values, count) if count else ranks.new_empty(rows, 0)), ranks
    out = torch.empty(rows, count, dtype=torch.int64, device=values.device)
    launch(_settle_kernel, rows, (values, values.stride(0), best, ids, enough, out, length, count), on=values, **tile)
    return torch.sort(out).values.bitwise_and_(0xFFFFFFFF), ranks


def _sorted(values: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` indices of each row by a stable sort; adding 0.0 makes one zero of two."""
    parts = [
        torch.sort(part + 0.0, descending=True, stable=True).indices[:, :count]
        for part in values.split(_ROWS_SORTED_AT_ONCE)
    ]
    return torch.cat(parts)
