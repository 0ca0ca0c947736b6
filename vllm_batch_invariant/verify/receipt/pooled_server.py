"""Receipts of what models pool over HTTP: made of a server's answer, and computed again on a server."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import openai

from ..harness import pooling as harness
from ..harness.client import Connection, connect
from ..outcome import NoTestError
from ..printing import one_line
from .comparison import Note, Verdict, first_difference_of, notes_on, verdict_on
from .pooled import TIMES, PooledRequests, about_of
from .record import Pooled, PooledReceipt, Pooling
from .server import Spans, ran_together, reading_of, running, served_whole, server_info
from .text import Text

_OF_WORDS = 4
"""Tokens that a word may have: so many fewer words than tokens has a text."""


async def make_pooled_on_server(
    base_url: str,
    text: Text,
    pooling: Pooling,
    *,
    query: str = harness.QUERY,
    api_key: str | None = None,
    model: str | None = None,
    files: Path | None = None,
    private: bool = False,
) -> PooledReceipt:
    """Have a server embed, score or classify a text, and make the receipt.

    Args:
        base_url, api_key, model, files: as for :func:`.server.make_on_server`.
        query: of a score, what the text is scored against.
        private: keep a sha256 of the prompt's token ids, or of both texts, in their place.

    Raises:
        NoTestError: no server, no such model, or it gives no such answer.
    """
    async with connect(base_url, api_key) as server:
        served = await served_whole(server, model)
        info = await server_info(server, served, files)
        about = await _about(server, served.name, text, pooling, query)
        got = await _computed(server, served.name, about, pooling)
    return PooledReceipt.of(info, about, pooling, got, private)


async def verify_pooled_on_server(
    receipt: PooledReceipt,
    base_url: str,
    *,
    concurrent: int = 8,
    text: Text | None = None,
    query: str = harness.QUERY,
    api_key: str | None = None,
    model: str | None = None,
    files: Path | None = None,
    before: Callable[[tuple[Note, ...]], None] = lambda _: None,
) -> Verdict:
    """Compute again what a receipt holds on a server, some times with concurrent requests, and compare it bit for bit.

    Args:
        concurrent: number of concurrent requests that are kept in flight. With none it is computed once.
        text, query: of a private receipt.
        base_url, api_key, model, files: as for :func:`.server.make_on_server`.
        before: is called first, with the differences between the server and the receipt's engine.

    Raises:
        NoTestError: as :func:`make_pooled_on_server`; and the text is missing or another one, or no concurrent request
            ran at the same time.
    """
    async with connect(base_url, api_key) as server:
        served = await served_whole(server, model)
        info = (await server_info(server, served, files)).asked_for(None)
        notes = notes_on(receipt.info, info, ("the receipt", "the server"))
        before(notes)
        given = text and await _about(server, served.name, text, receipt.pooling, query)
        about = about_of(receipt, *((None, given) if receipt.pair else (given, None)))
        parts = [word for one in about for word in str(one).split()] if receipt.pair else about
        context = served.context // _OF_WORDS if receipt.pair else served.context
        others = PooledRequests(receipt, parts, context, concurrent)
        before_it = await reading_of(server)
        async with running(concurrent, partial(_client, server, served.name, receipt.pooling, others)) as spans:
            begin = time.perf_counter()
            for _ in range(times := TIMES if concurrent else 1):
                got = await _computed(server, served.name, about, receipt.pooling)
                if first_difference_of(receipt.pooled, got):
                    break
            end = time.perf_counter()
        ran, after_it = spans.between(begin, end), await reading_of(server)
    if not first_difference_of(receipt.pooled, got):
        others.require(ran_together(ran, before_it, after_it))
    return verdict_on(receipt, got, notes, ran, concurrent, times)


async def _about(
    server: Connection, name: str, text: Text, pooling: Pooling, query: str
) -> tuple[int, ...] | tuple[str, str]:
    """The token ids of a prompt by the server's tokenizer, or a pair of texts.

    Raises:
        NoTestError: it tells none.
    """
    if pooling.task == "score":
        return query, text.text
    words: dict[str, Any] = {"prompt": text.text}
    if text.chat:
        words = {"messages": [{"role": "user", "content": text.text}]}
    found = await _post(server, "/tokenize", {"model": name} | words)
    tokens = found.get("tokens") if isinstance(found, dict) else None
    if not (isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens)):
        raise NoTestError(f"{server}/tokenize tells no token ids: is it a server of vLLM?")
    return tuple(tokens)


async def _computed(server: Connection, name: str, about: tuple[Any, ...], pooling: Pooling) -> Pooled:
    """What a server gives for a prompt of tokens, or for a pair of texts.

    Raises:
        NoTestError: it refuses, gives no such answer, or took other tokens.
    """
    task = harness.TASKS[pooling.task]
    words = task.body(about[1], about[0]) if pooling.task == "score" else task.body([*about])
    asked = harness.params_of(pooling.task, pooling.dimensions, pooling.activation)
    data = await _post(server, task.path, words | {"model": name} | asked)
    answer = harness.answer_in(pooling.task, data)
    took = (data.get("usage") or {}).get("prompt_tokens")
    if pooling.task != "score" and took not in (None, len(about)):
        raise NoTestError(f"the server took {took} tokens for a prompt of {len(about)}")
    return Pooled.of(value for place in range(len(answer.bits)) for value in answer.values(place))


async def _client(server: Connection, name: str, pooling: Pooling, others: PooledRequests, spans: Spans) -> None:
    task = harness.TASKS[pooling.task]
    while not spans.ending:
        texts: Sequence[Any] = others.some(1, 4)
        if pooling.task == "score":
            texts = [" ".join(words) for words in texts]
        asked = harness.params_of(
            pooling.task, others.chosen(None, pooling.dimensions), others.chosen(None, True, False)
        )
        sent = time.perf_counter()
        try:
            await _post(server, task.path, task.body(texts) | {"model": name} | asked)
        except NoTestError as error:
            spans.error = str(error)
            return
        spans.spans.append([sent, time.perf_counter()])
        spans.first.set()


async def _post(server: Connection, path: str, body: dict[str, Any]) -> Any:
    try:
        return await server.api.post(server.root + path, body=body, cast_to=object)
    except openai.OpenAIError as error:
        hint = f"; {harness.HINT}" if isinstance(error, openai.NotFoundError) else ""
        raise NoTestError(f"{server}{path} gives no answer: {one_line(error)}{hint}") from error
