"""How a proof ends, with engines that have no model and go wrong as told."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from scripts.prove import main
from vllm_batch_invariant.verify.harness import worker

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(worker, "DRIVER", "tests.verify.fake_driver")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)


def test_a_proof_tests_every_guarantee_in_every_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "proof.json"
    assert main(["x/y", "--small", "--json", str(report), "--serve-args", "--seed '3'"]) == 0
    assert "y, VLLM_BATCH_INVARIANT=1: holds run, batch, schedule" in capsys.readouterr().out
    [found] = json.loads(report.read_text())
    assert found["arguments"][-2:] == ["--seed", "3"]
    names = {case["name"] for guarantee in found["runs"][0]["guarantees"] for case in guarantee["cases"]}
    assert names >= {
        "with concurrent requests",
        "restarted",
        "a small cache",
        "preemption",
        "eager, sync, steps of 512",
    }


@pytest.mark.parametrize(("wrong", "status"), [("breaks", 1), ("never-batches", 2), ("no-start", 2)])
def test_a_proof_that_breaks_or_tested_nothing_says_so(
    monkeypatch: pytest.MonkeyPatch, wrong: str, status: int
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", wrong)
    assert main(["x/y", "--small"]) == status


def test_the_control_must_differ() -> None:
    assert main(["x/y", "--small", "--control"]) == 1
