"""The client by which a stream goes on at another server, against local servers whose tokens follow a rule."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vllm_batch_invariant import resume
from vllm_batch_invariant.seeds import sample_seed

openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")

SAME = {"fingerprint": "vllm-1-batch-invariant-a", "witness": "1-b"}
LENGTH = 12


def token_at(seed: int, place: int) -> int:
    return hashlib.sha256(f"{seed} {place}".encode()).digest()[0]


@dataclass
class Fake:
    """A server whose token follows its place in the answer and the seed; a sample has the seed plus its index.

    Attributes:
        says: of itself.
        breaks: after so many parts of each answer it hangs up; None: never.
        how: it hangs up, has an error in the place of a part, or ends as if all had come.
        status: of every answer.
        parsed: what a chat's parts are.
        prompt: the tokens of every prompt.
    """

    says: dict[str, Any] = field(default_factory=lambda: dict(SAME))
    breaks: int | None = None
    how: str = "hangs up"
    status: int = 200
    parsed: str = "content"
    prompt: tuple[int, ...] = (1, 2, 3)
    heard: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def parts(self, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
        chat, n = "messages" in asked, asked.get("n") or 1
        before = (asked.get("vllm_xargs") or {}).get(resume.TOKENS, [])
        named = (asked.get("vllm_xargs") or {}).get("sample_id")
        seed = asked.get("seed") or 0
        seed = seed if named is None else sample_seed(seed, named)
        offsets = [0] * n
        if chat:
            for index in range(n):
                role = {"index": index, "delta": {"role": "assistant", "content": ""}}
                yield {"prompt_token_ids": self.prompt, "choices": [role]}
        for place in range(len(before), LENGTH):
            for index in range(n):
                token = token_at(seed + index, place)
                text = f" {token}"
                choice: dict[str, Any] = {"index": index, "token_ids": [token], "finish_reason": None}
                if place == LENGTH - 1:
                    choice["finish_reason"] = "length"
                if chat:
                    choice["delta"] = {self.parsed: text}
                else:
                    listed = {"tokens": [text], "token_logprobs": [-token / 256], "top_logprobs": [{text: -1.0}]}
                    choice |= {"text": text, "logprobs": listed | {"text_offset": [offsets[index]]}}
                    choice["prompt_token_ids"] = self.prompt if place == len(before) else None
                    offsets[index] += len(text)
                yield {"choices": [choice]}
        if asked.get("stream_options"):
            made = (LENGTH - len(before)) * n
            yield {
                "choices": [],
                "usage": {"prompt_tokens": 3, "completion_tokens": made, "total_tokens": 3 + made},
            }


@contextmanager
def served(*fakes: Fake) -> Iterator[list[str]]:
    """The base URLs of servers that answer while the block runs."""
    running = []
    for fake in fakes:

        class Handler(BaseHTTPRequestHandler):
            of: Fake = fake

            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def do_GET(self) -> None:
                self._answer(json.dumps(self.of.says).encode(), 404 if not self.of.says else 200)

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.of.heard.append(asked)
                if self.of.status != 200:
                    self._answer(b'{"error": {"message": "not like this"}}', self.of.status)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for number, part in enumerate(self.of.parts(asked)):
                    if number == self.of.breaks:
                        if self.of.how == "hangs up":
                            self.close_connection = True
                            return
                        if self.of.how == "error":
                            self._part('{"error": {"message": "the engine has died", "code": 500}}')
                        break
                    self._part(json.dumps({"id": f"id of {self.of.url}", "created": 1, "model": "m"} | part))
                self._part("[DONE]")
                self.wfile.write(b"0\r\n\r\n")

            def _part(self, data: str) -> None:
                line = f"data: {data}\n\n".encode()
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")

            def _answer(self, body: bytes, status: int) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        fake.url = f"http://127.0.0.1:{server.server_port}/v1"
        running.append(server)
    try:
        yield [fake.url for fake in fakes]
    finally:
        for server in running:
            server.shutdown()
            server.server_close()


@pytest.fixture(scope="module", params=["openai's", "httpx"])
def client(request: pytest.FixtureRequest) -> Any:
    """With the HTTP client that openai makes itself, and with one of the user's, of the library that it used before."""
    http = openai.DefaultHttpxClient if request.param == "openai's" else httpx.Client
    return openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", http_client=http(trust_env=False))


