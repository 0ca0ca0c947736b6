"""The reproducibility run against a real server with the mode on."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine import multimodal
from tests.engine.engines import PATHS
from tests.engine.images import write_film
from tests.server.conftest import SHAPE
from vllm_batch_invariant.cli import main
from vllm_batch_invariant.integration.coverage import RAN
from vllm_batch_invariant.testing import assert_batch_invariant
from vllm_batch_invariant.verify.demo_model import make_checkpoint
from vllm_batch_invariant.verify.harness.images import url
from vllm_batch_invariant.verify.harness.server import Server, serve
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


@pytest.mark.exhaustive
def test_answers_about_videos_are_reproduced_beside_others(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """One in a file, and one in frames, which no codec decodes."""
    version, on = pytest.importorskip("vllm").__version__, "cuda" if torch.cuda.is_available() else "cpu"
    if not version.startswith(RAN.encoding[on]):
        pytest.skip("encoders of images have not run here")
    seeing, report = make_checkpoint(tmp_path / "seeing", replace(SHAPE, images="qwen3-vl")), tmp_path / "report.json"
    path = os.pathsep.join([*multimodal.python_path(tmp_path_factory.mktemp("path")), PATHS])
    variables = {"VLLM_BATCH_INVARIANT": "1", "PYTHONPATH": path, "VLLM_CPU_KVCACHE_SPACE": "1"}
    frames = url({"kind": "video", "size": [5, 112, 224], "seed": 3})
    items = ("--video", write_film(tmp_path / "film.mp4", 1), "--video", frames)
    with serve(str(seeing), ["--max-model-len", "2048"], variables) as running:
        load = ("--samples", "24", "--concurrency", "8", "--max-tokens", "4", "--json", str(report))
        assert main(["reproduce", "--base-url", running.base_url, *items, *load]) == Status.REPRODUCIBLE
    assert "All 24 answers are equal" in capsys.readouterr().out
    result = json.loads(report.read_text())["results"][0]
    assert result["failed_others"] == 0, result["failure"]
