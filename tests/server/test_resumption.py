"""An answer that breaks off at one real server goes on at another with the bits of the unbroken one."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from scripts.fleet.broken import cutting
from tests.server.conftest import SHAPE, TOOLS
from vllm_batch_invariant import resume
from vllm_batch_invariant.verify.demo_model import make_checkpoint
from vllm_batch_invariant.verify.harness.server import Server, serve
from vllm_batch_invariant.verify.outcome import NoTestError

pytestmark = pytest.mark.server

ON_GPU = torch.cuda.is_available()
RUNNERS = ("0", "1") if ON_GPU else ("",)
"""vLLM's model runners, by the variable that chooses one; on a CPU there is one."""
SHARED = ["--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", str(4 << 30)] if ON_GPU else []
"""Arguments of servers that share a GPU."""
PROMPT = "The order of additions decides the bits of a sum, and"
NAMES = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "string"}},
    "required": ["a", "b"],
}
SHORT: dict[str, dict[str, Any]] = {
    "penalties": {
        "temperature": 0.9,
        "seed": 7,
        "presence_penalty": 0.9,
        "frequency_penalty": 0.8,
        "extra_body": {"repetition_penalty": 1.2},
    },
    "grammar": {"temperature": 1.0, "seed": 9, "extra_body": {"structured_outputs": {"json": NAMES}}},
}
FORMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy with penalties": {"temperature": 0, "presence_penalty": 0.9, "frequency_penalty": 0.8},
    "seeded": {"temperature": 1.0, "seed": 5},
    "filters": {"temperature": 1.0, "seed": 6, "top_p": 0.9, "extra_body": {"min_p": 0.02, "top_k": 50}},
    "bias": {"temperature": 1.0, "seed": 6, "logit_bias": {"100": 3.0}},
    "at least so many tokens": {"temperature": 1.5, "seed": 8, "extra_body": {"min_tokens": 20, "ignore_eos": False}},
    "regular expression": {
        "temperature": 1.0,
        "seed": 9,
        "extra_body": {"structured_outputs": {"regex": "[a-z]{3,400}"}},
    },
    **SHORT,
}
Got = tuple[list[int], str, list[tuple[Any, ...]], Any]


