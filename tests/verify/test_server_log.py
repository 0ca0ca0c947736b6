"""A server's log is gone when all went well, and named where something did not."""

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from vllm_batch_invariant.cli import main
from vllm_batch_invariant.verify.harness import server
from vllm_batch_invariant.verify.outcome import NoTestError
from vllm_batch_invariant.verify.printing import one_line

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where logs are, of a server that has no model."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(server, "_module", lambda model: ["tests.verify.fake_server"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    return tmp_path


def end(running: server.Server) -> None:
    """Have the server end by itself, and wait until its process has: its sockets are closed before that."""
    with suppress(httpx.HTTPError):
        httpx.get(running.base_url.removesuffix("/v1") + "/end", trust_env=False)
    time.sleep(1)


def run(then: Callable[[server.Server], object]) -> None:
    with server.serve("x/y") as running:
        assert "the server's log" in running.log.read_text()
        then(running)


def raising(error: BaseException) -> Callable[[server.Server], object]:
    def then(running: server.Server) -> None:
        raise error

    return then


def test_a_run_that_went_well_leaves_no_log(folder: Path) -> None:
    run(lambda running: None)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interruption_leaves_no_log(folder: Path, interruption: type[BaseException]) -> None:
    with pytest.raises(interruption):
        run(raising(interruption()))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("then", "line"),
    [
        (raising(NoTestError("sample 3 got no answer")), "sample 3 got no answer; the server's log is {log}"),
        (raising(KeyError("choices")), "'choices'; the server's log is {log}"),
        (raising(ValueError("x" * 400)), "; the server's log is {log}"),
        (end, "the server stopped during the run: the KV cache is gone; its log is {log}"),
    ],
)
def test_a_run_that_failed_names_the_log_that_stays(
    folder: Path, then: Callable[[server.Server], object], line: str
) -> None:
    with pytest.raises((NoTestError, KeyError, ValueError)) as raised:
        run(then)
    [log] = folder.iterdir()
    assert one_line(raised.value).endswith(line.format(log=log))
    assert "the server's log" in log.read_text()


def test_a_server_that_does_not_start_leaves_the_log_that_its_line_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_SERVER", "no-start")
    assert main(["reproduce", "--model", "x/y"]) == 2
    [log] = folder.iterdir()
    said = (
        f"vllm-batch-invariant reproduce: the server did not start (status 1): there is no such model; its log is {log}"
    )
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_a_command_that_fails_against_its_own_server_names_the_log(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "--model", "x/y"]) == 2
    [log] = folder.iterdir()
    said = capsys.readouterr().err.splitlines()[-1]
    assert "no OpenAI-compatible server answers" in said
    assert said.endswith(f"; the server's log is {log}")