PROMPT = {"model": "m", "prompt": "Call me", "seed": 5}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Call me"}], "seed": 5}


def parts_of(chunks: Any) -> dict[int, list[Any]]:
    """Of each sample."""
    found: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            found.setdefault(choice.index, []).append(choice.model_dump())
    return found


@pytest.mark.parametrize("how", ["hangs up", "error", "ends"])
@pytest.mark.parametrize("place", [0, 1, 7, LENGTH - 1])
def test_a_stream_goes_on_as_if_it_had_not_been_broken(client: Any, place: int, how: str) -> None:
    first, second = Fake(breaks=place, how=how), Fake()
    with served(first, second) as urls:
        unbroken = list(resume.stream(client, urls[1:], **PROMPT))
        got = list(resume.stream(client, urls, **PROMPT))
    assert parts_of(got) == parts_of(unbroken)
    assert len({chunk.id for chunk in got}) == 1
    tokens = [token_at(5, each) for each in range(place)]
    assert second.heard[-1].get("vllm_xargs", {}).get(resume.TOKENS, []) == tokens
    assert first.heard[0]["return_token_ids"] is True


@pytest.mark.parametrize("request_", [PROMPT, CHAT, PROMPT | {"extra_body": {"vllm_xargs": {"sample_id": 3}}}])
def test_every_sample_goes_on_with_its_own_seed_wherever_it_broke(client: Any, request_: dict[str, Any]) -> None:
    first, second, third = Fake(breaks=11), Fake(breaks=4), Fake()
    with served(first, second, third) as urls:
        unbroken = parts_of(resume.stream(client, urls[2:], n=3, **request_))
        got = parts_of(resume.stream(client, urls, n=3, **request_))
    assert got == unbroken
    assert len(got) == 3
    assert {asked["n"] for asked in third.heard[1:]} == {1}


def test_usage_is_that_of_the_whole_answer(client: Any) -> None:
    with served(Fake(breaks=5), Fake()) as urls:
        [*_, last] = resume.stream(client, urls, **PROMPT, stream_options={"include_usage": True})
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (3, LENGTH, 3 + LENGTH)


@pytest.mark.parametrize("name", resume.IDENTITY)
def test_a_server_that_says_something_else_is_passed_over(client: Any, name: str) -> None:
    other, equal = Fake(says=SAME | {name: "other"}), Fake()
    with served(Fake(breaks=3), other, equal) as urls:
        assert len(list(resume.stream(client, urls, **PROMPT))) == LENGTH
        assert other.heard == []
        with pytest.raises(
            resume.NotResumed, match=f"no server goes on .* its {name} is other instead of {SAME[name]}"
        ):
            list(resume.stream(client, urls[:2], **PROMPT))


def test_a_client_that_knows_what_it_wants_takes_no_other_server(client: Any) -> None:
    with served(Fake(says=SAME | {"witness": "1-c"}), Fake()) as urls:
        assert len(list(resume.stream(client, urls, SAME, **PROMPT))) == LENGTH
        with pytest.raises(resume.NotResumed, match="its witness is 1-c"):
            list(resume.stream(client, urls[:1], SAME, **PROMPT))


@pytest.mark.parametrize("known", [None, {"witness": SAME["witness"]}, SAME])
def test_a_client_may_take_the_witness_alone(client: Any, known: dict[str, str] | None) -> None:
    updated, other = SAME | {"fingerprint": "vllm-2-batch-invariant-c"}, SAME | {"witness": "1-c"}
    with served(Fake(breaks=3), Fake(says=other), Fake(says=updated)) as urls:
        unbroken = parts_of(resume.stream(client, urls[2:], **PROMPT))
        got = resume.stream(client, urls, known, equal_in=resume.WITNESS_ALONE, **PROMPT)
        assert parts_of(got) == unbroken
        with pytest.raises(resume.NotResumed, match="its witness is 1-c instead of 1-b"):
            list(resume.stream(client, urls[:2], known, equal_in=resume.WITNESS_ALONE, **PROMPT))
        assert resume.identity(client.with_options(base_url=urls[2]), resume.WITNESS_ALONE) == {"witness": "1-b"}


