"""The load of ``make fleet-demo`` counts what differs, what is sent again and who answered; its replicas are fakes."""

import asyncio
import itertools
import json
from collections.abc import Callable

import httpx
import pytest

from scripts.fleet.demo import is_one_fleet, lines
from scripts.fleet.load import Found, Load
from scripts.fleet.replicas import PROCESS, REPLICA
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


def found_of(answer: Callable) -> Found:
    async def run() -> Found:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(base_url="http://router", transport=transport) as http:
            return await Load(http, 2, 4).run(12, 0)

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


def test_a_replica_that_answered_nothing_is_no_fleet() -> None:
    found = found_of(router({"one": LOGPROB, "two": LOGPROB}))
    del found.answers["two"]
    assert not is_one_fleet(found)
