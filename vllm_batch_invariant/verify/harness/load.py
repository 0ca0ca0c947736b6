"""The load of a reproducibility run: which request starts when, and what came of it."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ..answers import Answer, RequestSpec
from . import images, pooling
from .requests import ANY_SERVER, draw_concurrent

RAMP = (1, 2, 3, 5, 7, 16, 45, 64, 128)
WORDS = ("batch", "kernel", "order", "rounds", "sum", "tile", "token", "cache", "prefix", "warp", "head", "row", "bit")


class Kind(Enum):
    """What a request is for: a sample of the target request, or one of the concurrent requests."""

    SAMPLE = "sample"
    SHORT = "short"
    LONG_PREFILL = "long prefill"
    ABORTED = "aborted"


@dataclass(frozen=True)
class Arrival:
    """One request.

    Attributes:
        concurrency: it starts once fewer requests than this are in flight.
        pause: seconds to wait before that.
        abort_after: tokens after which an aborted request is aborted; milliseconds of one that pools.
        params: parameters of a concurrent request.
        beside: more prompts of the same request, to a model that pools.
        items: images and sounds before the prompt, see :data:`.images.Item`.
        same: whether they are those of the target request.
    """

    kind: Kind
    concurrency: int
    pause: float
    streamed: bool
    prompt: str = ""
    abort_after: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    items: tuple[Mapping[str, Any], ...] = ()
    same: bool = False


def ramp(concurrency: int) -> tuple[int, ...]:
    """Concurrency up to its peak and down again."""
    up = (*(level for level in RAMP if level < concurrency), concurrency)
    return (*up, *reversed(up[:-1]))


def samples_by_level(samples: int, levels: tuple[int, ...]) -> tuple[int, ...]:
    """Spread the samples over the levels in proportion to each level, so that every level lasts about as long.

    Small batches get some more: kernels change there, and a request that comes or goes changes the batch most.
    """
    weights = [max(level, 4) if level > 1 else 1 for level in levels]
    total, given, reached = sum(weights), [], 0
    for weight in weights:
        before, reached = reached, reached + weight
        given.append(round(samples * reached / total) - round(samples * before / total))
    return tuple(given)


def plan_of(spec: RequestSpec, samples: int, concurrency: int, context: int) -> tuple[Arrival, ...]:
    """The arrivals of :func:`plan_load` beside a target request, whose seed is also that of the load."""
    task = spec.task if spec.pools else ""
    plan = plan_load(samples, concurrency, spec.most_tokens, context, spec.seed, task)
    return _with_items(plan, spec, context) if spec.items else plan


def _with_items(plan: tuple[Arrival, ...], spec: RequestSpec, context: int) -> tuple[Arrival, ...]:
    """The same with items of the target's kinds in most of the concurrent requests whose prompt leaves room."""
    chance, made = random.Random(f"{spec.seed} pictures"), list[Arrival]()
    kinds = sorted({kind for kind, _ in spec.items})
    for arrival in plan:
        room = context - len(arrival.prompt) - arrival.params.get("max_tokens", 0) - 64
        items: list[images.Item] = []
        for _ in range(chance.choice((0, 1, 1, 2, 4))):
            kind = chance.choice(kinds) if len(kinds) > 1 else kinds[0]
            size, most = images.for_server(chance, kind)
            if (room := room - most) >= 0:
                items.append({"kind": kind, "size": size, "seed": chance.randrange(images.DIFFERENT)})
        same = bool(items) and chance.random() < 0.25
        seen = replace(arrival, items=() if same else tuple(items), same=same)
        made.append(arrival if arrival.kind is Kind.SAMPLE else seen)
    return tuple(made)


def plan_load(
    samples: int, concurrency: int, max_tokens: int, context: int, seed: int, task: str = ""
) -> tuple[Arrival, ...]:
    """The arrivals after sample 0, which runs alone: ``samples`` - 1 samples and about a third as many other requests.

    A prompt has at most as many bytes as ``context`` has tokens, less those that it generates: so it always fits.
    Concurrent requests generate, or are of a ``task`` of :data:`.pooling.TASKS`.
    """
    rng = random.Random(seed)
    room = max(16, context - max_tokens - 64)
    arrivals: list[Arrival] = []
    levels = ramp(concurrency)
    number = 0
    for level, count in zip(levels, samples_by_level(samples - 1, levels), strict=True):
        for _ in range(count):
            number += 1
            pause = rng.choice((0.0, 0.0, 0.0, rng.uniform(0, 0.03)))
            arrivals.append(Arrival(Kind.SAMPLE, level, pause, streamed=number % 10 == 5 and not task))
            # at low concurrency only another request varies the batch, so there each sample gets one
            if level > 1 and (level < 8 or rng.random() < 0.3):
                other = _pooled(rng, level, room, task) if task else _other(rng, level, max_tokens, room)
                arrivals.append(other)
    return tuple(arrivals)


def _other(rng: random.Random, level: int, max_tokens: int, room: int) -> Arrival:
    kind = rng.choices((Kind.SHORT, Kind.LONG_PREFILL, Kind.ABORTED), (6, 1, 2))[0]
    if kind is Kind.LONG_PREFILL:
        prompt, length = filler(rng, min(room, 6000)), rng.randint(1, 4)
    else:
        prompt, length = filler(rng, min(room, rng.choice((8, 40, 200, 800)))), rng.randint(1, max_tokens)
    aborted = kind is Kind.ABORTED
    # a token has at least one character
    params = draw_concurrent(rng, ANY_SERVER, max_tokens if aborted else length, len(prompt))
    if aborted:  # a server streams no logprobs of prompts
        params.pop("prompt_logprobs", None)
    return Arrival(kind, level, 0.0, aborted, prompt, max(1, length // 2) if aborted else 0, params)


def _pooled(rng: random.Random, level: int, room: int, task: str) -> Arrival:
    kind = rng.choices((Kind.SHORT, Kind.LONG_PREFILL, Kind.ABORTED), (6, 2, 1))[0]
    length = min(room, 6000) if kind is Kind.LONG_PREFILL else min(room, rng.choice((1, 8, 40, 200, 800)))
    params = pooling.draw(rng, pooling.TASKS[task].takes, length)
    short = [filler(rng, rng.randint(1, max(1, length))) for _ in range(rng.choice((0, 0, 3, 15)))]
    beside = tuple(short) if kind is Kind.SHORT else ()
    return Arrival(kind, level, 0.0, False, filler(rng, length), rng.randint(1, 20), params, beside)


def filler(rng: random.Random, size: int) -> str:
    """A prompt of ``size`` characters, of random words."""
    words = (rng.choice(WORDS) + str(rng.randrange(1000)) for _ in range(size // 3 + 1))
    return " ".join(words)[:size]


@dataclass(frozen=True)
class Run:
    """The answers, sample 0 first, the seconds that the load took, and the counts of concurrent requests."""

    answers: tuple[Answer, ...]
    seconds: float
    others: int
    aborted: int
    failed_others: int
    failure: str = ""
    """Why the first of those failed."""
    varied: str = ""
    """Sampling parameters of the concurrent requests, in words."""

    @property
    def completions_per_second(self) -> float:
        """Samples a second."""
        return len(self.answers) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of the samples a second."""
        return sum(len(answer.tokens) for answer in self.answers) / self.seconds
