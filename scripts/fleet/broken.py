"""Answers that break off, by a connection that is closed or a replica that is killed, and go on through the router."""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai

from vllm_batch_invariant import resume
from vllm_batch_invariant.verify.harness.load import filler

from .processes import kill
from .replicas import HOST, MODEL

TRIES = 100
"""Times that a client asks for the rest of an answer; it waits half a second behind a router's error."""
PROMPTS = 20
"""Requests of a kind, each of which is broken as often as another."""
SAMPLES = 3
"""Of a request of that kind."""


def kinds(length: int) -> dict[str, dict[str, Any]]:
    """Requests by kind, without their prompts and seeds; each answer has ``length`` tokens."""
    return {
        "greedy": {"temperature": 0},
        "seeded": {"temperature": 1.0},
        "samples": {"temperature": 1.0, "n": SAMPLES},
        "min_p": {"temperature": 1.0, "extra_body": {"min_p": 0.02}},
        "penalties": {
            "temperature": 0.9,
            "presence_penalty": 0.9,
            "frequency_penalty": 0.8,
            "extra_body": {"repetition_penalty": 1.2},
        },
        "grammar": {
            "temperature": 1.0,
            "extra_body": {"structured_outputs": {"regex": f"[a-z ]{{{4 * length},{40 * length}}}"}},
        },
    }


def requests(length: int, prompts: int = PROMPTS) -> dict[str, list[dict[str, Any]]]:
    """Arguments of ``client.completions.create`` by kind."""
    chance = random.Random(1)
    return {
        kind: [
            {"model": MODEL, "prompt": filler(chance, chance.randrange(1, 400)), "seed": seed, "max_tokens": length}
            | {"logprobs": 5}
            | asked
            | {"extra_body": {"return_token_ids": True, "ignore_eos": True} | asked.get("extra_body", {})}
            for seed in range(prompts)
        ]
        for kind, asked in kinds(length).items()
    }


def whole(chunks: Any) -> str:
    """All samples of a stream with tokens, text, every logprob and its place, and how each ended; numbers as they are
    printed, which tells all their bits.
    """
    found: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            tokens, text, listed, ended = found.setdefault(choice.index, [[], "", [], None])
            if (given := choice.logprobs) is not None:
                listed += zip(given.tokens, given.token_logprobs, given.top_logprobs, given.text_offset, strict=True)
            ended = (choice.finish_reason, getattr(choice, "stop_reason", None))
            more = getattr(choice, "token_ids", None) or []
            found[choice.index] = [tokens + more, text + choice.text, listed, ended]
    return json.dumps(found, sort_keys=True)


@dataclass
class Cutter:
    """A proxy before the router. Under ``/N`` it closes the connection of a stream behind its part N; 0: never.

    Attributes:
        url: its address.
        cuts: streams that it cut.
        lost: streams that ended early without it, and answers that say that no replica is there.
    """

    to: tuple[str, int]
    url: str = ""
    cuts: int = 0
    lost: int = 0

    async def serve(self, ready: threading.Event, ended: asyncio.Event) -> None:
        """Serve until the end; ``url`` is known when it is ready."""
        async with await asyncio.start_server(self._answer, HOST, 0) as server:
            self.url = f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
            ready.set()
            await ended.wait()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.rstrip().split("\r\n")
            method, path, version = first.split(" ")
            _, cut, rest = path.split("/", 2)
            fields = [line for line in lines if not line.lower().startswith("connection:")]
            length = next((int(line.split(":")[1]) for line in fields if line.lower().startswith("content-length")), 0)
            body = await reader.readexactly(length)
            from_router, to_router = await asyncio.open_connection(*self.to)
            with closing(to_router):
                head = "\r\n".join([f"{method} /{rest} {version}", *fields, "Connection: close", "", ""])
                to_router.write(head.encode("latin-1") + body)
                await self._relay(from_router, writer, int(cut) if method == "POST" else 0, method == "POST")

    async def _relay(self, router: asyncio.StreamReader, client: asyncio.StreamWriter, cut: int, streams: bool) -> None:
        came, written = b"", 0
        try:
            while piece := await router.read(1 << 16):
                came += piece
                ends = _end_of(came, cut) if cut else None
                client.write(came[written:ends])
                await client.drain()
                if ends is not None:
                    self.cuts += 1
                    return
                written = len(came)
        except ConnectionError:  # of one side: the other is closed, too
            pass
        self.lost += streams and b"data: [DONE]" not in came


