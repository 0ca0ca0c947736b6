"""The clients that send a load to a server."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import openai

from ..answers import Answer, RequestSpec, answer_from, url_of
from ..outcome import NoTestError
from ..printing import one_line
from . import images, pooling
from .client import Connection
from .load import Arrival, Kind, Run
from .requests import over_http, varied


class Load:
    """One run of a plan against a server."""

    def __init__(self, server: Connection, model: str, spec: RequestSpec, on_sample: Callable[[Answer], None]) -> None:
        self._client: Generating | Pooling = (Pooling if spec.pools else Generating)(server, model, spec)
        self._on_sample = on_sample
        self._answers: list[Answer] = []
        self._seen: dict[Answer, Answer] = {}
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
        asked = self._client.varied([arrival.params for arrival in plan if arrival.kind is not Kind.SAMPLE])
        return Run(tuple(self._answers), seconds, self._others, self._aborted, self._failed, self._failure, asked)

    async def _arrive(self, arrival: Arrival) -> None:
        if arrival.kind is Kind.SAMPLE:
            await self._sample(arrival.streamed)
            return
        self._others += 1
        try:
            self._aborted += await self._client.other(arrival)
        except openai.OpenAIError as error:
            self._failed += 1
            self._failure = self._failure or one_line(error)

    async def _sample(self, streamed: bool) -> None:
        try:
            answer = await self._client.sample(streamed)
        except openai.OpenAIError as error:
            hint = f"; {self._client.hint}" if isinstance(error, openai.NotFoundError) else ""
            raise NoTestError(f"sample {len(self._answers)} got no answer: {one_line(error)}{hint}") from error
        self._answers.append(self._seen.setdefault(answer, answer))  # a thousand equal ones need no memory
        self._on_sample(answer)


class Generating:
    """Requests to a model that generates."""

    varied = staticmethod(varied)
    """Parameters in words."""
    hint = pooling.ASK
    """What to do where a server has no such route."""

    def __init__(self, server: Connection, model: str, spec: RequestSpec) -> None:
        self._model, self._spec = model, spec
        self._create = server.api.chat.completions if spec.chat else server.api.completions

    async def sample(self, streamed: bool) -> Answer:
        """The answer to the target request."""
        body = self._spec.body(self._model)
        if streamed:
            chunks = await self._create.create(**body, stream=True)
            choices = [choice.model_dump() async for chunk in chunks for choice in chunk.choices]
        else:
            # the client's own parsing of every logprob would cost more than the rest of a sample
            raw = await self._create.with_raw_response.create(**body)
            choices = json.loads(raw.http_response.content)["choices"]
        return answer_from(choices, self._spec.chat)

    async def other(self, arrival: Arrival) -> bool:
        """Send a concurrent request; returns whether it was aborted."""
        spec = self._spec
        items = [images.url(one) for one in arrival.items]
        items += [url_of(*one) for one in (spec.items if arrival.same else ())]
        body = spec.prompt_body(self._model, arrival.prompt, items) | over_http(arrival.params, spec.chat)
        if arrival.kind is not Kind.ABORTED:
            await self._create.with_raw_response.create(**body)
            return False
        stream, after = await self._create.create(**body, stream=True), arrival.abort_after
        async for _ in stream:
            after -= 1
            if after <= 0:
                break
        # the engine aborts a request whose connection is closed while tokens still come
        with suppress(openai.OpenAIError):
            await stream.close()
        return True


class Pooling:
    """Requests to a model that pools."""

    hint = pooling.HINT

    def __init__(self, server: Connection, model: str, spec: RequestSpec) -> None:
        self._server, self._model, self._spec, self._task = server, model, spec, pooling.TASKS[spec.task]
        self._sent: list[dict[str, Any]] = []
        self._size = 0
        """Of an embedding of which a request may ask for a part; 0 where it may not."""

    def varied(self, _: Iterable[Mapping[str, Any]]) -> str:
        """Parameters that were sent, in words."""
        return pooling.varied(self._sent)

    async def sample(self, streamed: bool) -> Answer:  # noqa: ARG002 - nothing of a pooled answer comes before the rest
        """The answer to the target request."""
        answer = pooling.answer_in(self._spec.task, await self._post(pooling.body_of(self._spec, self._model)))
        if not self._size and pooling.DIMENSIONS in self._task.takes:
            self._size = await self._whole(answer)
        return answer

    async def _whole(self, answer: Answer) -> int:
        """Values of an embedding of which a part may be asked; 1 where vLLM refuses that, so that none is asked."""
        if self._spec.dimensions is not None:
            return self._spec.dimensions
        body = self._task.body("part") | {"model": self._model, pooling.DIMENSIONS: len(answer.bits)}
        try:
            await self._post(body)
        except openai.BadRequestError:
            return 1
        return len(answer.bits)

    async def other(self, arrival: Arrival) -> bool:
        """Send a concurrent request; returns whether it was aborted."""
        params = dict(arrival.params)
        share = params.pop(pooling.DIMENSIONS, None)
        if share is not None and self._size > 1:
            params[pooling.DIMENSIONS] = max(1, round(share * self._size))
        self._sent.append(params)
        texts = [arrival.prompt, *arrival.beside] if arrival.beside else arrival.prompt
        asked = self._post(self._task.body(texts) | {"model": self._model} | params)
        if arrival.kind is not Kind.ABORTED:
            await asked
            return False
        try:  # the engine aborts a request whose connection is closed
            await asyncio.wait_for(asked, arrival.abort_after / 1000)
        except TimeoutError:
            return True
        return False

    async def _post(self, body: dict[str, Any]) -> Any:
        return await self._server.api.post(self._server.root + self._task.path, body=body, cast_to=object)


async def _one_done(in_flight: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    done, left = await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return left
