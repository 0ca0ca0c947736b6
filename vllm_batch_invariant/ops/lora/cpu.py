"""Adapters on the CPU: rows are grouped by adapter, and each adapter's rows go through the GEMMs of
``ops/linear/cpu.py``, where a row's bits do not depend on how many there are or in which order. No weight is copied for
a row.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from ..linear import cpu as linear
from .reduction import LoraReduction


def add_adapters(
    y: torch.Tensor,
    x: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    slots: torch.Tensor,
    reduction: LoraReduction,
) -> None:
    """See the operation's package."""
    for slot, rows in _by_slot(slots):
        own, start = x[rows], 0
        for a_i, b_i in zip(a, b, strict=True):
            columns = y[:, start : start + b_i.shape[2]]
            _expand(columns, rows, _shrink(own, a_i[slot, 0], reduction), b_i[slot, 0], reduction)
            start += b_i.shape[2]


def add_expanded(
    y: torch.Tensor, u: torch.Tensor, b: torch.Tensor, slots: torch.Tensor, reduction: LoraReduction
) -> None:
    """See the operation's package."""
    for slot, rows in _by_slot(slots):
        _expand(y, rows, u[rows], b[slot, 0], reduction)


def _by_slot(slots: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Each slot that rows have, and which those are."""
    for slot in slots.unique().tolist():
        if slot >= 0:
            yield slot, (slots == slot).nonzero()[:, 0]


def _shrink(x: torch.Tensor, a: torch.Tensor, reduction: LoraReduction) -> torch.Tensor:
    """u [rows, R] of the reduction's dtype, of rows [rows, K] and a [R, K]."""
    u: torch.Tensor | None = None
    for x_leaf, a_leaf in zip(x.split(reduction.k_leaf, 1), a.split(reduction.k_leaf, 1), strict=True):
        leaf = linear.accumulate(x_leaf, a_leaf.t())
        u = leaf if u is None else u + leaf
    assert u is not None
    return u.to(reduction.dtype)


def _expand(y: torch.Tensor, rows: torch.Tensor, u: torch.Tensor, b: torch.Tensor, reduction: LoraReduction) -> None:
    """Add what u [rows, R] and b [N, R] make to these rows of y [M, N]."""
    padding = -u.shape[1] % reduction.rank_step
    u, b = functional.pad(u, (0, padding)), functional.pad(b, (0, padding))
    delta = torch.zeros(len(u), len(b), dtype=reduction.accumulate)
    for u_step, b_step in zip(u.split(reduction.rank_step, 1), b.split(reduction.rank_step, 1), strict=True):
        delta += linear.accumulate(u_step, b_step.t())
    y[rows] = (y[rows].to(reduction.accumulate) + delta).to(y.dtype)
