"""A check that needs only HTTP access: a target request alone, with concurrent requests, and from a warm cache."""

import asyncio
import json
import random
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import httpx
import openai

from ..answers import Answer, RequestSpec, answer_from
from ..harness import pooling
from ..harness.client import Connection, connect
from ..harness.load import filler
from ..harness.metrics import BatchLog, parse_metrics, read_metrics, watch
from ..harness.mode import of_server
from ..harness.requests import ANY_SERVER, SAMPLING, draw_concurrent, over_http, varied, without_values
from ..outcome import NoTestError
from ..printing import one_line
from . import forms
from .guarantees import (
    AGAIN,
    CHUNKS,
    CONCURRENT,
    CONCURRENT_LENGTHS,
    FORMS,
    OF_OPERATIONS,
    PREEMPTED,
    RESTARTED,
    SEEDED,
    WARM,
)
from .presets import Preset
from .results import CheckResults, OnProgress

CACHE_HITS = "vllm:prefix_cache_hits_total"
_NOT_APPLICABLE = {
    **dict.fromkeys(OF_OPERATIONS.items(), "a client does not reach the server's device; run check MODEL on it"),
    CHUNKS: "a client does not choose the server's chunks; run check MODEL with the server's arguments",
    PREEMPTED: "a client does not choose the server's KV cache; run check MODEL with the server's arguments",
    RESTARTED: "a client does not restart the server; compare two receipts, or run check MODEL",
}
_READ_EVERY = 0.05
"""Seconds between two readings of the metrics."""
_BESIDE_FORMS = 12
"""Concurrent requests beside a form of request."""
_OF_A_FORM = 3
"""Answers to it at once."""
_Asked = TypeVar("_Asked")


async def check_server(
    base_url: str,
    api_key: str | None,
    model: str | None,
    preset: Preset,
    timeout: float,
    results: CheckResults,
    on_progress: OnProgress,
) -> None:
    """Check what a client can provoke on a running server, and keep the results as they come.

    Args:
        base_url: its address.
        api_key: its key; None for none.
        model: the name of the served model to ask; None for the first.
        timeout: seconds after which the check is given up.
        results: is filled.
        on_progress: is called with what happens now.

    Raises:
        NoTestError: the server does not answer, or returns no logprobs or no metrics.
    """
    results.not_applicable |= _NOT_APPLICABLE
    async with connect(base_url, api_key) as server:
        served = await server.served_model(model)
        results.info = {"server": str(server), "model": served.name, "context": served.context}
        results.info |= {"versions": await server.versions(), "mode": await of_server(server)}
        run = _ServerRun(server, served.name, served.context, preset, results, on_progress)
        log = BatchLog()
        try:
            async with asyncio.timeout(timeout), watch(server.http, server.metrics, log, _READ_EVERY):
                await run.all(log)
        except TimeoutError:
            raise NoTestError(f"the check was not done within --timeout {timeout:.0f} s") from None
        except httpx.HTTPError as error:
            raise NoTestError(f"{server}/metrics does not answer: {one_line(error)}") from error
        except openai.OpenAIError as error:
            hint = f"; {pooling.HOW}" if isinstance(error, openai.NotFoundError) else ""
            raise NoTestError(f"a request got no answer: {one_line(error)}{hint}") from error


