"""Receipts over HTTP: made of a server's answer, and computed again on a server."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai

from ...integration.engine.endpoint import PATH
from ..answers import NO_LOGPROBS, generated_tokens_from
from ..harness import pooling
from ..harness.client import Connection, Served, connect
from ..harness.metrics import Reading, read_metrics
from ..outcome import NoTestError
from ..printing import one_line
from . import items
from .comparison import Note, Verdict, notes_on, verdict_on
from .engine import ConcurrentRequests
from .model_files import model_at
from .record import UNNAMED, Completion, EngineInfo, Environment, Receipt, Sampling, environment_from_json
from .text import Text

_TOKEN = "token_id:"
_NO_COMPLETION = "the server's answer is no completion of vLLM's API"
_HERE = "a server does not tell the digest of an adapter's files; start an engine here, with --adapter"
_LAST_CHUNK = 10.0
"""Seconds in which a concurrent request must get one more token, to count as running until the end."""


async def make_on_server(
    base_url: str,
    prompt: Text,
    sampling: Sampling,
    *,
    api_key: str | None = None,
    model: str | None = None,
    files: Path | None = None,
    private: bool = False,
) -> Receipt:
    """Have a server complete a prompt, and make the receipt.

    Args:
        base_url: of vLLM's OpenAI API.
        api_key: the server's key; None sends none, whatever the environment holds.
        model: the served model's name; the first if None.
        files: folder on this machine with the files that the server has loaded. The caller guarantees it: a server at
            localhost may be a tunnel to another machine, and the folder that it names one of that machine.
        private: keep the sha256 of the prompt's token ids instead of the ids.

    Raises:
        NoTestError: no server, no such model, or an answer without token ids or logprobs.
    """
    async with connect(base_url, api_key) as server:
        served = await served_whole(server, model)
        info = await server_info(server, served, files)
        token_ids, completion = await complete(server, served.name, prompt, sampling)
    return Receipt.of(info, token_ids, sampling, completion, private)


async def verify_on_server(
    receipt: Receipt,
    base_url: str,
    *,
    concurrent: int = 8,
    prompt: Text | None = None,
    api_key: str | None = None,
    model: str | None = None,
    files: Path | None = None,
    before: Callable[[tuple[Note, ...]], None] = lambda _: None,
) -> Verdict:
    """Compute a receipt's completion again on a server with concurrent requests, and compare it bit for bit.

    Args:
        concurrent: number of concurrent requests that are kept in flight.
        prompt: of a private receipt.
        base_url, api_key, model, files: as for :func:`make_on_server`.
        before: is called first, with the differences between the server and the receipt's engine.

    Raises:
        NoTestError: as :func:`make_on_server`; and the prompt is missing or another one, or no concurrent request ran
            at the same time.
    """
    async with connect(base_url, api_key) as server:
        served = await served_whole(server, model)
        items.refuse(receipt, "a server does not tell what it makes of files; start an engine here")
        if receipt.adapter is not None:
            raise NoTestError(f"the completion has the LoRA adapter {receipt.adapter.name}: {_HERE}")
        info = (await server_info(server, served, files)).asked_for(None)
        notes = notes_on(receipt.info, info, ("the receipt", "the server"))
        before(notes)
        given = None
        if prompt is not None:
            given, _ = await complete(server, served.name, prompt, Sampling(max_tokens=1, logprobs=0))
        token_ids = receipt.prompt.ids(given)
        others = ConcurrentRequests(receipt, token_ids, served.context, concurrent)
        before_it = await reading_of(server)
        async with running(others.size, partial(_client, server, served.name, others)) as spans:
            begin = time.perf_counter()
            answered, got = await complete(server, served.name, token_ids, receipt.sampling)
            end = time.perf_counter()
        ran, after_it = spans.between(begin, end), await reading_of(server)
    if answered != token_ids:
        raise NoTestError("the server completed other tokens than those of the prompt that it was sent")
    others.require(ran_together(ran, before_it, after_it))
    return verdict_on(receipt, got, notes, ran, concurrent)


async def served_whole(server: Connection, model: str | None) -> Served:
    """The served model of a name, the first if that is None; no adapter.

    Raises:
        NoTestError: there is none, or it is an adapter.
    """
    served = await server.served_model(model)
    if served.parent:
        raise NoTestError(f"{served.name} is a LoRA adapter of {served.parent}: {_HERE}")
    return served


async def reading_of(server: Connection) -> Reading | None:
    """A reading of the server's metrics; None if they cannot be read."""
    try:
        return await read_metrics(server.http, server.metrics)
    except (NoTestError, httpx.HTTPError):
        return None


def ran_together(ran: int, before: Reading | None, after: Reading | None) -> int:
    """How many of the requests that were in flight together ran so: none of them if they waited for each other, as
    the metrics of a server tell.
    """
    together = after.together_since(before) if before and after else None
    return 0 if together == 1 else ran


async def server_info(server: Connection, served: Served, files: Path | None = None) -> EngineInfo:
    """Environment of a server as it reports it, and the digest of its model's files if the caller has them.

    Raises:
        NoTestError: its answer is not an environment.
    """
    model = model_at(files, served.name, UNNAMED)
    try:
        data = await server.api.get(PATH.removeprefix("/v1"), cast_to=object)
    except openai.NotFoundError:
        return EngineInfo(model, Environment(versions=await server.versions()))
    except openai.OpenAIError as error:
        raise NoTestError(f"{server}{PATH} does not answer: {one_line(error)}") from error
    if isinstance(data, dict):
        for name in ("fingerprint", "witness"):  # digests: of what is in the receipt, and of other answers
            data.pop(name, None)
    return EngineInfo(model, environment_from_json(data))


