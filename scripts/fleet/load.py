"""Requests to a fleet: samples, which are always the same, beside other requests, while replicas are killed."""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from scripts.demo import QUESTION
from vllm_batch_invariant.integration.engine.endpoint import PATH
from vllm_batch_invariant.verify.answers import Answer, RequestSpec, answer_from
from vllm_batch_invariant.verify.harness.load import filler

from .processes import kill
from .replicas import MODEL, PROCESS, REPLICA

CONCURRENCY = 6
"""Samples in flight."""
OTHERS = 4
"""Other requests in flight."""
PATIENCE = 1200
"""Seconds until a request is answered, or a replica is there."""


def targets(max_tokens: int) -> dict[str, RequestSpec]:
    """The samples by name: greedy, and two seeds. Each has the logprobs of 5 candidates at each token."""
    asked = {"prompt": QUESTION, "max_tokens": max_tokens, "ignore_eos": True}
    return {
        "greedy": RequestSpec(chat=True, **asked),
        "seed 7": RequestSpec(temperature=1.0, seed=7, **asked),
        "seed 8, chat": RequestSpec(chat=True, temperature=0.7, seed=8, **asked),
    }


def mixture(prompts: int, max_tokens: int) -> dict[str, RequestSpec]:
    """As many prompts, of 1 to 1000 characters: every other one is greedy, the rest have seeds, and every third is a
    chat. Their answers have up to ``max_tokens`` tokens.
    """
    chance = random.Random(0)
    return {
        f"prompt {index}": RequestSpec(
            prompt=filler(chance, chance.choice((1, 30, 200, 1000))),
            chat=index % 3 == 2,
            max_tokens=chance.randrange(1, max_tokens + 1),
            temperature=chance.choice((0.5, 1.0)) * (index % 2),
            seed=index,
            ignore_eos=True,
        )
        for index in range(prompts)
    }


@dataclass(frozen=True)
class Pace:
    """How a load is put on a fleet.

    Attributes:
        concurrency: samples in flight.
        others: other requests in flight.
        every: seconds between a kill and the next, or more, until all replicas are there again; samples go on until
            the last kill. None: the kills are at equal distances between the samples.
        ended: no sample begins, and no replica is killed, after it is set.
        patience: seconds until a request is answered, or a replica is there.
    """

    concurrency: int = CONCURRENCY
    others: int = OTHERS
    every: float | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    patience: float = PATIENCE


@dataclass
class Found:
    """What came of a load.

    Attributes:
        answers: how many samples each replica answered.
        killed: the replicas that were killed.
        again: requests that were sent again because their replica had gone.
        differing: by the name of a sample, how many of its answers have other bits than the first.
        asked: by the name of a sample, how many were compared.
        distinct: by the name of a sample, its different answers.
        tokens: of all answers to samples.
        seconds: that the samples took.
        others: answers to other requests.
        said: what each replica says of itself, by its name; empty with the mode off.
        processes: the numbers of the processes of the replicas that are alive.
    """

    answers: Counter[str] = field(default_factory=Counter)
    killed: list[str] = field(default_factory=list)
    again: int = 0
    differing: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    distinct: dict[str, set[Answer]] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0
    others: int = 0
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)

    def values(self, name: str) -> set[str]:
        """Different values of a field of what the replicas say: "fingerprint" or "witness"."""
        return {said[name] for said in self.said.values()}

    @property
    def silent(self) -> set[str]:
        """Replicas that answered no sample."""
        return set(self.said) - set(self.answers)


