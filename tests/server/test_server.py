"""A real server over real HTTP: the same bits for a request alone and among others, in every form a client can ask for
it.
"""

import asyncio
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.docs.documents import blocks
from vllm_batch_invariant.seeds import sample_seed
from vllm_batch_invariant.verify.harness.server import Server

pytestmark = pytest.mark.server

PROMPT = "The order of additions decides the bits of a sum, and"
Client = openai.AsyncOpenAI
Answer = list[tuple[str, list[tuple[str, float, dict[str, float]]]]]


def test_the_command_that_starts_it_is_not_deprecated(server: Server) -> None:
    log = server.log.read_text()
    assert "deprecated and may be removed" not in log
    assert "batch-invariant" in log


def run(server: Server, ask: Callable[[Client, str], Awaitable[Any]]) -> Any:
    async def session() -> Any:
        transport = openai.DefaultAsyncHttpxClient(trust_env=False, limits=httpx.Limits(max_connections=None))
        async with Client(base_url=server.base_url, api_key="none", http_client=transport) as client:
            model = (await client.models.list()).data[0].id
            return await ask(client, model)

    return asyncio.run(session())


async def completion(client: Client, model: str, **options: Any) -> Answer:
    options = {"max_tokens": 24, "temperature": 0, "logprobs": 5} | options
    extra = {"ignore_eos": True} | options.pop("extra_body", {})
    answer = await client.completions.create(model=model, prompt=PROMPT, extra_body=extra, **options)
    return [
        (
            choice.text,
            list(
                zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True)
            ),
        )
        for choice in answer.choices
    ]


async def streamed(client: Client, model: str) -> Answer:
    stream = await client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        logprobs=5,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text, entries = "", []
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.text
            if choice.logprobs is not None:
                part = choice.logprobs
                entries += zip(part.tokens, part.token_logprobs, part.top_logprobs, strict=True)
    return [(text, entries)]


async def chat(client: Client, model: str) -> list[tuple[str, list[Any]]]:
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=24,
        temperature=0,
        logprobs=True,
        top_logprobs=5,
        extra_body={"ignore_eos": True},
    )
    return [
        (choice.message.content, [entry.model_dump() for entry in choice.logprobs.content]) for choice in answer.choices
    ]


async def noise(client: Client, model: str, count: int) -> list[asyncio.Task]:
    """Other people: prompts of other lengths, some streamed and left early."""
    chance = random.Random(count)

    async def other(words: int, leaves: bool) -> None:
        prompt = " ".join(str(chance.randint(0, 999)) for _ in range(words))
        options = {"model": model, "prompt": prompt, "max_tokens": chance.randint(4, 24), "temperature": 0.8}
        if not leaves:
            await client.completions.create(**options)
            return
        stream = await client.completions.create(**options, stream=True)
        async for _ in stream:
            break
        await stream.close()

    tasks = [asyncio.create_task(other(chance.randint(1, 120), chance.random() < 0.3)) for _ in range(count)]
    await asyncio.sleep(0.2)
    return tasks


@pytest.mark.parametrize("form", [completion, streamed, chat])
def test_every_form_of_request_gets_the_same_answer_alone_and_with_others(
    server: Server, form: Callable[..., Awaitable[Any]]
) -> None:
    async def ask(client: Client, model: str) -> tuple[Any, list[Any]]:
        alone = await form(client, model)
        others = await noise(client, model, 30)
        together = await asyncio.gather(*(form(client, model) for _ in range(20)))
        await asyncio.gather(*others)
        return alone, together

    alone, together = run(server, ask)
    assert len(alone[0][1]) == 24
    assert all(answer == alone for answer in together)


def test_streaming_changes_no_bit(server: Server) -> None:
    async def ask(client: Client, model: str) -> tuple[Answer, Answer]:
        return await completion(client, model), await streamed(client, model)

    whole, pieces = run(server, ask)
    assert pieces == whole


def test_several_seeded_samples_differ_from_each_other_and_repeat_with_others(server: Server) -> None:
    async def ask(client: Client, model: str) -> tuple[Answer, Answer, Answer]:
        options = {"n": 3, "temperature": 1.0, "seed": 5}
        alone = await completion(client, model, **options)
        others = await noise(client, model, 25)
        again = await completion(client, model, **options)
        await asyncio.gather(*others)
        unseeded = await completion(client, model, n=3, temperature=1.0)
        return alone, again, unseeded

    alone, again, unseeded = run(server, ask)
    assert again == alone
    assert len({text for text, _ in alone}) == 3
    assert len({text for text, _ in unseeded}) == 3


def test_equal_requests_get_one_answer_which_the_log_tells_once_and_those_with_names_get_samples(
    server: Server,
) -> None:
    def told() -> int:
        return server.log.read_text(errors="replace").count("so they get the same answer, bit for bit")

    async def ask(client: Client, model: str) -> tuple[Any, ...]:
        async def group(names: Sequence[int | str | None], seed: int = 77) -> list[Answer]:
            named = [{} if name is None else {"vllm_xargs": {"sample_id": name}} for name in names]
            asked = (completion(client, model, temperature=1.0, seed=seed, extra_body=extra) for extra in named)
            return list(await asyncio.gather(*asked))

        samples = await group([0, 1, 2, 3])
        others = await noise(client, model, 25)
        again = await group(["3", 1, 0, "2"])
        await asyncio.gather(*others)
        by_seed = [(await group([None], sample_seed(77, name)))[0] for name in range(4)]
        clones = await group([None] * 4)
        return samples, again, by_seed, clones, await group([None] * 4, 78)

    samples, again, by_seed, clones, others = run(server, ask)
    assert len({str(sample) for sample in samples}) == 4
    assert [again[place] for place in (2, 1, 3, 0)] == samples
    assert by_seed == samples
    assert len({str(clone) for clone in clones}) == len({str(clone) for clone in others}) == 1
    assert told() == 1  # also if another file's tests had sent equal requests to this server before


def test_a_named_sample_without_a_seed_is_refused_in_a_line(server: Server) -> None:
    async def ask(client: Client, model: str) -> str:
        with pytest.raises(openai.BadRequestError) as refused:
            await completion(client, model, temperature=1.0, extra_body={"vllm_xargs": {"sample_id": 3}})
        return refused.value.message

    assert "sample_id=3 tells apart samples that have a seed" in run(server, ask)


def test_the_servers_log_says_that_the_mode_is_on(server: Server) -> None:
    assert server.log.read_text(errors="replace").count("Batch-invariant mode is on") == 1


def test_the_client_of_the_readme_gets_the_same_sample_twice(server: Server, model: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    [code] = [text for language, text in blocks(readme) if language == "python" and "OpenAI(" in text]
    code = code.replace("http://127.0.0.1:8000/v1", server.base_url).replace("MODEL", str(model))

    def printed(seed: int) -> str:
        words = [sys.executable, "-c", code.replace("seed=7", f"seed={seed}")]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()

    first = printed(7)
    assert first
    assert printed(7) == first
    assert printed(8) != first