@pytest.mark.parametrize("equal_in", [(), "witness", ("fingerprint",)])
def test_what_servers_have_equal_is_one_of_two(client: Any, equal_in: Any) -> None:
    with pytest.raises(ValueError, match="equal_in is IDENTITY or WITNESS_ALONE"):
        next(resume.stream(client, ["http://localhost:1"], equal_in=equal_in, **PROMPT))


def test_a_client_has_to_know_all_that_is_to_be_equal(client: Any) -> None:
    with pytest.raises(ValueError, match="known has no fingerprint"):
        next(resume.stream(client, ["http://localhost:1"], {"witness": SAME["witness"]}, **PROMPT))


def test_a_server_without_a_witness_is_refused_by_who_takes_it_alone(client: Any) -> None:
    with served(Fake(says=SAME | {"witness": ""})) as urls, pytest.raises(resume.NotResumed, match="tells no witness"):
        list(resume.stream(client, urls, equal_in=resume.WITNESS_ALONE, **PROMPT))


@pytest.mark.parametrize("request_", [PROMPT, CHAT])
@pytest.mark.parametrize("equal_in", [resume.IDENTITY, resume.WITNESS_ALONE])
def test_a_server_that_makes_other_tokens_of_the_prompt_is_passed_over(
    client: Any, request_: dict[str, Any], equal_in: tuple[str, ...]
) -> None:
    """No witness sees a tokenizer or a chat template, and a template may name the day."""
    with served(Fake(breaks=3), Fake(prompt=(1, 2, 4)), Fake()) as urls:
        unbroken = parts_of(resume.stream(client, urls[2:], **request_))
        assert parts_of(resume.stream(client, urls, equal_in=equal_in, **request_)) == unbroken
        with pytest.raises(resume.NotResumed, match="it makes other tokens of the prompt"):
            list(resume.stream(client, urls[:2], equal_in=equal_in, **request_))


@pytest.mark.parametrize(
    ("says", "said"),
    [({}, "batch-invariant mode is off there"), (SAME | {"witness": ""}, "tells no witness, so no server is known")],
)
def test_a_server_that_is_not_known_to_equal_another_is_refused(client: Any, says: dict[str, str], said: str) -> None:
    with served(Fake(says=says)) as urls, pytest.raises(resume.NotResumed, match=said):
        list(resume.stream(client, urls, **PROMPT))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"seed": None}, "without a seed"),
        ({"echo": True}, "echo"),
        ({"tools": [{}]}, "tools"),
        ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"extra_body": {"thinking_token_budget": 9}}, "thinking_token_budget"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats"),
    ],
)
def test_what_cannot_go_on_is_refused_before_anything_is_sent(client: Any, asked: dict[str, Any], said: str) -> None:
    fake = Fake()
    with served(fake) as urls, pytest.raises(resume.NotResumed, match=said):
        list(resume.stream(client, urls, **PROMPT | asked))
    assert fake.heard == []


def test_greedy_requests_need_no_seed(client: Any) -> None:
    with served(Fake(breaks=2), Fake()) as urls:
        assert len(list(resume.stream(client, urls, **PROMPT | {"seed": None, "temperature": 0}))) == LENGTH


def test_a_refusal_is_told_and_a_server_in_trouble_left(client: Any) -> None:
    with (
        served(Fake(status=503), Fake(status=400)) as urls,
        pytest.raises(openai.BadRequestError, match="not like this"),
    ):
        list(resume.stream(client, urls, **PROMPT))


def test_thoughts_that_a_parser_found_do_not_go_on(client: Any) -> None:
    for first, second in (
        (Fake(breaks=4, parsed="reasoning"), Fake()),
        (Fake(breaks=4), Fake(parsed="tool_calls")),
    ):
        with served(first, second) as urls, pytest.raises(resume.NotResumed, match="has not seen what came before"):
            list(resume.stream(client, urls, **CHAT))


def test_an_answer_without_token_ids_is_refused_when_it_ends(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Fake.parts

    def without_tokens(self: Fake, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for part in parts(self, asked):
            [choice] = part["choices"]
            yield {"choices": [choice | {"token_ids": None}]}

    monkeypatch.setattr(Fake, "parts", without_tokens)
    with served(Fake()) as urls, pytest.raises(resume.NotResumed, match="tells no token ids"):
        list(resume.stream(client, urls, **PROMPT))
