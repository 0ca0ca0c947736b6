"""The reproducibility run against a real server with the mode on."""

import json
from pathlib import Path

import pytest

from vllm_batch_invariant.cli import main
from vllm_batch_invariant.testing import assert_batch_invariant
from vllm_batch_invariant.verify.harness.server import Server
from vllm_batch_invariant.verify.outcome import Status

pytestmark = pytest.mark.server


@pytest.mark.parametrize("endpoint", ["--completions", "--chat"])
def test_samples_under_load_are_identical_and_the_report_says_what_was_tested(
    server: Server, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    options = ["--samples", "40", "--concurrency", "24", "--max-tokens", "16", "--json", str(report)]
    assert main(["reproduce", "--base-url", server.base_url, endpoint, *options]) == Status.REPRODUCIBLE
    assert "Reproducible. All 40 answers are equal, bit for bit." in capsys.readouterr().out
    result = json.loads(report.read_text())["results"][0]
    assert result["comparison"]["completions"] == result["comparison"]["logprob_sequences"] == 1
    assert max(int(size) for size in result["batches"]["running"]) > 1
    assert result["failed_others"] == 0, result["failure"]
    assert "logprobs none/0/1/5/20" in result["varied"]


def test_a_run_that_never_batches_is_not_called_a_pass(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--base-url", server.base_url, "--samples", "2", "--max-tokens", "1"]) == Status.NO_TEST
    assert "not a test" in capsys.readouterr().err


def test_a_users_own_assertion_passes(server: Server) -> None:
    found = assert_batch_invariant(server.base_url, "Call me", temperature=0.8, samples=24, concurrency=8)
    assert found.info["mode"] == "vllm-batch-invariant"
