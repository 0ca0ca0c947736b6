"""The load of a reproducibility run, planned beforehand: which request starts when, and beside how many others."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..request_parameters import ANY_SERVER, draw_concurrent

RAMP = (1, 2, 3, 5, 7, 16, 45, 64, 128)
WORDS = ("batch", "kernel", "order", "rounds", "sum", "tile", "token", "cache", "prefix", "warp", "head", "row", "bit")


class Kind(Enum):
    """What a request is for."""

    SAMPLE = "sample"
    SHORT = "neighbour"
    LONG_PREFILL = "long prefill"
    ABORTED = "leaver"


@dataclass(frozen=True)
class Arrival:
    """One request: it starts once fewer than `beside` requests are in flight, after a pause of so many seconds."""

    kind: Kind
    concurrency: int
    pause: float
    streamed: bool
    prompt: str = ""
    abort_after: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of a request that is no sample."""


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


def plan_load(samples: int, concurrency: int, max_tokens: int, context: int, seed: int) -> tuple[Arrival, ...]:
    """The arrivals after sample 0, which is taken alone: `samples` - 1 samples and about a third as many others.

    A prompt never has more than `context` minus what it generates in bytes, so it fits however few bytes a token has.
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
            arrivals.append(Arrival(Kind.SAMPLE, level, pause, streamed=number % 10 == 5))
            # at low concurrency a neighbour that comes and goes is what varies the batch, so there each sample gets one
            if level > 1 and (level < 8 or rng.random() < 0.3):
                arrivals.append(_other(rng, level, max_tokens, room))
    return tuple(arrivals)


def _other(rng: random.Random, level: int, max_tokens: int, room: int) -> Arrival:
    kind = rng.choices((Kind.SHORT, Kind.LONG_PREFILL, Kind.ABORTED), (6, 1, 2))[0]
    if kind is Kind.LONG_PREFILL:
        prompt, length = filler(rng, min(room, 6000)), rng.randint(1, 4)
    else:
        prompt, length = filler(rng, min(room, rng.choice((8, 40, 200, 800)))), rng.randint(1, max_tokens)
    leaves = kind is Kind.ABORTED
    # a token has at least one character
    params = draw_concurrent(rng, ANY_SERVER, max_tokens if leaves else length, len(prompt))
    if leaves:  # a server streams no logprobs of prompts
        params.pop("prompt_logprobs", None)
    return Arrival(kind, level, 0.0, leaves, prompt, max(1, length // 2) if leaves else 0, params)


def filler(rng: random.Random, size: int) -> str:
    """A prompt of `size` characters: random words."""
    words = (rng.choice(WORDS) + str(rng.randrange(1000)) for _ in range(size // 3 + 1))
    return " ".join(words)[:size]
