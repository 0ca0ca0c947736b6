"""A refusal of a process below is a refusal in the user's process, and other errors stay what they are."""

import pickle
from pathlib import Path

import pytest

from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.engine import install, refusals

REFUSAL = NotCovered("sinks", "they are not in the reduction", "serve another model")


@pytest.fixture
def left_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(refusals.LEFT_AT, str(tmp_path / "refusal"))
    return tmp_path / "refusal"


@refusals.relayed
def refuse() -> None:
    raise REFUSAL


@refusals.relayed
def follow() -> None:
    raise RuntimeError("Engine core initialization failed.")


def of(process: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_process", lambda: process)


def test_it_goes_up_through_the_processes_and_leaves_nothing_behind(
    left_at: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    of("VllmWorker-0", monkeypatch)
    with pytest.raises(SystemExit):
        refuse()
    of("EngineCore", monkeypatch)
    with pytest.raises(SystemExit):
        follow()
    assert log.text.count(str(REFUSAL)) == 1
    of("MainProcess", monkeypatch)
    with pytest.raises(NotCovered) as told:
        follow()
    assert str(told.value) == str(REFUSAL)
    assert not left_at.exists()


def test_in_one_process_it_is_raised_as_it_is(left_at: Path) -> None:
    with pytest.raises(NotCovered) as told:
        refuse()
    assert told.value is REFUSAL
    assert not left_at.exists()


@pytest.mark.parametrize("process", ["MainProcess", "EngineCore", "VllmWorker-0"])
def test_an_error_that_follows_from_no_refusal_stays_what_it_is(
    process: str, left_at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of(process, monkeypatch)
    with pytest.raises(RuntimeError, match="initialization failed"):
        follow()


def test_a_refusal_survives_the_way_to_another_process() -> None:
    assert str(pickle.loads(pickle.dumps(REFUSAL))) == str(REFUSAL)


@pytest.mark.parametrize("process", ["EngineCore", "VllmWorker-0"])
def test_a_process_whose_parent_has_not_loaded_the_plugin_tells_the_log(
    process: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    of(process, monkeypatch)
    monkeypatch.delenv(refusals.LEFT_AT, raising=False)
    with pytest.raises(SystemExit):
        refuse()
    assert log.text.count(str(REFUSAL)) == 1


def test_a_variable_that_an_engine_finds_is_told_to_the_user(
    left_at: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """As where a program that is not Python's has started the engine."""
    of("EngineCore_DP0", monkeypatch)
    monkeypatch.setattr(install, "_installed", False)
    monkeypatch.setattr(refusals, "install", lambda: None)
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(SystemExit):
        install.install()
    assert "does not cover VLLM_USE_RUST_FRONTEND=1: " in left_at.read_text()
    assert left_at.read_text() in log.text
