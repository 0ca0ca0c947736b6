"""Requests that only wait for each other are not concurrent, whatever their times are."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.server import MODELS, answering
from tests.verify.receipts import CPU, LOGPROBS, PROMPT, receipt
from vllm_batch_invariant.cli import main

TOKENS = (5, 6, 7)
CHOICE = {
    "index": 0,
    "text": "xyz",
    "finish_reason": "length",
    "prompt_token_ids": list(PROMPT),
    "token_ids": list(TOKENS),
    "logprobs": {
        "tokens": [f"token_id:{token}" for token in TOKENS],
        "token_logprobs": list(LOGPROBS),
        "top_logprobs": [
            {f"token_id:{token}": logprob, "token_id:99": -3.0} for token, logprob in zip(TOKENS, LOGPROBS, strict=True)
        ],
    },
}
ANSWER = {"id": "1", "object": "text_completion", "created": 0, "model": "fake"}


@contextmanager
def engine(at_once: int, metrics: bool = True, choice: dict[str, Any] = CHOICE, embedding: Any = None) -> Iterator[str]:
    """A server that gives so many requests a token in a step, one or two, or an embedding, and has no model."""
    one_by_one, counting = threading.Lock(), threading.Lock()
    counted = {"steps": 0, "tokens": 0}

    def step() -> None:
        time.sleep(0.005)
        with counting:
            counted["steps"] += 1
            counted["tokens"] += at_once

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = self.path.rsplit("/", 1)[-1]
            if page == "metrics" and metrics:
                with counting:
                    text = (
                        "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0.0\n"
                        "# TYPE vllm:iteration_tokens_total histogram\n"
                        f'vllm:iteration_tokens_total_bucket{{le="+Inf"}} {counted["steps"]}.0\n'
                        f"# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total {counted['tokens']}.0\n"
                    )
                self.send(text.encode(), "text/plain")
            elif page in ("models", "batch_invariant"):
                body = MODELS.body if page == "models" else asdict(CPU)
                self.send(json.dumps(body).encode(), "application/json")
            else:
                self.send(b"no such page", "text/plain", 404)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with one_by_one if at_once == 1 else nullcontext():
                if self.path.endswith("/embeddings"):
                    step()
                    self.send(json.dumps(embedding).encode(), "application/json")
                elif asked.get("stream"):
                    self.start("text/event-stream")
                    for _ in range(4):
                        step()
                        chunk = ANSWER | {"choices": [{"index": 0, "text": "x", "finish_reason": None}]}
                        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                        self.wfile.flush()
                    self.wfile.write(b"data: [DONE]\n\n")
                else:
                    for _ in TOKENS:
                        step()
                    self.send(json.dumps(ANSWER | {"choices": [choice]}).encode(), "application/json")

        def start(self, kind: str, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()

        def send(self, data: bytes, kind: str, status: int = 200) -> None:
            self.start(kind, status)
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    with answering(Handler) as url:
        yield url


def verify(capsys: pytest.CaptureFixture[str], path: Path, **how: Any) -> tuple[int, str, str]:
    receipt().save(path)
    with engine(**how) as url:
        status = main(["receipt", "verify", str(path), "--base-url", url, "--concurrent", "4"])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_requests_that_ran_one_by_one_are_no_test(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, err = verify(capsys, tmp_path / "receipt.json", at_once=1)
    assert status == 2
    assert "not a test: none of the 4 concurrent requests ran at the same time" in err
    assert "equal:" not in out


def test_requests_that_ran_together_are_concurrent(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, err = verify(capsys, tmp_path / "receipt.json", at_once=2)
    assert (status, err.startswith("testing the server at ")) == (0, True)
    assert "equal: 3 tokens and the bits of 9 logprobs, computed again with " in out


def test_without_metrics_the_times_decide(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert verify(capsys, tmp_path / "receipt.json", at_once=2, metrics=False)[0] == 0


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"prompt_token_ids": [11, 12, 14]}, "completed other tokens than those of the prompt that it was sent"),
        ({"token_ids": [5.0, 6, 7]}, "no completion of vLLM's API"),
        ({"token_ids": [True, 6, 7]}, "no completion of vLLM's API"),
        ({"token_ids": "567"}, "no completion of vLLM's API"),
        ({"logprobs": CHOICE["logprobs"] | {"token_logprobs": [-0.5, None, -0.75]}}, "a token without its logprob"),
    ],
)
def test_an_answer_to_something_else_is_no_test(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    status, out, err = verify(capsys, tmp_path / "receipt.json", at_once=2, choice=CHOICE | change)
    assert status == 2
    assert line in err
    assert "equal:" not in out
