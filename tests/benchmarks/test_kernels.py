"""What a trace of an engine says of its kernels."""

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.kernels import Kernel, kernels_of, main, read

EVENTS = [
    {"cat": "kernel", "name": "gemm", "dur": 6.0},
    {"cat": "kernel", "name": "gemm", "dur": 2.0},
    {"cat": "gpu_memcpy", "name": "copy", "dur": 1.0},
    {"cat": "cpu_op", "name": "aten::mm", "dur": 99.0},
    {"ph": "M", "name": "process_name"},
]


def test_kernels_are_what_a_step_has_of_them_the_longest_first() -> None:
    assert kernels_of(EVENTS, 2) == [Kernel("gemm", 1.0, 4.0), Kernel("copy", 0.5, 0.5)]


def test_a_trace_of_a_cpu_has_operators() -> None:
    assert kernels_of(EVENTS[3:], 3) == [Kernel("aten::mm", 1 / 3, 33.0)]


@pytest.mark.parametrize("name", ["dp0_pp0_tp0.pt.trace.json", "dp0_pp0_tp0.pt.trace.json.gz"])
def test_the_trace_of_the_first_worker_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "front.async_llm.pt.trace.json").write_text("{}")
    text = json.dumps({"traceEvents": EVENTS}).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert read(tmp_path) == EVENTS
    with pytest.raises(FileNotFoundError, match="no trace 1 in"):
        read(tmp_path, 1)
    with pytest.raises(FileNotFoundError, match="no trace 0 in"):
        read(tmp_path / "other")


def test_traces_of_an_engine_that_ends_badly_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And batches that it has not come to are failures."""

    def run(command: list[str], **_: object) -> None:
        folder = Path(json.loads(command[-1])["folder"])
        (folder / "dp0_pp0_tp0.1.pt.trace.json").write_text(json.dumps({"traceEvents": EVENTS}))

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["model", "--providers", "ours", "--batches", "1", "8", "--steps", "1"]) == 1
    captured = capsys.readouterr()
    assert "ours, batch 1: 4 us a step in 2 launches\n" in captured.out
    assert "FAILED: ours, batch 8: no trace 1" in captured.err


def test_an_engine_that_does_not_start_is_a_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    assert main([str(tmp_path / "missing"), "--providers", "stock"]) == 1
    assert "missing" in capfd.readouterr().err