async def complete(
    server: Connection, name: str, prompt: Text | tuple[int, ...], sampling: Sampling
) -> tuple[tuple[int, ...], Completion]:
    """Request a completion; returns the token ids of the prompt, and the completion.

    A chat is sent as the token ids of its template, because /v1/chat/completions lists fewer candidates.

    Raises:
        NoTestError: the server refuses, or its answer has no token ids or no logprobs.
    """
    if isinstance(prompt, Text) and prompt.chat:
        messages = [{"role": "user", "content": prompt.text}]
        asked = {"model": name, "messages": messages, "max_tokens": 1, "extra_body": {"return_token_ids": True}}
        answer, _ = await _answer(server.api.chat.completions, asked)
        prompt = _ids(answer.get("prompt_token_ids"))
    _, choice = await _answer(server.api.completions, _body(name, prompt, sampling))
    return _ids(choice.get("prompt_token_ids")), _completion(choice)


def _completion(choice: dict[str, Any]) -> Completion:
    try:
        generated = generated_tokens_from(choice, chat=False)
        if not generated:
            raise NoTestError(NO_LOGPROBS)
        tokens = _ids(choice.get("token_ids"))
        if [one.token for one in generated] != [f"{_TOKEN}{token}" for token in tokens]:
            raise NoTestError("the server's tokens and logprobs do not belong together")
        candidates = ([(int(token.removeprefix(_TOKEN)), logprob) for token, logprob in one.top] for one in generated)
        positions = zip(tokens, (one.logprob for one in generated), candidates, strict=True)
        return Completion.of(positions, str(choice.get("finish_reason")))
    except (ValueError, TypeError, AttributeError) as error:
        raise NoTestError(_NO_COMPLETION) from error


async def _answer(endpoint: Any, asked: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The server's answer, and its only choice."""
    try:
        # the client's own parsing of every logprob would take longer than all else
        raw = await endpoint.with_raw_response.create(**asked)
        answer = json.loads(raw.http_response.content)
        return answer, answer["choices"][0]
    except openai.OpenAIError as error:
        hint = f"; {pooling.ASK}" if isinstance(error, openai.NotFoundError) else ""
        raise NoTestError(f"the server gives no completion: {one_line(error)}{hint}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise NoTestError(_NO_COMPLETION) from error


def _ids(token_ids: Any) -> tuple[int, ...]:
    if not token_ids:
        raise NoTestError("the server returns no token ids, which vLLM does from 0.26 on: is it another server?")
    if not (isinstance(token_ids, list) and all(type(token) is int for token in token_ids)):
        raise NoTestError(_NO_COMPLETION)
    return tuple(token_ids)


def _body(name: str, prompt: Text | tuple[int, ...], sampling: Sampling) -> dict[str, Any]:
    """The arguments of the OpenAI client's ``create``, with every parameter, because servers have defaults."""
    openais = ("max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "logprobs")
    vllms = ("min_tokens", "top_k", "min_p", "repetition_penalty", "ignore_eos")
    extra = {parameter: getattr(sampling, parameter) for parameter in vllms}
    extra |= {"stop_token_ids": list(sampling.stop_token_ids)}
    extra |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    asked = {parameter: getattr(sampling, parameter) for parameter in openais}
    asked |= {"prompt": prompt.text if isinstance(prompt, Text) else list(prompt), "stop": list(sampling.stop)}
    return asked | {"model": name, "extra_body": extra}


@dataclass
class Spans:
    """When each concurrent request got its first and its latest token, or was sent and answered."""

    spans: list[list[float]] = field(default_factory=list)
    first: asyncio.Event = field(default_factory=asyncio.Event)
    ending: bool = False
    error: str = ""

    def between(self, begin: float, end: float) -> int:
        """How many requests ran at some moment of this time."""
        return sum(first <= end and last >= begin for first, last in self.spans)


@asynccontextmanager
async def running(size: int, client: Callable[[Spans], Coroutine[Any, Any, None]]) -> AsyncIterator[Spans]:
    """Keep so many clients at work; at the end of the block each ends its request by one more token or its answer."""
    spans = Spans()
    clients = [asyncio.create_task(client(spans)) for _ in range(size)]
    arrival = asyncio.create_task(spans.first.wait())
    try:
        waiting = set(clients)
        while waiting and not arrival.done():
            await asyncio.wait({arrival, *waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting = {client for client in waiting if not client.done()}
        if clients and not arrival.done():
            raise NoTestError(f"the concurrent requests get no answer: {spans.error}")
        yield spans
        spans.ending = True
        if clients:
            await asyncio.wait(clients, timeout=_LAST_CHUNK)
    finally:
        for task in (arrival, *clients):
            task.cancel()
        await asyncio.gather(arrival, *clients, return_exceptions=True)


async def _client(server: Connection, name: str, others: ConcurrentRequests, spans: Spans) -> None:
    while not spans.ending:
        one = others.next()
        try:
            stream = await server.api.completions.create(**_body(name, one.token_ids, one.sampling), stream=True)
            span: list[float] = []
            async for _ in stream:
                now = time.perf_counter()
                if not span:
                    span += [now, now]
                    spans.spans.append(span)
                    spans.first.set()
                span[1] = now
                if spans.ending:
                    break
            await stream.close()
        except openai.OpenAIError as error:
            spans.error = one_line(error)
            return
        if not span:
            spans.error = "the server does not stream"
            return
