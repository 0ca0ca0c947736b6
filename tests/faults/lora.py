"""What makes an adapter's bits follow the batch, or another adapter, planted in the operation on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from vllm_batch_invariant.ops.lora import cuda

MOST_ROWS = 16
"""Up to which the operation is right."""


def _leaves_reversed(expand: Callable[..., None]) -> Callable[..., None]:
    """The last leaf first."""

    def faulty(y: torch.Tensor, sums: torch.Tensor, *of: Any, **named: Any) -> None:
        expand(y, sums if len(y) <= MOST_ROWS else sums.flip(0).contiguous(), *of, **named)

    return faulty


def _other_leaves(shrink: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Of half as many elements."""

    def faulty(x: torch.Tensor, a: Any, groups: Any, reduction: Any, schedule: Any, *of: Any) -> torch.Tensor:
        if len(x) > MOST_ROWS:
            reduction = replace(reduction, k_leaf=reduction.k_leaf // 2)
            schedule = replace(schedule, shrink=replace(schedule.shrink, by_leaf=False))
        return shrink(x, a, groups, reduction, schedule, *of)

    return faulty


def _neighbours_slot(grouped: Callable[..., Any]) -> Callable[..., Any]:
    """The adapter of the row before."""

    def faulty(slots: torch.Tensor, *of: Any) -> Any:
        return grouped(slots if len(slots) <= MOST_ROWS else slots.roll(1), *of)

    return faulty


def _two_roundings(expand: Callable[..., None]) -> Callable[..., None]:
    """What is added is rounded before."""

    def faulty(y: torch.Tensor, *of: Any, **named: Any) -> None:
        if len(y) <= MOST_ROWS:
            return expand(y, *of, **named)
        delta = torch.zeros_like(y)
        expand(delta, *of, **named)
        y += delta
        return None

    return faulty


FAULTS = {
    "leaves reversed": ("expand", _leaves_reversed),
    "other leaves": ("shrink", _other_leaves),
    "a neighbour's slot": ("grouped", _neighbours_slot),
    "two roundings": ("expand", _two_roundings),
}
"""The function in whose place it is planted, and what it makes of it."""


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """A block in which the operation has a fault where there are more than :data:`MOST_ROWS` rows."""
    name, make = FAULTS[fault]
    right = getattr(cuda, name)
    setattr(cuda, name, make(right))
    try:
        yield
    finally:
        setattr(cuda, name, right)
