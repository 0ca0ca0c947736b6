"""What a running server is put through over HTTP: one request alone, in company, and from its prefix cache."""

import asyncio
import json
import random
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import openai

from ..divergence import Answer
from ..harness.client import Connection, connect
from ..harness.load import one_line
from ..harness.metrics import BatchLog, parse_metrics, read_metrics, watch
from ..harness.plan import filler
from ..harness.requests import SAMPLING
from ..mode import of_server
from ..outcome import NoTestError
from ..request import RequestSpec, answer_from
from ..request_parameters import ANY_SERVER, draw_concurrent, over_http, varied
from .cases import AGAIN, CHUNKS, CONCURRENT, CONCURRENT_LENGTHS, OF_OPERATIONS, PREEMPTED, RESTARTED, SEEDED, WARM
from .presets import Preset
from .results import CheckResults

CACHE_HITS = "vllm:prefix_cache_hits_total"
_OUT_OF_REACH = {
    **dict.fromkeys(OF_OPERATIONS, "a client does not reach the server's device; run check MODEL on it"),
    CHUNKS: "a client does not choose the server's chunks; run check MODEL with the server's arguments",
    PREEMPTED: "a client does not choose the server's KV cache; run check MODEL with the server's arguments",
    RESTARTED: "a client does not restart the server; compare two receipts, or run check MODEL",
}
_LOOK_EVERY = 0.05

OnProgress = Callable[[str], None]


async def check_server(
    base_url: str,
    api_key: str | None,
    model: str | None,
    size: Preset,
    timeout: float,
    results: CheckResults,
    on_progress: OnProgress,
) -> None:
    """Put a running server through what a client can provoke, and keep what is found as it comes.

    Args:
        base_url: its address.
        api_key: its key; None for none.
        model: the name of the served model to ask; None for the first.
        timeout: seconds after which the check is given up.
        findings: is filled.
        say: is told what happens now.

    Raises:
        NoTestError: the server does not answer, or returns no logprobs or no metrics.
    """
    results.not_applicable |= _OUT_OF_REACH
    async with connect(base_url, api_key) as server:
        served = await server.served_model(model)
        results.info = {"server": str(server), "model": served.name, "context": served.context}
        results.info |= {"versions": {"vllm": await _version(server)}, "mode": await of_server(server)}
        run = _ServerRun(server, served.name, served.context, size, results, on_progress)
        log = BatchLog()
        try:
            async with asyncio.timeout(timeout), watch(server.http, server.metrics, log, _LOOK_EVERY):
                await run.all(log)
        except TimeoutError:
            raise NoTestError(f"the check was not done within --timeout {timeout:.0f} s") from None
        except httpx.HTTPError as error:
            raise NoTestError(f"{server}/metrics does not answer: {one_line(error)}") from error
        except openai.OpenAIError as error:
            raise NoTestError(f"a request got no answer: {one_line(error)}") from error


async def _version(server: Connection) -> str:
    with suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
        return str((await server.http.get(server.root + "/version")).json()["version"])
    return "unknown"


