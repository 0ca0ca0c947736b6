"""The load of ``make fleet-demo`` counts what differs, what is sent again and who answered; its replicas are fakes."""

import asyncio
import itertools
import json
import threading
from collections.abc import Callable

import httpx
import pytest

from scripts.fleet import load
from scripts.fleet.demo import is_one_fleet, lines
from scripts.fleet.load import Found, Load, Pace, mixture, targets
from scripts.fleet.replicas import PROCESS, REPLICA
from scripts.fleet.scale import is_one_set
from vllm_batch_invariant.integration.engine.endpoint import PATH

LOGPROB = -0.25


def router(logprobs: dict[str, float], lost: int = 0, witnesses: tuple[str, str] = ("w", "w")) -> Callable:
    """Answers of two replicas in turn, after as many lost requests."""
    turns, losses = itertools.cycle(logprobs), iter(range(lost))

    async def answer(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)  # others come in between
        name = next(turns)
        headers = {REPLICA: name, PROCESS: "1"}
        if request.url.path == PATH:
            witness = witnesses[[*logprobs].index(name)]
            return httpx.Response(200, json={"fingerprint": "f", "witness": witness}, headers=headers)
        if next(losses, None) is not None:
            return httpx.Response(503)
        listed = {"token": "a", "logprob": logprobs[name], "top_logprobs": []}
        choice = {"text": "a", "message": {"content": "a"}, "logprobs": {"content": [listed]}}
        if "messages" not in json.loads(request.content):
            choice["logprobs"] = {"tokens": ["a"], "token_logprobs": [logprobs[name]]}
        return httpx.Response(200, json={"choices": [choice]}, headers=headers)

    return answer


def found_of(answer: Callable, kills: int = 0, pace: Pace | None = None) -> Found:
    async def run() -> Found:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(base_url="http://router", transport=transport) as http:
            return await Load(http, 2, targets(4), pace).run(12, kills)

    return asyncio.run(run())


def test_replicas_that_answer_alike_are_one_fleet() -> None:
    found = found_of(router({"one": LOGPROB, "two": LOGPROB}))
    assert is_one_fleet(found)
    assert found.answers.keys() == {"one", "two"}
    assert found.answers.total() == found.asked.total() == 15
    assert "answers that differ: 0 of 15" in lines(found, 1)[2]


def test_a_lost_request_is_sent_again() -> None:
    found = found_of(router({"one": LOGPROB, "two": LOGPROB}, lost=1))
    assert found.again == 1
    assert is_one_fleet(found)


@pytest.mark.parametrize(
    "answer",
    [
        router({"one": LOGPROB, "two": LOGPROB + 2**-54}),
        router({"one": LOGPROB, "two": LOGPROB}, witnesses=("w", "v")),
        router({"one": LOGPROB, "two": LOGPROB}, witnesses=("", "")),
    ],
)
def test_one_bit_of_a_logprob_or_another_witness_or_none_is_no_fleet(answer: Callable) -> None:
    assert not is_one_fleet(found_of(answer))


@pytest.mark.parametrize(
    ("later", "witness", "same"),
    [(LOGPROB, "w", True), (LOGPROB + 2**-54, "w", False), (LOGPROB, "v", False), (LOGPROB, "", False)],
)
def test_a_replica_that_comes_later_has_the_bits_of_the_first(later: float, witness: str, same: bool) -> None:
    stages = [
        found_of(router({"one": LOGPROB, "two": LOGPROB})),
        found_of(router({"three": later, "four": later}, witnesses=(witness, witness))),
    ]
    assert is_one_set(stages) is same


def test_a_replica_that_answered_nothing_is_no_fleet() -> None:
    found = found_of(router({"one": LOGPROB, "two": LOGPROB}))
    del found.answers["two"]
    assert not is_one_fleet(found)


def test_samples_go_on_until_the_last_kill_of_a_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    logprobs = {"0": LOGPROB, "1": LOGPROB}
    killed: list[int] = []

    def come_back(process: int) -> None:
        killed.append(process)
        del logprobs[next(iter(logprobs))]
        logprobs[f"behind {len(killed)} kills"] = LOGPROB

    async def answer(request: httpx.Request) -> httpx.Response:
        turns.append(len(turns))
        name = [*logprobs][turns[-1] % len(logprobs)]
        return await router({name: LOGPROB}, witnesses=("w", "w"))(request)

    turns: list[int] = []
    monkeypatch.setattr(load, "kill", come_back)
    found = found_of(answer, kills=2, pace=Pace(concurrency=2, others=1, every=0.05))
    assert len(killed) == len(found.killed) == 2
    assert found.asked.total() > 15
    assert not found.differing.total()
    assert {name: len(answers) for name, answers in found.distinct.items()} == dict.fromkeys(targets(4), 1)


def test_no_sample_begins_behind_the_end() -> None:
    ended = threading.Event()
    ended.set()
    found = found_of(router({"one": LOGPROB, "two": LOGPROB}), pace=Pace(ended=ended))
    assert found.asked.total() == len(targets(4))


def test_a_mixture_has_greedy_and_seeded_requests_and_chats() -> None:
    specs = [*mixture(12, 32).values()]
    assert {spec.temperature == 0 for spec in specs[::2]} == {True}
    assert len({spec.seed for spec in specs[1::2] if spec.temperature}) == 6
    assert {spec.chat for spec in specs} == {True, False}
    assert all(1 <= spec.max_tokens <= 32 for spec in specs)
