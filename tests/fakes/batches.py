"""An engine and a server without a model, whose answers depend on the batch where they are told to."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any

from tests.fakes.server import MODELS, answering

RUNNING = "vllm:num_requests_running"


def logprob(varies: bool, batch: int) -> float:
    """Of every token: its last bit is another one in batches of more than four, if it varies."""
    return -0.5 - (2**-53 if varies and batch > 4 else 0)


def _answer(path: str, asked: dict[str, Any], value: float) -> dict[str, Any]:
    """One token with a logprob, in the shape of the API that was asked; a tool that is named is called."""
    entry = {"token": "token_id:7", "logprob": value, "top_logprobs": [{"token": "token_id:7", "logprob": value}]}
    if path.endswith("/responses"):
        content = [{"type": "output_text", "text": "x", "logprobs": [entry]}]
        return {"object": "response", "status": "incomplete", "output": [{"type": "message", "content": content}]}
    if path.endswith("/chat/completions"):
        calls = isinstance(asked.get("tool_choice"), dict)
        tools = [{"id": str(time.time()), "type": "function", "function": {"name": "add", "arguments": "{"}}]
        message = {"role": "assistant", "content": None if calls else "x", "tool_calls": tools if calls else []}
        choice = {"index": 0, "message": message, "finish_reason": "length", "logprobs": {"content": [entry]}}
        return {"object": "chat.completion", "choices": [choice]}
    listed = {"tokens": ["token_id:7"], "token_logprobs": [value], "top_logprobs": [{"token_id:7": value}]}
    choice = {"index": 0, "text": "x", "finish_reason": "length", "logprobs": listed}
    return {"object": "text_completion", "choices": [choice]}


class FakeLLM:
    """What of ``vllm.LLM`` a load needs; like it, it keeps no statistics.

    Args:
        varies: whether logprobs depend on the batch.
        room: requests that it runs together.
    """

    def __init__(self, varies: bool = False, room: int = 256) -> None:
        self._varies, self._room = varies, room
        self._requests: dict[str, SimpleNamespace] = {}
        self.llm_engine, self.log_stats, self.model_config = self, False, SimpleNamespace(max_model_len=1024)

    def add_request(self, name: str, prompt: str, params: dict[str, Any]) -> None:
        """Take a request of ``max_tokens`` tokens."""
        output = SimpleNamespace(text="", token_ids=[], logprobs=[])
        request = SimpleNamespace(request_id=name, finished=False, outputs=[output], left=params["max_tokens"])
        self._requests[name] = request

    def abort_request(self, names: list[str]) -> None:
        """Forget requests."""
        for name in names:
            del self._requests[name]

    def has_unfinished_requests(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._requests)

    def step(self) -> list[SimpleNamespace]:
        """A token for each request of the batch."""
        batch = list(self._requests.values())[: self._room]
        for request in batch:
            [output], request.left = request.outputs, request.left - 1
            output.text, output.token_ids = output.text + "x", [*output.token_ids, 7]
            listed = SimpleNamespace(logprob=logprob(self._varies, len(batch)), rank=1)
            output.logprobs = [*output.logprobs, {7: listed}]
            if request.left <= 0:
                request.finished = True
                del self._requests[request.request_id]
        return batch


@contextmanager
def fake_server_of(varies: bool) -> Iterator[str]:
    """The address of a server that takes 30 ms for an answer of one token."""
    running, lock = 0, threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            metrics = f'# TYPE {RUNNING} gauge\n{RUNNING}{{engine="0"}} {running}\n'
            pages = {"/v1/models": json.dumps(MODELS.body), "/metrics": metrics}
            self._send(pages.get(self.path, ""), "application/json", 200 if self.path in pages else 404)

        def do_POST(self) -> None:
            nonlocal running
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                running += 1
            time.sleep(0.03)
            with lock:
                value, running = logprob(varies, running), running - 1
            said = json.dumps({"id": "1", "created": 0, "model": "fake"} | _answer(self.path, asked, value))
            if asked.get("stream"):
                self._send(f"data: {said}\n\ndata: [DONE]\n\n", "text/event-stream")
            else:
                self._send(said, "application/json")

        def _send(self, text: str, kind: str, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    with answering(Handler) as url:
        yield url
