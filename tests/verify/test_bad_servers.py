"""What a server answers that no test can be made of is one line, with status 2."""

from itertools import product

import pytest

from tests.fakes.server import HANGS_UP, LISTED, METRICS, MODELS, Page, completion, fake_server
from tests.verify.commands import ended
from vllm_batch_invariant.verify.harness.server import free_port

COMMANDS = {"check": ("check", "--quick"), "reproduce": ("reproduce", "--samples", "4")}
SERVES = {"models": MODELS, "metrics": METRICS}
REFUSAL = Page({"error": {"message": "the prompt is too long", "type": "BadRequestError", "code": 400}}, 400)
CASES = {
    "of another kind": ({}, (), "no OpenAI-compatible server answers"),
    "without the model": ({"models": MODELS}, ("--model", "other"), "does not serve the model 'other'; it serves fake"),
    "without metrics": ({"models": MODELS, "completions": completion(LISTED)}, (), "lacks vllm:num_requests_running"),
    "whose metrics hang up": (
        {"models": MODELS, "metrics": HANGS_UP, "version": HANGS_UP, "completions": completion(LISTED)}, (),
        "/metrics does not answer: ",
    ),
    "without logprobs": (SERVES | {"completions": completion(None)}, (), "the server returned no logprobs"),
    "that says anything else": (SERVES | {"completions": Page("hello")}, (), " failed: JSONDecodeError: "),
    "that refuses": (SERVES | {"completions": REFUSAL}, (), "the prompt is too long"),
}  # fmt: skip


def said_of(capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> str:
    said = ended(capsys, *COMMANDS[command], *arguments)
    assert (said.status, said.out) == (2, "")
    [line] = said.lines
    assert line.startswith(f"vllm-batch-invariant {command}: ")
    return line


@pytest.mark.parametrize(("server", "command"), product(CASES, COMMANDS))
def test_a_server_that_cannot_be_tested_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], server: str, command: str
) -> None:
    pages, arguments, line = CASES[server]
    with fake_server(**pages) as url:
        said = said_of(capsys, command, "--base-url", f"{url}/v1" if command == "reproduce" else url, *arguments)
    assert line in said
    if command == "reproduce" and server == "that refuses":
        assert "sample 0 got no answer" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_an_address_where_nobody_listens_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    said = said_of(capsys, command, "--base-url", f"http://127.0.0.1:{free_port()}")
    assert "no OpenAI-compatible server answers" in said
