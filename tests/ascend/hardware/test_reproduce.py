"""The reproducibility run on a real engine.

On an NPU it needs vllm-ascend and a model: ``ASCEND_TEST_MODEL=MODEL pytest -m npu``. ``ASCEND_TEST_SERVE_ARGS`` is
passed on to ``vllm serve``, instead of what the mode demands there. It never ran there.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_batch_invariant.envs import FLAG

DEMANDED = "--no-enable-chunked-prefill --no-enable-prefix-caching"
COMMAND = (sys.executable, "-m", "vllm_batch_invariant.cli", "reproduce")


def reproduce(model: str, report: Path, *options: str) -> dict:
    """Run the command with the mode on; returns its report."""
    command = [*COMMAND, "--model", model, "--json", str(report), *options]
    done = subprocess.run(command, env=os.environ | {FLAG: "1"}, capture_output=True, text=True)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    [result] = json.loads(report.read_text())["results"]
    return result


def assert_one_answer(result: dict, samples: int) -> None:
    assert result["comparison"]["samples"] == samples
    assert result["comparison"]["completions"] == result["comparison"]["logprob_sequences"] == 1
    assert max(int(size) for size in result["batches"]["running"]) > 1


@pytest.mark.npu
def test_a_server_on_an_npu_gives_one_answer(npu, tmp_path):
    model = os.environ.get("ASCEND_TEST_MODEL")
    if not model:
        pytest.skip("set ASCEND_TEST_MODEL to a model that vllm-ascend can serve")
    if find_spec("vllm_ascend") is None:
        pytest.skip("needs vllm-ascend")
    options = [f"--serve-args={os.environ.get('ASCEND_TEST_SERVE_ARGS', DEMANDED)}", "--samples", "1000"]
    assert_one_answer(reproduce(model, tmp_path / "report.json", *options), 1000)