class Load:
    """A load on the fleet behind an address, where ``replicas`` of a model are kept alive."""

    def __init__(
        self, http: httpx.AsyncClient, replicas: int, samples: Mapping[str, RequestSpec], pace: Pace | None = None
    ) -> None:
        self.found = Found()
        self._http, self._replicas, self._pace = http, replicas, pace or Pace()
        self._targets = samples
        self._first: dict[str, Answer] = {}
        self._allowed: float = 0
        self._begun = self._done = self._kills = 0

    async def run(self, samples: int, kills: int) -> Found:
        """Ask so many samples, and kill so many replicas at equal distances between them, or at the pace's.

        At equal distances, half of the samples between two kills wait until the next replica is there, so that it has
        some to answer.
        """
        await self._meet()
        for name in self._targets:
            await self._sample(name)
        begin = time.monotonic()
        self._kills = kills if self._pace.every is not None else 0
        ended, stages = asyncio.Event(), kills + 1 if self._pace.every is None else 1
        others = [asyncio.create_task(self._other(random.Random(seed), ended)) for seed in range(self._pace.others)]
        workers = [asyncio.create_task(self._samples(samples)) for _ in range(self._pace.concurrency)]
        killer = asyncio.create_task(self._kill_again())
        try:
            for stage in range(stages):
                if stage:
                    self._allowed += samples // stages // 2
                    await asyncio.sleep(1)  # until samples are in flight
                    self._kill()
                    await self._meet()
                self._allowed = samples * (stage + 1) // stages if self._pace.every is None else float("inf")
                while self._done < self._allowed and not all(worker.done() for worker in workers):
                    await self._check([*workers, killer])
            await asyncio.gather(*workers)
            self.found.seconds = time.monotonic() - begin
        finally:
            ended.set()
            for task in (killer, *workers):
                task.cancel()
            await asyncio.gather(killer, *others, *workers, return_exceptions=True)
        return self.found

    async def _kill_again(self) -> None:
        while len(self.found.killed) < self._kills:
            await asyncio.sleep(self._pace.every or 0)
            await self._meet()
            self._kill()

    async def _check(self, workers: list[asyncio.Task[None]]) -> None:
        done, _ = await asyncio.wait(workers, timeout=0.1, return_when=asyncio.FIRST_EXCEPTION)
        for worker in done:
            worker.result()

    async def _samples(self, samples: int) -> None:
        while (self._begun < samples or len(self.found.killed) < self._kills) and not self._pace.ended.is_set():
            if self._begun >= self._allowed:
                await asyncio.sleep(0.05)
                continue
            name = list(self._targets)[self._begun % len(self._targets)]
            self._begun += 1
            await self._sample(name)
            self._done += 1

    async def _sample(self, name: str) -> None:
        spec = self._targets[name]
        body = spec.body(MODEL)
        reply = await self._post(spec.chat, body | body.pop("extra_body"))
        answer = answer_from(reply.json()["choices"], spec.chat)
        first = self._first.setdefault(name, answer)
        self.found.answers[reply.headers[REPLICA]] += 1
        self.found.asked[name] += 1
        self.found.differing[name] += answer != first
        self.found.distinct.setdefault(name, set()).add(answer)
        self.found.tokens += len(answer.tokens)

    async def _other(self, chance: random.Random, ended: asyncio.Event) -> None:
        while not ended.is_set():
            words = " ".join(chance.choices(QUESTION.split(), k=chance.choice((1, 5, 30, 120))))
            asked = {"model": MODEL, "prompt": words, "temperature": 1.0, "max_tokens": chance.randrange(1, 24)}
            await self._post(False, asked)
            self.found.others += 1

    async def _post(self, chat: bool, body: Mapping[str, Any]) -> httpx.Response:
        """Ask until a replica answers: one that is killed takes its requests with it."""
        path, deadline = "/v1/chat/completions" if chat else "/v1/completions", time.monotonic() + self._pace.patience
        while True:
            try:
                reply = await self._http.post(path, json=body)
                if reply.status_code < 500:
                    reply.raise_for_status()
                    return reply
                problem = f"status {reply.status_code}: {reply.text[:200]}"
            except httpx.TransportError as error:
                problem = repr(error)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no replica answers: {problem}")
            self.found.again += 1
            await asyncio.sleep(0.5)

    async def _meet(self) -> None:
        """Wait until all replicas are there, and keep what each says of itself."""
        deadline = time.monotonic() + self._pace.patience
        while len(self.found.processes) < self._replicas:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self.found.processes)} of {self._replicas} replicas are there")
            try:
                reply = await self._http.get(PATH)
            except httpx.TransportError:
                reply = None
            name = reply.headers.get(REPLICA) if reply is not None else None
            if name and name not in self.found.killed and name not in self.found.processes:
                self.found.processes[name] = int(reply.headers[PROCESS])
                self.found.said[name] = reply.json() if reply.status_code == 200 else {}
            else:
                await asyncio.sleep(0.2)

    def _kill(self) -> None:
        """Kill the replica that has been there longest, with its requests and the processes that it has started."""
        name = next(iter(self.found.processes))
        kill(self.found.processes.pop(name))
        self.found.killed.append(name)


def ask(
    url: str,
    samples: int,
    replicas: int = 2,
    kills: int = 0,
    asked: Mapping[str, RequestSpec] | None = None,
    pace: Pace | None = None,
) -> Found:
    """Put a load on a fleet.

    Args:
        url: the address of its router.
        samples: requests that are compared, behind the first of each kind; at least so many where the pace's kills take
            longer.
        replicas: that are kept alive.
        kills: replicas that are killed meanwhile.
        asked: the samples by name; by default :func:`targets` of 16 tokens.
        pace: how many at once, and when replicas are killed.
    """

    async def run() -> Found:
        limits = httpx.Limits(max_connections=None, keepalive_expiry=0)  # a router that is replaced closes connections
        given = pace or Pace()
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=given.patience, limits=limits) as http:
            return await Load(http, replicas, asked or targets(16), given).run(samples, kills)

    return asyncio.run(run())
