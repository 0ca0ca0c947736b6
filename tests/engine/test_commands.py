"""Commands that start engines, as a user types them: without a setting they test the mode."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import PATHS, SETTINGS, some_exhaustive
from vllm_batch_invariant import cli
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.receipt import Receipt

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), Shape(layers=1, intermediate=512)))


def environment() -> dict[str, str]:
    """That of a user who chose nothing: no flag, no size of a KV cache, and no C++ compiler, which plain vLLM on a CPU
    needs.
    """
    chosen = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return chosen | {"PYTHONPATH": PATHS, "CXX": "no-such-compiler"}


def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """The exit status, the JSON and the lines on stderr."""
    command = [sys.executable, "-m", "vllm_batch_invariant.cli", *arguments, "--json", "-"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400)
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


@pytest.mark.exhaustive
def test_a_bisection_of_the_mode_finds_nothing(model: str) -> None:
    """The README's command, with shorter answers."""
    status, data, err = run("bisect", model, "--max-tokens", "3")
    assert status == 0, err
    assert err.startswith("testing the mode (VLLM_BATCH_INVARIANT=1)")
    assert [len(found["case"]["concurrent"]) for found in data["runs"]] == [16, 7] * 3
    assert {found["found"] for found in data["runs"]} == {None}
    assert data["engine"]["mode"] == "vllm-batch-invariant"


@pytest.mark.exhaustive
def test_a_load_through_llm_is_told_with_its_engine(model: str) -> None:
    load = ("--samples", "12", "--max-tokens", "6", "--concurrency", "8")
    status, data, err = run("reproduce", model, "--offline", *load)
    assert status == 0, err
    [result] = data["results"]
    assert (result["comparison"]["completions"], result["comparison"]["logprob_sequences"]) == (1, 1)
    assert result["info"]["mode"] == "vllm-batch-invariant"
    assert result["info"]["versions"]["vllm"]
    assert max(map(int, result["batches"]["running"])) > 1


@pytest.mark.exhaustive
def test_a_receipt_is_made_and_computed_again(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has its engines forked."""
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    for name, value in SETTINGS.items():
        if name != "VLLM_CPU_KVCACHE_SPACE":
            monkeypatch.setenv(name, value)

    def told(*arguments: str) -> tuple[int, dict[str, Any], str]:
        status, (out, err) = cli.main([*arguments, "--json", "-"]), capsys.readouterr()
        return status, json.loads(out), err

    path = tmp_path / "receipt.json"
    status, data, err = told("receipt", "make", str(path), model, "--max-tokens", "6")
    assert (status, data["mode"]) == (0, True), err
    assert Receipt.load(path).sha256 == data["sha256"]
    status, data, err = told("receipt", "verify", str(path), "--model", model, "--concurrent", "4")
    assert (status, data["equal"], data["promised"]) == (0, True, True), err
    assert "computed again with" in data["compared"]


INTERRUPTED = (("reproduce", "--offline"), ("receipt", "make", "new.json"))


@pytest.mark.parametrize("command", some_exhaustive(INTERRUPTED, INTERRUPTED[1:]))
def test_an_interruption_ends_an_engine_that_starts(model: str, command: tuple[str, ...], tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_batch_invariant.cli", *command, model],
        env=environment() | {"TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 100
    log: Path | None = None
    while time.monotonic() < deadline and not (log and "Initializing" in log.read_text()):
        log = next(iter(tmp_path.glob("vllm-engine-*.log")), None)
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()[-1].endswith("interrupted; nothing was decided")) == (130, True), err
    assert time.monotonic() - sent < 15
    assert list(tmp_path.glob("vllm-engine-*.log")) == []
