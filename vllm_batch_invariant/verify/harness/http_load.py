"""The clients that send a load to a server."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import openai

from ..answers import Answer, RequestSpec, answer_from
from ..outcome import NoTestError
from ..printing import one_line
from .load import Arrival, Kind, Run
from .requests import over_http, varied


class Load:
    """One run of a plan against a server."""

    def __init__(
        self, client: openai.AsyncOpenAI, model: str, spec: RequestSpec, on_sample: Callable[[Answer], None]
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
        self._on_sample(self._answers[-1])

    async def _abort(self, body: dict[str, Any], after: int) -> None:
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
