"""What the command says, and how it ends, where a run can be no test. The servers here speak HTTP and have no model."""

from pathlib import Path

import pytest

from tests.fakes.server import MODELS, Page, fake_server
from vllm_batch_invariant.cli import main
from vllm_batch_invariant.verify.harness.server import free_port

RUNNING = 'vllm:num_requests_running{engine="0"}'


METRICS = Page(f"# TYPE vllm:num_requests_running gauge\n{RUNNING} 1.0\n")
LOGPROBS = {"tokens": ["token_id:1"], "token_logprobs": [-0.5], "top_logprobs": [{"token_id:1": -0.5}]}


def completion(logprobs: object) -> Page:
    choice = {"index": 0, "text": "x", "finish_reason": "length", "logprobs": logprobs}
    return Page({"id": "1", "object": "text_completion", "created": 0, "model": "fake", "choices": [choice]})


def ends(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit status and the last line of what the command says on stderr; there is no traceback and no table."""
    try:
        status = main(["reproduce", *arguments])
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert said.out == ""
    return status, said.err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "nothing to test"),
        (("--base-url", "localhost:8000"), "not an http address"),
        (("--base-url", "http://127.0.0.1:1", "--compare"), "already runs"),
        (("--base-url", "http://127.0.0.1:1", "--offline"), "already runs"),
        (("--model", "./nowhere"), "no model there"),
        (("--model", "x/y", "--compare", "--offline"), "leave out --offline"),
        (("--model", "x/y", "--samples", "1"), "at least 2"),
        (("--model", "x/y", "--samples", "many"), "at least 2"),
        (("--model", "x/y", "--concurrency", "1"), "at least 2"),
        (("--model", "x/y", "--logprobs", "0"), "at least 1"),
        (("--model", "x/y", "--temperature", "-1"), "from 0 on"),
        (("--model", "x/y", "--prompt", ""), "--prompt is empty"),
        (("--model", "x/y", "--serve-args", "'"), "--serve-args"),
        (("--model", "x/y", "--json", "no/such/folder/report.json"), "no such folder"),
        (("--model", "x/y", "--json", "tests"), "Is a directory"),
        (("--model", "x/y", "--chat", "--completions"), "not allowed with"),
        (("--no-such-option",), "unrecognized"),
    ],
)
def test_a_bad_argument_is_one_line_and_status_2(capsys, arguments: tuple[str, ...], line: str):
    status, said = ends(capsys, *arguments)
    assert status == 2
    assert line in said
    assert said.startswith("vllm-batch-invariant reproduce: ")


def test_an_address_where_nobody_listens_is_status_2(capsys):
    status, said = ends(capsys, "--base-url", f"http://127.0.0.1:{free_port()}")
    assert status == 2
    assert "no OpenAI-compatible server answers" in said


def test_a_server_of_another_kind_is_status_2(capsys):
    with fake_server() as url:
        status, said = ends(capsys, "--base-url", url)
    assert status == 2
    assert "no OpenAI-compatible server answers" in said


def test_a_model_that_is_not_served_is_status_2_and_names_what_is(capsys):
    with fake_server(models=MODELS) as url:
        status, said = ends(capsys, "--base-url", url, "--model", "other")
    assert status == 2
    assert "'other'" in said
    assert "fake" in said


def test_a_server_without_metrics_is_status_2_before_any_sample(capsys):
    with fake_server(models=MODELS) as url:
        status, said = ends(capsys, "--base-url", url)
    assert status == 2
    assert "num_requests_running" in said


def test_a_server_that_returns_no_logprobs_is_status_2(capsys):
    with fake_server(models=MODELS, metrics=METRICS, completions=completion(None)) as url:
        status, said = ends(capsys, "--base-url", url + "/v1", "--samples", "4")
    assert status == 2
    assert "no logprobs" in said


def test_a_server_that_answers_anything_else_is_status_2_and_not_1(capsys):
    with fake_server(models=MODELS, metrics=METRICS, completions=Page("hello")) as url:
        status, said = ends(capsys, "--base-url", url, "--samples", "4")
    assert status == 2
    assert said.startswith("vllm-batch-invariant reproduce: the run failed: JSONDecodeError: ")


def test_a_request_that_the_server_refuses_is_status_2_with_its_reason(capsys):
    refusal = Page({"error": {"message": "the prompt is too long", "type": "BadRequestError", "code": 400}}, 400)
    with fake_server(models=MODELS, metrics=METRICS, completions=refusal) as url:
        status, said = ends(capsys, "--base-url", url, "--samples", "4")
    assert status == 2
    assert "sample 0 got no answer" in said
    assert "the prompt is too long" in said


def test_identical_answers_from_an_engine_that_ran_them_one_by_one_are_no_test(capsys, tmp_path: Path):
    with fake_server(models=MODELS, metrics=METRICS, completions=completion(LOGPROBS)) as url:
        report = tmp_path / "report.json"
        status, said = ends(capsys, "--base-url", url, "--samples", "3", "--concurrency", "2", "--json", str(report))
    assert status == 2
    assert "not a test: the engine never ran more than 1 request at a time" in said
    assert not report.exists()
