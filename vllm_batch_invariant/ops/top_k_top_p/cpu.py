"""top-k and top-p on the CPU, in numba: candidates near the largest are sorted, more of them if these do not do."""

import numpy as np
import torch
from numba import njit, prange

from ..common.numba_exact_math import mass
from ..common.numba_math import exp32, order_key, value_of
from ..common.numba_rows import RowKernel
from .reduction import TopKTopPReduction

_REDUCTION = TopKTopPReduction.of_device("cpu")
_MINUS_INFINITY = np.float32(-np.inf).view(np.int32)
_ONE = np.int64(1) << _REDUCTION.unit_bits
_SCALE = np.float32(_ONE)
_FIRST_DEPTH = np.float32(4.0)
"""How far below the largest logit candidates are looked for first; then twice as far, and so on."""
_DEEPEST = np.float32(64.0)
"""Below that all are candidates."""
_WEIGHTLESS = np.float32(_REDUCTION.weightless)


@njit(inline="always")
def _weight(key, largest, exact):
    difference = value_of(key) - value_of(largest)
    if exact:
        return mass(difference)
    weight = np.int64(exp32(difference) * _SCALE) if difference > _WEIGHTLESS else np.int64(0)
    return _ONE if key == largest else weight


@njit(inline="always")
def _wanted(p, total):
    return min(max(np.int64(np.ceil(np.float64(p) * np.float64(total))), np.int64(1)), total)


def _filter_kernel(rows, ks, ps, exact):
    for row in prange(rows.shape[0]):
        bits = rows[row]
        k = ks[row] if 0 < ks[row] < bits.size else 0
        p = ps[row]
        if k == 0 and not p < 1:
            continue
        largest = order_key(bits[0])
        for i in range(1, bits.size):
            largest = max(largest, order_key(bits[i]))
        total = np.int64(0)
        if k == 0:
            for i in range(bits.size):
                total += _weight(order_key(bits[i]), largest, exact)
        candidates = np.empty(bits.size, np.int64)
        depth, held, enough = _FIRST_DEPTH, 0, False
        while not enough and held < bits.size:
            lowest = value_of(largest) - depth
            held, weight = 0, np.int64(0)
            for i in range(bits.size):
                key = order_key(bits[i])
                if not value_of(key) < lowest:
                    candidates[held] = (np.int64(~key) << 32) | i
                    held += 1
                    weight += _weight(key, largest, exact) if k == 0 else np.int64(0)
            enough = held >= k if k > 0 else weight >= _wanted(p, total)
            depth = depth * np.float32(2.0) if depth < _DEEPEST else np.float32(np.inf)
        first = candidates[:held]
        first.sort()
        kept = k if k > 0 else held
        if p < 1:
            if k > 0:
                for i in range(k):
                    total += _weight(np.int32(~(first[i] >> 32)), largest, exact)
            wanted, weight, kept = _wanted(p, total), np.int64(0), 0
            while weight < wanted:
                weight += _weight(np.int32(~(first[kept] >> 32)), largest, exact)
                kept += 1
        last = first[kept - 1]
        for i in range(bits.size):
            if (np.int64(~order_key(bits[i])) << 32) | i > last:
                bits[i] = _MINUS_INFINITY


_filter = RowKernel(_filter_kernel)


def top_k_top_p(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, exact: bool = False
) -> torch.Tensor:
    """See the operation's package; ``exact``: weigh by :mod:`..exact.definition`."""
    count, length = logits.shape
    k = torch.full((count,), length) if k is None else k
    p = torch.ones(count) if p is None else p
    rows = logits.to(torch.float32).contiguous()
    ks, ps = k.to(torch.int64).contiguous(), p.to(torch.float32).contiguous()
    _filter(rows.numel(), rows.view(torch.int32), ks, ps, exact)
    return logits if rows is logits else logits.copy_(rows)
