"""The load of a reproducibility run: which request starts when, and the clients that send it to a server."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import openai

from ..answers import Answer, RequestSpec, answer_from
from ..outcome import NoTestError
from ..printing import one_line
from .requests import ANY_SERVER, draw_concurrent, over_http, varied

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
        abort_after: tokens after which an aborted request is aborted.
        params: sampling parameters of a concurrent request.
    """

    kind: Kind
    concurrency: int
    pause: float
    streamed: bool
    prompt: str = ""
    abort_after: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)


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
    """The arrivals after sample 0, which runs alone: ``samples`` - 1 samples and about a third as many other requests.

    A prompt has at most as many bytes as ``context`` has tokens, less those that it generates: so it always fits.
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
            # at low concurrency only another request varies the batch, so there each sample gets one
            if level > 1 and (level < 8 or rng.random() < 0.3):
                arrivals.append(_other(rng, level, max_tokens, room))
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


class Load:
    """One run of a plan against a server."""

    def __init__(
        self, client: openai.AsyncOpenAI, model: str, spec: RequestSpec, on_sample: Callable[[], None]
    ) -> None:
        self._model, self._spec, self._on_sample = model, spec, on_sample
        self._create = client.chat.completions if spec.chat else client.completions
        self._answers: list[Answer] = []
        self._others = self._aborted = self._failed = 0
        self._failure = ""

    async def run(self, plan: Sequence[Arrival]) -> Run:
        """Take sample 0 alone, then start each arrival once few enough requests are in flight."""
        begin = time.perf_counter()
        await self._sample(streamed=False)
        in_flight: set[asyncio.Task[None]] = set()
        try:
            for arrival in plan:
                if arrival.pause:
                    await asyncio.sleep(arrival.pause)
                while len(in_flight) >= arrival.concurrency:
                    in_flight = await _one_done(in_flight)
                in_flight.add(asyncio.create_task(self._arrive(arrival)))
            while in_flight:
                in_flight = await _one_done(in_flight)
        finally:
            for task in in_flight:
                task.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)
        seconds = time.perf_counter() - begin
        asked = varied(arrival.params for arrival in plan if arrival.kind is not Kind.SAMPLE)
        return Run(tuple(self._answers), seconds, self._others, self._aborted, self._failed, self._failure, asked)

    async def _arrive(self, arrival: Arrival) -> None:
        if arrival.kind is Kind.SAMPLE:
            await self._sample(arrival.streamed)
            return
        self._others += 1
        spec = self._spec
        body = spec.prompt_body(self._model, arrival.prompt) | over_http(arrival.params, spec.chat)
        try:
            if arrival.kind is Kind.ABORTED:
                await self._abort(body, arrival.abort_after)
            else:
                await self._create.with_raw_response.create(**body)
        except openai.OpenAIError as error:
            self._failed += 1
            self._failure = self._failure or one_line(error)

    async def _sample(self, streamed: bool) -> None:
        body = self._spec.body(self._model)
        try:
            if streamed:
                chunks = await self._create.create(**body, stream=True)
                choices = [choice.model_dump() async for chunk in chunks for choice in chunk.choices]
            else:
                # the client's own parsing of every logprob would cost more than the rest of a sample
                raw = await self._create.with_raw_response.create(**body)
                choices = json.loads(raw.http_response.content)["choices"]
        except openai.OpenAIError as error:
            raise NoTestError(f"sample {len(self._answers)} got no answer: {one_line(error)}") from error
        self._answers.append(answer_from(choices, self._spec.chat))
        self._on_sample()

    async def _abort(self, body: dict, after: int) -> None:
        stream = await self._create.create(**body, stream=True)
        async for _ in stream:
            after -= 1
            if after <= 0:
                break
        self._aborted += 1
        # the engine aborts a request whose connection is closed while tokens still come
        with suppress(openai.OpenAIError):
            await stream.close()


async def _one_done(in_flight: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    done, left = await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return left