@pytest.fixture(scope="module", params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def resuming(request: pytest.FixtureRequest, model: Path, runner: str) -> Iterator[Server]:
    """A server that lets answers go on: on a GPU one of each model runner, and none beside the tests of others."""
    if not ON_GPU:
        yield request.getfixturevalue("server")
        return
    with serve(str(model), [*TOOLS, *SHARED], variables(runner)) as running:
        yield running


def variables(runner: str) -> dict[str, str]:
    """Of a server with the mode on."""
    return {"VLLM_BATCH_INVARIANT": "1"} | ({"VLLM_USE_V2_MODEL_RUNNER": runner} if ON_GPU else {})


def client_of(server: Server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=server.base_url, api_key=key, http_client=openai.DefaultHttpxClient(trust_env=False, timeout=300)
    )


def asked(client: openai.OpenAI, length: int = 32, **form: Any) -> dict[str, Any]:
    extra = {"return_token_ids": True, "ignore_eos": True} | form.pop("extra_body", {})
    model = client.models.list().data[0].id
    options = {"model": model, "prompt": PROMPT, "max_tokens": length, "logprobs": 5} | form
    if "messages" in options:
        options |= {"logprobs": True, "top_logprobs": 5}
        del options["prompt"]
    return options | {"extra_body": extra}


def whole(chunks: Any) -> dict[int, Got]:
    """By sample: tokens, text, the logprobs of each token with its place in the text, and how it ended."""
    found: dict[int, Got] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            tokens, text, listed, _ = found.get(choice.index, ([], "", [], None))
            given = choice.logprobs
            if given is not None and hasattr(given, "tokens"):
                listed += zip(given.tokens, given.token_logprobs, given.top_logprobs, given.text_offset, strict=True)
            elif given is not None:
                listed += [(one.token, one.logprob, one.model_dump()) for one in given.content or ()]
            text += choice.text if hasattr(choice, "text") else choice.delta.content or ""
            ended = (choice.finish_reason, getattr(choice, "stop_reason", None))
            found[choice.index] = tokens + (getattr(choice, "token_ids", None) or []), text, listed, ended
    return found


def rest(client: openai.OpenAI, tokens: list[int], **options: Any) -> Got:
    """What comes behind tokens of an answer."""
    extra = options["extra_body"] | {"vllm_xargs": {resume.TOKENS: tokens}}
    [got] = whole(client.completions.create(**options | {"extra_body": extra}, stream=True)).values()
    return got


def breaks(client: openai.OpenAI, places: Any, **options: Any) -> list[int]:
    """Places behind which an answer does not go on as it did."""
    sent: list[tuple[int, int]] = []  # tokens and characters after each part
    tokens, text, listed, ended = [], "", [], None
    for chunk in client.completions.create(**options, stream=True):
        [(more, piece, of_more, ended)] = whole([chunk]).values()
        tokens, text, listed = tokens + more, text + piece, listed + of_more
        sent.append((len(tokens), len(text)))
    assert len(tokens) > 8
    failed = []
    for place, characters in sent[:-1]:
        if places is None or place in places:
            begin = listed[place][3]
            moved = [(*one[:3], one[3] - begin) for one in listed[place:]]
            if rest(client, tokens[:place], **options) != (tokens[place:], text[characters:], moved, ended):
                failed.append(place)
    return failed


@pytest.mark.parametrize("form", SHORT)
def test_an_answer_goes_on_with_its_bits(resuming: Server, form: str) -> None:
    client = client_of(resuming)
    assert breaks(client, {1, 17}, **asked(client, 24, **SHORT[form])) == []


def test_an_answer_goes_on_where_more_than_its_prompt_is_in_the_prefix_cache(resuming: Server) -> None:
    client = client_of(resuming)
    assert breaks(client, {140}, **asked(client, 150, **FORMS["seeded"])) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_at_every_token_the_rest_is_that_of_the_unbroken_answer(resuming: Server, form: str) -> None:
    client = client_of(resuming)
    assert breaks(client, None, **asked(client, **FORMS[form])) == []


@pytest.mark.exhaustive
def test_a_stop_string_is_found_across_every_break(resuming: Server) -> None:
    client = client_of(resuming)
    [(_, text, _, _)] = whole(client.completions.create(**asked(client, **FORMS["seeded"]), stream=True)).values()
    ends = {"stop": [text[len(text) // 2 :][:5], "never there, and long enough to be held back"]}
    assert breaks(client, None, **asked(client, **FORMS["seeded"] | ends)) == []


@pytest.mark.exhaustive
def test_with_another_seed_or_as_a_prompt_alone_it_is_another_answer(resuming: Server) -> None:
    client = client_of(resuming)
    options = asked(client, **FORMS["seeded"])
    [(tokens, *_)] = whole(client.completions.create(**options, stream=True)).values()
    assert rest(client, tokens[:20], **options)[0] == tokens[20:]
    assert rest(client, tokens[:20], **options | {"seed": 99})[0] != tokens[20:]
    tokenized = {"model": options["model"], "prompt": PROMPT}
    prompt = httpx.post(f"{resuming.base_url[:-3]}/tokenize", json=tokenized, trust_env=False).json()["tokens"]
    [(plain, *_)] = whole(
        client.completions.create(**options | {"prompt": prompt + tokens[:20], "max_tokens": 12}, stream=True)
    ).values()
    assert plain != tokens[20:]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n": 2}, "n=2 is not covered; ask for each sample by itself"),
        ({"max_tokens": 2}, "the answer has 2 tokens, and ends at 2"),
        ({"tokens": [4096, 1]}, "a list of token ids from 0 to 4095 is wanted"),
    ],
)
def test_what_cannot_go_on_is_refused_by_name(resuming: Server, change: dict[str, Any], said: str) -> None:
    client = client_of(resuming)
    options = asked(client, **FORMS["seeded"]) | {key: value for key, value in change.items() if key != "tokens"}
    with pytest.raises(openai.APIError, match=said):
        rest(client, change.get("tokens", [1, 2]), **options)


@pytest.mark.exhaustive
def test_an_answer_in_one_piece_is_refused(resuming: Server) -> None:
    client = client_of(resuming)
    options = asked(client, extra_body={"vllm_xargs": {resume.TOKENS: [1]}}, temperature=0)
    with pytest.raises(openai.BadRequestError, match="an answer in one piece is not covered; set stream to true"):
        client.completions.create(**options)


@pytest.mark.exhaustive
def test_tokens_that_a_grammar_does_not_accept_end_their_request_alone(resuming: Server) -> None:
    client = client_of(resuming)
    form = {"temperature": 0, "extra_body": {"structured_outputs": {"regex": "[0-9]+"}}}
    with pytest.raises(openai.APIError):
        rest(client, [300, 301], **asked(client, **form))
    assert client.completions.create(**asked(client, 2, temperature=0)).choices[0].finish_reason == "length"


LONG = 300
KILLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": FORMS["seeded"],
    "min_p": {"temperature": 1.0, "seed": 6, "extra_body": {"min_p": 0.02}},
    "penalties": SHORT["penalties"],
    "samples": {"temperature": 1.0, "seed": 11, "n": 3},
    "named sample": {"temperature": 1.0, "seed": 11, "extra_body": {"vllm_xargs": {"sample_id": 4}}},
    "grammar": {
        "temperature": 1.0,
        "seed": 9,
        "extra_body": {"structured_outputs": {"regex": f"[a-z ]{{{4 * LONG},{8 * LONG}}}"}},
    },
    "chat": {"messages": [{"role": "user", "content": PROMPT}], "temperature": 1.0, "seed": 3},
    "usage": {"temperature": 1.0, "seed": 12, "stream_options": {"include_usage": True}},
}


@pytest.fixture
def servers(resuming: Server, model: Path, runner: str) -> Iterator[tuple[Server, Server]]:
    """One that will be killed, and the one that lives."""
    with pytest.raises(NoTestError, match="stopped during the run"):
        arguments = [*TOOLS, *SHARED, "--max-num-seqs", "11", "--no-enable-prefix-caching"]
        with serve(str(model), arguments, variables(runner)) as dying:
            yield dying, resuming


@pytest.mark.exhaustive
def test_streams_of_a_server_that_is_killed_go_on_at_another(servers: tuple[Server, Server]) -> None:
    dying, other = servers
    client = client_of(other)
    options = {name: asked(client, LONG, **form) for name, form in KILLED.items()}
    unbroken = {name: list(resume.stream(client, [other.base_url], **given)) for name, given in options.items()}
    before = finished(other)
    begun, killed, got = threading.Barrier(len(KILLED) + 1), threading.Event(), {}

    def read(name: str) -> None:
        chunks = []
        for chunk in resume.stream(client, [dying.base_url, other.base_url], **options[name]):
            chunks.append(chunk)
            if len(chunks) == 5:
                begun.wait(60)
                killed.wait(60)
        got[name] = chunks

    readers = [threading.Thread(target=read, args=(name,)) for name in KILLED]
    for reader in readers:
        reader.start()
    begun.wait(60)
    os.killpg(dying.process, signal.SIGKILL)
    killed.set()
    for reader in readers:
        reader.join(240)
    assert finished(other) - before >= len(KILLED)  # each has something left to do there
    for name, chunks in got.items():
        assert whole(chunks) == whole(unbroken[name]), name
        assert len({chunk.id for chunk in chunks}) == 1
    assert got.keys() == KILLED.keys()
    assert got["usage"][-1].usage == unbroken["usage"][-1].usage
    roles = [chunk for chunk in got["chat"] if chunk.choices[0].delta.role]
    assert len(roles) == 1


def finished(server: Server) -> float:
    """Requests that it has completed."""
    page = httpx.get(f"{server.base_url[:-3]}/metrics", trust_env=False).text
    lines = [line for line in page.splitlines() if line.startswith("vllm:request_success_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.exhaustive
def test_no_server_with_other_weights_goes_on(resuming: Server, runner: str, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", SHAPE, seed=1)
    client = client_of(resuming)
    with serve(str(other), [*TOOLS, *SHARED], variables(runner)) as unequal:
        known = resume.identity(client)
        theirs = resume.identity(client.with_options(base_url=unequal.base_url))
        assert [name for name in resume.IDENTITY if theirs[name] != known[name]] == [*resume.IDENTITY]
        with pytest.raises(resume.NotResumed, match="its witness is"):
            list(resume.stream(client, [unequal.base_url], known, **asked(client, **FORMS["greedy"])))


@pytest.mark.exhaustive
def test_by_the_witness_alone_a_server_with_another_fingerprint_goes_on_but_for_other_prompts(
    resuming: Server, model: Path, runner: str, tmp_path: Path
) -> None:
    template = tmp_path / "template"
    template.write_text("Another one: {{ messages[0]['content'] }}")
    client = client_of(resuming)
    updated = serve(str(model), [*TOOLS, *SHARED, "--chat-template", str(template)], variables(runner))
    with updated as other, cutting(resuming.base_url.removesuffix("/v1")) as cutter:
        urls = [f"{cutter.url}/12/v1", other.base_url]
        theirs = resume.identity(client.with_options(base_url=other.base_url))
        assert [name for name, value in resume.identity(client).items() if theirs[name] != value] == ["fingerprint"]
        options = asked(client, **FORMS["filters"])
        unbroken = whole(resume.stream(client, urls[1:], **options))
        with pytest.raises(resume.NotResumed, match="its fingerprint is"):
            list(resume.stream(client, urls, **options))
        assert whole(resume.stream(client, urls, equal_in=resume.WITNESS_ALONE, **options)) == unbroken
        with pytest.raises(resume.NotResumed, match="it makes other tokens of the prompt"):
            list(resume.stream(client, urls, equal_in=resume.WITNESS_ALONE, **asked(client, **KILLED["chat"])))
        assert cutter.cuts == 3
