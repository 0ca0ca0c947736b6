"""Shrinks a schedule in which an answer differs: fewer requests, plainer parameters, shorter prompts."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from .schedule import EVENTS, Item, Schedule

_Part = TypeVar("_Part")
_NEEDED = frozenset(("temperature", "max_tokens", "ignore_eos", "task"))
"""Parameters that every request keeps; ``max_tokens`` gets smaller."""


def shrink(
    schedule: Schedule,
    name: str,
    differs: Callable[[Schedule], bool],
    until: float,
    now: Callable[[], float] = time.monotonic,
) -> Schedule:
    """The smallest schedule found in which the answer to the item ``name`` still differs.

    Args:
        schedule: one in which it differs.
        name: the target; other targets become concurrent requests.
        differs: runs a schedule; returns whether the answer differs from the one to the request alone.
        until: time at which the search ends.
        now: the clock.
    """

    def holds(candidate: Schedule) -> bool:
        return now() < until and differs(candidate)

    items = tuple(replace(item, target=item.name == name) for item in schedule.items)
    best = schedule
    if holds(replace(schedule, items=items)):
        best = replace(schedule, items=items)
    # first, because plain requests run in a fraction of the time of those that list a vocabulary
    plain = tuple(item if item.name == name else replace(item, params=_plain(item)) for item in best.items)
    best = replace(best, items=plain) if holds(replace(best, items=plain)) else best
    for kind in EVENTS:
        best = _fewest_events(best, kind, holds)
    others = tuple(item for item in best.items if item.name != name)
    kept = _fewest(others, lambda some: holds(_with(best, name, some)))
    best = _with(best, name, kept)
    together = replace(best, items=tuple(replace(item, at=0) for item in best.items))
    best = together if holds(together) else best
    improved = True
    while improved and now() < until:
        before = best
        for place in range(len(best.items)):
            while (simpler := next(filter(holds, _simpler(best, place)), None)) is not None:
                best = simpler
        improved = best != before
    return best


def _with(schedule: Schedule, name: str, others: Sequence[Item]) -> Schedule:
    """The schedule with these of its other items, in their old order."""
    names = {name, *(item.name for item in others)}
    return replace(schedule, items=tuple(item for item in schedule.items if item.name in names))


def _fewest_events(schedule: Schedule, kind: str, holds: Callable[[Schedule], bool]) -> Schedule:
    """The schedule with as few events of a kind, an attribute of it, as it needs."""
    fewest = _fewest(getattr(schedule, kind), lambda kept: holds(replace(schedule, **{kind: kept})))
    return replace(schedule, **{kind: fewest})


def _fewest(parts: tuple[_Part, ...], holds: Callable[[tuple[_Part, ...]], bool]) -> tuple[_Part, ...]:
    """Delta debugging: leave out halves, then quarters and so on, as long as the rest still holds."""
    if parts and holds(()):
        return ()
    size = len(parts) // 2
    while size:
        start = 0
        while start < len(parts):
            rest = parts[:start] + parts[start + size :]
            if rest and holds(rest):
                parts = rest
            else:
                start += size
        size = min(size // 2, len(parts) // 2) if size > 1 else 0
    return parts


def _simpler(schedule: Schedule, place: int) -> Iterator[Schedule]:
    """Schedules with one simplification of an item, the largest first."""
    for simpler in _simpler_items(schedule.items[place]):
        yield replace(schedule, items=(*schedule.items[:place], simpler, *schedule.items[place + 1 :]))


def _plain(item: Item) -> dict[str, Any]:
    """The parameters that every request has, greedy if it generates."""
    needed = {name: item.params[name] for name in _NEEDED if name in item.params}
    return needed if "task" in needed else needed | {"temperature": 0.0}


def _simpler_items(item: Item) -> Iterator[Item]:
    if item.leaves is not None:
        yield replace(item, leaves=None)
    if item.embeds:
        yield replace(item, embeds=False)
    if item.images:
        yield replace(item, images=())
    for place in range(len(item.images) if len(item.images) > 1 else 0):
        yield replace(item, images=(*item.images[:place], *item.images[place + 1 :]))
    if item.adapter:
        yield replace(item, adapter=0)
    if item.priority:
        yield replace(item, priority=0)
    extra = {name: value for name, value in item.params.items() if name not in _NEEDED}
    if len(extra) > 1:
        yield replace(item, params=_plain(item))
    for name in extra:
        fewer = {other: value for other, value in item.params.items() if other != name}
        # a sample without its seed is another one each time
        yield replace(item, params=fewer | ({"temperature": 0.0} if name == "seed" else {}))
    if item.params.get("temperature"):
        yield replace(item, params=dict(item.params) | {"temperature": 0.0})
    if item.at:
        yield replace(item, at=item.at // 2)
    tokens = item.params.get("max_tokens", 1)
    for fewer in dict.fromkeys((tokens // 2, tokens * 3 // 4, tokens - 1)):
        if fewer:
            yield replace(item, params=dict(item.params) | {"max_tokens": fewer})
    length = len(item.prompt)
    if length > 1:
        yield replace(item, prompt=item.prompt[: length // 2])
        yield replace(item, prompt=item.prompt[length // 2 :])
        yield replace(item, prompt=item.prompt[: length - 1])
