"""The clients of a reproducibility run: they put the planned load on a server and bring back every sample's answer."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import openai

from ..divergence import Answer
from ..outcome import NoTestError
from ..printable import printable
from ..request import RequestSpec, answer_from
from ..request_parameters import varied
from .plan import Arrival, Kind


@dataclass(frozen=True)
class Run:
    """The answers, sample 0 first, the seconds that the load took, and what ran beside the samples."""

    answers: tuple[Answer, ...]
    seconds: float
    others: int
    aborted: int
    failed_others: int
    failure: str = ""
    """Why the first of those failed."""
    varied: str = ""
    """What the others asked for, in words."""

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

    def __init__(self, client: openai.AsyncOpenAI, model: str, spec: RequestSpec, on_sample: Callable[[], None]) -> None:
        self._model, self._spec, self._on_sample = model, spec, on_sample
        self._create = client.chat.completions if spec.chat else client.completions
        self._answers: list[Answer] = []
        self._others = self._left = self._failed = 0
        self._failure = ""

    async def run(self, plan: Sequence[Arrival]) -> Run:
        """Take sample 0 alone, then start each arrival as soon as few enough requests are in flight."""
        begin = time.perf_counter()
        await self._sample(streamed=False)
        flying: set[asyncio.Task[None]] = set()
        try:
            for arrival in plan:
                if arrival.pause:
                    await asyncio.sleep(arrival.pause)
                while len(flying) >= arrival.concurrency:
                    flying = await _one_lands(flying)
                flying.add(asyncio.create_task(self._arrive(arrival)))
            while flying:
                flying = await _one_lands(flying)
        finally:
            for task in flying:
                task.cancel()
            await asyncio.gather(*flying, return_exceptions=True)
        seconds = time.perf_counter() - begin
        concurrency = varied(arrival.params for arrival in plan if arrival.kind is not Kind.SAMPLE)
        return Run(tuple(self._answers), seconds, self._others, self._left, self._failed, self._failure, concurrency)

    async def _arrive(self, arrival: Arrival) -> None:
        if arrival.kind is Kind.SAMPLE:
            await self._sample(arrival.streamed)
            return
        self._others += 1
        body = self._spec.concurrent_body(self._model, arrival.prompt, arrival.params)
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
        self._left += 1
        # closing the connection while tokens still come is what makes the engine abort the request
        with suppress(openai.OpenAIError):
            await stream.close()


async def _one_lands(flying: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    done, still = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return still


def one_line(error: BaseException) -> str:
    """The error's text on one line, shortened, and its notes, which name a log."""
    text = shortened(printable(" ".join(str(error).split())) or type(error).__name__)
    return printable("; ".join((text, *getattr(error, "__notes__", ()))))


def shortened(text: str) -> str:
    """As much of a text as fits a message."""
    return text if len(text) <= 300 else text[:297] + "..."