def _end_of(came: bytes, part: int) -> int | None:
    """Where a part of a stream ends, of those that are counted from 1; None while it has not come."""
    end = 0
    for _ in range(part):
        if not (end := came.find(b"\n\n", end) + 2) > 1:
            return None
    return end


@contextmanager
def cutting(url: str) -> Iterator[Cutter]:
    """A proxy before the router of this address."""
    host, _, port = url.removeprefix("http://").partition(":")
    cutter, ready, loop, ended = Cutter((host, int(port))), threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(cutter.serve(ready, ended)))
    thread.start()
    ready.wait()
    try:
        yield cutter
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()


@dataclass
class Continued:
    """What came of broken answers, each by kind.

    Attributes:
        asked: answers that were begun and came to an end.
        differing: answers with another bit than the unbroken one.
        unbroken: different unbroken answers; as many as there are requests, so that each tells something.
        failed: why answers did not come to an end, and how often.
        cuts: connections that were closed in the middle of a stream.
        lost: streams that ended early by themselves, and errors of the router.
        kills: replicas that were killed meanwhile.
    """

    asked: Counter[str] = field(default_factory=Counter)
    differing: Counter[str] = field(default_factory=Counter)
    unbroken: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    cuts: int = 0
    lost: int = 0
    kills: int = 0

    @property
    def ended(self) -> int:
        """Answers that came to an end, or will not."""
        return self.asked.total() + self.failed.total()


def client_of(url: str) -> openai.OpenAI:
    """A client that waits behind an error of the router: a replica that was killed is known a moment later."""

    def wait(reply: Any) -> None:
        if reply.status_code >= 500:
            time.sleep(0.5)

    http = openai.DefaultHttpxClient(trust_env=False, timeout=300, event_hooks={"response": [wait]})
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0)


def unbroken(url: str, asked: dict[str, list[dict[str, Any]]], concurrency: int) -> dict[str, list[str]]:
    """The answers to these requests, by kind, as one stream each."""
    client = client_of(url)
    with ThreadPoolExecutor(concurrency) as pool:
        begun = {
            kind: [
                pool.submit(lambda one: whole(resume.stream(client, [str(client.base_url)] * TRIES, **one)), each)
                for each in given
            ]
            for kind, given in asked.items()
        }
        return {kind: [one.result() for one in some] for kind, some in begun.items()}


def break_off(
    url: str,
    asked: dict[str, list[dict[str, Any]]],
    expected: dict[str, list[str]],
    times: int,
    concurrency: int,
    ended: threading.Event,
    replica: Callable[[], int],
    kills: int,
) -> Continued:
    """Break each kind of answers at random tokens, and compare what they become with the unbroken ones.

    Args:
        url: of the router.
        asked: the requests by kind.
        expected: their unbroken answers.
        times: broken answers of each kind.
        concurrency: how many at once.
        ended: none is begun after it is set.
        replica: waits until all replicas are there, and returns the number of the process of one.
        kills: replicas that are killed. Before each, a part of the answers waits until all are there, so that it has
            some to break.
    """
    found, client, lock = Continued(), client_of(url), threading.Lock()
    found.unbroken.update({kind: len(set(answers)) for kind, answers in expected.items()})
    gate = threading.Semaphore(0)

    def ask(cutter: Cutter, kind: str, index: int, cut: int) -> None:
        gate.acquire()
        if ended.is_set():
            return
        servers = [f"{cutter.url}/{cut}/v1", *[f"{cutter.url}/0/v1"] * TRIES]
        try:
            got = whole(resume.stream(client, servers, **asked[kind][index]))
        except (resume.NotResumed, openai.OpenAIError) as error:
            with lock:
                found.failed[f"{kind}: {error}"[:300]] += 1
            return
        with lock:
            found.asked[kind] += 1
            found.differing[kind] += got != expected[kind][index]

    chance = random.Random(2)
    with cutting(url) as cutter, ThreadPoolExecutor(concurrency) as pool:
        begun = []
        for time_ in range(times):
            for kind, given in asked.items():
                index = time_ % len(given)
                parts = given[index]["max_tokens"] * given[index].get("n", 1)
                begun.append(pool.submit(ask, cutter, kind, index, chance.randrange(1, parts)))
        try:
            part = len(begun) // (kills + 1)
            for stage in range(kills):
                process = replica()
                gate.release(part)
                while found.ended < stage * part + part // 3 and not ended.is_set():
                    time.sleep(0.01)
                if not ended.is_set():
                    kill(process)
                    found.kills += 1
            replica()
        finally:
            gate.release(len(begun))
        for one in begun:
            one.result()
        found.cuts, found.lost = cutter.cuts, cutter.lost
    return found