class _ServerRun:
    def __init__(self, server: Connection, model: str, context: int, size: Preset, results: CheckResults, on_progress: OnProgress) -> None:
        self._server, self._model, self._size, self._results, self._on_progress = server, model, size, results, on_progress
        self._spec = RequestSpec(max_tokens=size.tokens, ignore_eos=True)
        self._others: list[dict[str, Any]] = []
        self._refused: Counter[str] = Counter()
        # characters, of which a token has at least one
        self._room = max(16, context - size.tokens - 64)

    async def all(self, log: BatchLog) -> None:
        """Every fact, one after the other."""
        self._log = log
        self._alone = await self._answer("alone", self._spec)
        try:
            self._results.show("alone", self._alone)
            self._add(AGAIN, "again", await self._answer("again", self._spec))
            await self._in_company()
            await self._beside_neighbours()
            await self._sampling()
            await self._prefix_cache()
        finally:
            self._results.traces.append(log.over_time("server"))

    def _add(self, case: tuple[str, str], label: str, answer: Answer) -> None:
        self._results.add(*case, label, self._alone, answer)
        self._results.show(label, answer)

    async def _in_company(self) -> None:
        for count in self._size.company:
            rng = random.Random(count)
            others = [filler(rng, min(self._room, rng.choice((8, 40, 200)))) for _ in range(count)]
            label = f"with {count} other{'s' * (count > 1)}"
            answer, seen = await self._beside(label, others, self._spec)
            self._add(CONCURRENT, label, answer)
            self._in_batch(CONCURRENT, seen)

    async def _beside_neighbours(self) -> None:
        for length in (length for length in self._size.concurrent_lengths if length <= self._room):
            prompt = filler(random.Random(length), length)
            label = f"beside a prompt of {length} characters"
            answer, seen = await self._beside(label, [prompt], self._spec)
            self._add(CONCURRENT_LENGTHS, label, answer)
            self._in_batch(CONCURRENT_LENGTHS, seen)

    async def _sampling(self) -> None:
        for kind in self._size.sampling:
            params = SAMPLING[kind]
            alone = await self._answer(f"{kind} alone", self._spec, params)
            rng = random.Random(kind)
            others = [filler(rng, min(self._room, 40)) for _ in range(16)]
            answer, seen = await self._beside(f"{kind} in company", others, self._spec, params)
            self._results.add(*SEEDED, kind, alone, answer)
            self._in_batch(SEEDED, seen)

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

    def _in_batch(self, case: tuple[str, str], largest: int) -> None:
        refused = "; ".join(f"{times} of them refused: {why}" for why, times in self._refused.items())
        beside = varied(self._others) + (f" ({refused})" if refused else "")
        alone = "the server was never seen to run two requests at a time"
        self._results.with_concurrent_requests(case, largest, alone, beside)

    async def _beside(
        self, label: str, others: Sequence[str], spec: RequestSpec, params: dict[str, Any] | None = None
    ) -> tuple[Answer, int]:
        """The answer in company, and how many requests ran in the largest batch."""
        first = await self._look()
        # the others stay as long as the one that is looked at
        chance = random.Random(label)
        asked = [draw_concurrent(chance, ANY_SERVER, spec.max_tokens, len(prompt)) for prompt in others]
        self._others += asked
        bodies = [spec.concurrent_body(self._model, *one) for one in zip(others, asked, strict=True)]
        tasks = [asyncio.create_task(self._server.api.completions.create(**body)) for body in bodies]
        try:
            answer = await self._answer(label, spec, params)
            for came in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(came, openai.APIStatusError) and came.status_code < 500:
                    self._refused[one_line(came)] += 1
                elif isinstance(came, BaseException):
                    raise came
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._look()
        return answer, self._log.largest_since(first)

    async def _look(self) -> int:
        """Read the metrics now; which reading of the log that is."""
        self._log.add(await read_metrics(self._server.http, self._server.metrics))
        return len(self._log.readings) - 1

    async def _answer(
        self, label: str, spec: RequestSpec, params: dict[str, Any] | None = None, salt: str | None = None
    ) -> Answer:
        """The answer to the request, from a prefix cache of its own unless one is named."""
        self._on_progress(label)
        params = params or {}
        body = replace(spec, temperature=params.get("temperature", 0.0), seed=params.get("seed", 0)).body(self._model)
        sampling = over_http(params, chat=False)
        body["extra_body"] |= sampling.pop("extra_body") | {"cache_salt": salt or uuid.uuid4().hex}
        body |= sampling
        # as in a run of samples, the bytes are read here: the client's parser would round nothing, but cost more
        raw = await self._server.api.completions.with_raw_response.create(**body)
        return answer_from(json.loads(raw.http_response.content)["choices"], chat=False)

    async def _cache_hits(self) -> int:
        page = (await self._server.http.get(self._server.metrics)).text
        return sum(int(s.value) for family in parse_metrics(page, CACHE_HITS) for s in family.samples)
