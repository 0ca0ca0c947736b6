"""The two programs of the page on a reported bug, as they are printed, against a server that answers by the request."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.docs.documents import ROOT, blocks

PROGRAMS = [code for language, code in blocks((ROOT / "docs" / "reported-bug.md").read_text()) if language == "python"]


class Server(BaseHTTPRequestHandler):
    """A stand-in for vLLM's: its text is that of the request, and of ``weights``."""

    weights = "these weights"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = f"{self.weights}: {json.dumps(body, sort_keys=True)}"
        logprobs = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{}], "text_offset": [0]}
        choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": logprobs}
        answer = {"id": "1", "object": "text_completion", "created": 1, "model": body["model"], "choices": [choice]}
        answer["system_fingerprint"] = f"vllm-{self.weights}"
        sent = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("openai")
    monkeypatch.setattr(Server, "weights", Server.weights)
    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()


def run(program: str, address: str, folder: Path) -> str:
    assert "http://127.0.0.1:8000/v1" in program
    (folder / "example.py").write_text(program.replace("http://127.0.0.1:8000/v1", address))
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_a_request_that_was_kept_is_sent_again_and_compared(address: str, tmp_path: Path) -> None:
    keep, again = PROGRAMS
    assert run(keep, address, tmp_path) == ""
    kept = json.loads((tmp_path / "report.json").read_text())
    assert kept["request"]["seed"] == 7
    assert run(again, address, tmp_path) == "the same answer vllm-these weights vllm-these weights"
    Server.weights = "others"
    assert run(again, address, tmp_path) == "another answer vllm-others vllm-these weights"
