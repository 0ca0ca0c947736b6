"""A server of fixed pages that has no model: for what a command says where a server does not answer as it should."""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Page:
    """The answer of the fake for a path."""

    body: object
    status: int = 200


HANGS_UP = Page("", status=0)
"""Closes the connection instead of an answer."""


class Server(ThreadingHTTPServer):
    """A server that is quiet, as a real one is, about a client that hangs up: a stopped watch of the metrics does."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Report what a handler raised, unless the client had gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def fake_server(heard: list[tuple[str, dict[str, str]]] | None = None, **pages: Page) -> Iterator[str]:
    """A server of fixed pages, named by the last part of their path. The path and the headers, their names in lower
    case, of every request are added to ``heard``.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if heard is not None:
                heard.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
            page = pages.get(self.path.rsplit("/", 1)[-1], Page("no such page", 404))
            if page is HANGS_UP:
                self.close_connection = True
                return
            data = page.body.encode() if isinstance(page.body, str) else json.dumps(page.body).encode()
            self.send_response(page.status)
            self.send_header("Content-Type", "text/plain" if isinstance(page.body, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *arguments: object) -> None:
            pass

    with answering(Handler) as url:
        yield url


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server on this machine that answers as the handler does."""
    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


MODELS = Page({"object": "list", "data": [{"id": "fake", "object": "model", "created": 0, "owned_by": "nobody"}]})
"""The list of a server with one model, named fake."""
METRICS = Page('# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 3.0\n')
LISTED = {"tokens": ["token_id:1"], "token_logprobs": [-0.5], "top_logprobs": [{"token_id:1": -0.5}]}
"""The logprobs of one token."""


def completion(logprobs: object) -> Page:
    """A completion of one character."""
    choice = {"index": 0, "text": "x", "finish_reason": "length", "logprobs": logprobs}
    return Page({"id": "1", "object": "text_completion", "created": 0, "model": "fake", "choices": [choice]})
