"""The candidates of a row on the CPU, in numba: one walk over the row, which keeps the best so far."""

import numpy as np
import torch
from numba import prange

from ..common.numba_math import order_key
from ..common.numba_rows import RowKernel

LONGEST_LIST = 256
"""Candidates that are kept in order while the row is read; more are cheaper to find by sorting it."""
_BLOCK = 64
"""Values whose largest is looked at before each of them is."""


def _ranks_kernel(rows, chosen, ranks):
    for row in prange(rows.shape[0]):
        bits = rows[row]
        index = chosen[row]
        key = order_key(bits[index])
        before = 0
        for i in range(index):
            before += np.int64(order_key(bits[i]) >= key)
        for i in range(index + 1, bits.size):
            before += np.int64(order_key(bits[i]) > key)
        ranks[row] = before + 1


def _best_kernel(rows, top):
    for row in prange(rows.shape[0]):
        bits, ids = rows[row], top[row]
        keys = np.empty(ids.size, np.int32)
        held = 0
        for start in range(0, bits.size, _BLOCK):
            stop = min(start + _BLOCK, bits.size)
            if held == ids.size:
                largest = order_key(bits[start])
                for i in range(start + 1, stop):
                    largest = max(largest, order_key(bits[i]))
                if largest <= keys[held - 1]:
                    continue
            for i in range(start, stop):
                key = order_key(bits[i])
                if held == ids.size:
                    if key <= keys[held - 1]:  # of equal values the earlier one is in the list already
                        continue
                    rank = held - 1
                else:
                    rank = held
                    held += 1
                while rank > 0 and keys[rank - 1] < key:
                    keys[rank] = keys[rank - 1]
                    ids[rank] = ids[rank - 1]
                    rank -= 1
                keys[rank] = key
                ids[rank] = i


def _sorted_kernel(rows, top):
    for row in prange(rows.shape[0]):
        bits, ids = rows[row], top[row]
        both = np.empty(bits.size, np.int64)
        for i in range(bits.size):
            both[i] = (np.int64(~order_key(bits[i])) << 32) | i
        both.sort()
        for i in range(ids.size):
            ids[i] = both[i] & 0xFFFFFFFF


_ranks = RowKernel(_ranks_kernel)
_best = RowKernel(_best_kernel)
_sorted = RowKernel(_sorted_kernel)


def first(values: torch.Tensor) -> torch.Tensor:
    """See the operation's package."""
    rows = values.to(torch.float32).contiguous().view(torch.int32)
    top = torch.empty(len(rows), 1, dtype=torch.int64)
    if len(rows):
        _best(rows.numel(), rows, top)
    return top[:, 0]


def top_and_ranks(values: torch.Tensor, count: int, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    rows = values.to(torch.float32).contiguous().view(torch.int32)
    top = torch.empty(len(rows), count, dtype=torch.int64)
    ranks = torch.empty(len(rows), dtype=torch.int64)
    if len(rows):
        if chosen.min() < 0 or chosen.max() >= rows.shape[1]:
            raise IndexError(f"an index outside a row of {rows.shape[1]} values")
        _ranks(rows.numel(), rows, chosen.to(torch.int64).contiguous(), ranks)
        if count:
            (_best if count <= LONGEST_LIST else _sorted)(rows.numel(), rows, top)
    return top, ranks