class _ServerRun:
    def __init__(
        self,
        server: Connection,
        model: str,
        context: int,
        preset: Preset,
        results: CheckResults,
        on_progress: OnProgress,
    ) -> None:
        self._server, self._model, self._preset = server, model, preset
        self._results, self._on_progress = results, on_progress
        self._spec = RequestSpec(max_tokens=preset.tokens, ignore_eos=True)
        self._params: list[dict[str, Any]] = []
        self._refused: Counter[str] = Counter()
        # in characters, because a token has at least one
        self._room = max(16, context - preset.tokens - 64)

    async def all(self, log: BatchLog) -> None:
        """Run every case, one after the other."""
        self._log = log
        self._alone = await self._answer("alone", self._spec)
        try:
            self._results.show("alone", self._alone)
            self._add(AGAIN, "again", await self._answer("again", self._spec))
            await self._concurrent()
            await self._concurrent_lengths()
            await self._sampling()
            await self._forms()
            await self._prefix_cache()
        finally:
            self._results.traces.append(log.over_time("server"))

    def _add(self, case: tuple[str, str], label: str, answer: Answer) -> None:
        self._results.add(*case, label, self._alone, answer)
        self._results.show(label, answer)

    async def _concurrent(self) -> None:
        for count in self._preset.concurrent:
            rng = random.Random(count)
            others = [filler(rng, min(self._room, rng.choice((8, 40, 200)))) for _ in range(count)]
            label = f"with {count} other{'s' * (count > 1)}"
            answer, seen = await self._answer_with(label, others, self._spec)
            self._add(CONCURRENT, label, answer)
            self._note_batch(CONCURRENT, seen)

    async def _concurrent_lengths(self) -> None:
        for length in (length for length in self._preset.concurrent_lengths if length <= self._room):
            prompt = filler(random.Random(length), length)
            label = f"with a prompt of {length} characters"
            answer, seen = await self._answer_with(label, [prompt], self._spec)
            self._add(CONCURRENT_LENGTHS, label, answer)
            self._note_batch(CONCURRENT_LENGTHS, seen)

    async def _sampling(self) -> None:
        for kind in self._preset.sampling:
            params = SAMPLING[kind]
            alone = await self._answer(f"{kind} alone", self._spec, params)
            rng = random.Random(kind)
            others = [filler(rng, min(self._room, 40)) for _ in range(16)]
            answer, seen = await self._answer_with(f"{kind} with concurrent requests", others, self._spec, params)
            self._results.add(*SEEDED, kind, alone, answer)
            self._note_batch(SEEDED, seen)

    async def _forms(self) -> None:
        """Every form of request alone, and among others at once; and a stream beside the same answer in one piece."""
        asked = forms.Asked(self._server.api, self._model, self._spec.max_tokens)
        others = [filler(random.Random(number), min(self._room, 40)) for number in range(_BESIDE_FORMS)]
        left_out: list[str] = []
        for name, form in forms.FORMS.items():
            await self._form(name, form, form, asked, others, left_out)
        stop = await forms.stop_string(asked)
        whole, pieces = (forms.stopped(stop, stream) for stream in (False, True))
        await self._form("a stream with a stop string", whole, pieces, asked, others, left_out)
        if FORMS not in self._results.samples:
            self._results.not_applicable[FORMS] = "; ".join(left_out)
        elif left_out:
            self._results.proof[FORMS] = "; ".join([self._results.proof.get(FORMS, "none in a batch"), *left_out])

    async def _form(
        self,
        name: str,
        alone: forms.Form,
        among: forms.Form,
        asked: forms.Asked,
        others: Sequence[str],
        left_out: list[str],
    ) -> None:
        """Compare two forms that give the same answer: one alone, the other a few times among others."""
        self._on_progress(f"{name} alone")
        try:
            expected = await alone(asked)
            if not expected.tokens:
                raise NoTestError("its answer has no logprobs")
            if among is not alone:
                await among(asked)
        except (openai.BadRequestError, openai.NotFoundError, openai.UnprocessableEntityError, NoTestError) as refused:
            left_out.append(f"{name} was not compared: {without_values(one_line(refused))}")
            return
        label = f"{name} with concurrent requests"

        async def several() -> list[Answer]:
            return await asyncio.gather(*(among(asked) for _ in range(_OF_A_FORM)))

        answers, seen = await self._with_others(label, others, several)
        for answer in answers:
            self._results.add(*FORMS, label, expected, answer)
        self._note_batch(FORMS, seen)

    async def _prefix_cache(self) -> None:
        salt = uuid.uuid4().hex
        before = await self._cache_hits()
        cold = await self._answer("cold", self._spec, salt=salt)
        between = await self._cache_hits()
        warm = await self._answer("warm", self._spec, salt=salt)
        hits = await self._cache_hits() - between
        if between != before or not hits:
            why = "the server counted no hit of its prefix cache, or others used it meanwhile"
            self._results.not_applicable[WARM] = why
            return
        self._add(WARM, "from a cold cache", cold)
        self._add(WARM, "from a warm cache", warm)
        self._results.proof[WARM] = f"{hits} tokens were found in the cache"

    def _note_batch(self, case: tuple[str, str], largest: int) -> None:
        alone = "the server was never seen to run two requests at a time"
        self._results.note_batch(case, largest, alone, varied(self._params, self._refused))

    async def _answer_with(
        self, label: str, others: Sequence[str], spec: RequestSpec, params: dict[str, Any] | None = None
    ) -> tuple[Answer, int]:
        """The answer with concurrent requests, and the size of the largest batch."""
        return await self._with_others(label, others, lambda: self._answer(label, spec, params))

    async def _with_others(
        self, label: str, others: Sequence[str], ask: Callable[[], Awaitable[_Asked]]
    ) -> tuple[_Asked, int]:
        """What is asked while concurrent requests run, and the size of the largest batch."""
        first = await self._read_metrics()
        # the others run as long as the target
        chance, spec = random.Random(label), self._spec
        asked = [draw_concurrent(chance, ANY_SERVER, spec.max_tokens, len(prompt)) for prompt in others]
        self._params += asked
        bodies = [
            spec.prompt_body(self._model, prompt) | over_http(each, spec.chat)
            for prompt, each in zip(others, asked, strict=True)
        ]
        tasks = [asyncio.create_task(self._server.api.completions.create(**body)) for body in bodies]
        try:
            answer = await ask()
            for came in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(came, openai.APIStatusError) and came.status_code < 500:
                    self._refused[without_values(one_line(came))] += 1
                elif isinstance(came, BaseException):
                    raise came
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._read_metrics()
        return answer, self._log.largest_since(first)

    async def _read_metrics(self) -> int:
        """Read the metrics now; returns the number of the reading in the log."""
        self._log.add(await read_metrics(self._server.http, self._server.metrics))
        return len(self._log.readings) - 1

    async def _answer(
        self, label: str, spec: RequestSpec, params: dict[str, Any] | None = None, salt: str | None = None
    ) -> Answer:
        """The answer to the target request; without a salt of the prefix cache it finds nothing there."""
        self._on_progress(label)
        params = params or {}
        body = replace(spec, temperature=params.get("temperature", 0.0), seed=params.get("seed", 0)).body(self._model)
        sampling = over_http(params, chat=False)
        body["extra_body"] |= sampling.pop("extra_body") | {"cache_salt": salt or uuid.uuid4().hex}
        body |= sampling
        # parsed here because the client's own parser takes longer
        raw = await self._server.api.completions.with_raw_response.create(**body)
        return answer_from(json.loads(raw.http_response.content)["choices"], chat=False)

    async def _cache_hits(self) -> int:
        page = (await self._server.http.get(self._server.metrics)).text
        return sum(int(s.value) for family in parse_metrics(page, CACHE_HITS) for s in family.samples)
