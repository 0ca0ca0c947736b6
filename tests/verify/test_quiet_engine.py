"""An engine's start prints nothing, and says in one line why there is none."""

import os
import tempfile
from pathlib import Path

import pytest

from vllm_batch_invariant.verify.harness import engine
from vllm_batch_invariant.verify.harness.engine import start_quiet_engine
from vllm_batch_invariant.verify.outcome import NoTestError

FRONT_END = "the engine did not start: Engine core initialization failed. See root cause above."


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Has the engine print two lines and end with an error, or be there where none is given."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # which it would set for the tests after it, too

    def prepare(error: BaseException | None) -> None:
        def start(model: str, arguments: list[str]) -> str:
            os.write(1, f"loading {model}\n".encode())  # pytest has a sys.stdout that writes elsewhere
            os.system("echo '(Worker pid=1) ERROR [executor.py:9] OSError: the file is cut short'")
            if error is not None:
                raise error
            return "engine"

        monkeypatch.setattr(engine, "start_engine", start)

    return prepare


def test_what_an_engine_prints_while_it_starts_is_not_shown(starts, capfd, tmp_path: Path) -> None:
    starts(None)
    assert start_quiet_engine("x/y", []) == "engine"
    print("the result")
    assert capfd.readouterr() == ("the result\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (NoTestError(FRONT_END), "the engine did not start: the file is cut short"),
        (NoTestError("--serve-args: unrecognized"), "--serve-args: unrecognized"),
    ],
)
def test_the_reason_is_one_line_and_the_log_stays(starts, capfd, tmp_path: Path, error: NoTestError, line: str) -> None:
    starts(error)
    with pytest.raises(NoTestError) as raised:
        start_quiet_engine("x/y", [])
    [log] = tmp_path.iterdir()
    assert str(raised.value) == f"{line} (the engine's log is {log})"
    assert "loading x/y" in log.read_text()
    assert capfd.readouterr() == ("", "")


def test_an_interruption_leaves_no_log(starts, tmp_path: Path) -> None:
    starts(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        start_quiet_engine("x/y", [])
    assert list(tmp_path.iterdir()) == []
