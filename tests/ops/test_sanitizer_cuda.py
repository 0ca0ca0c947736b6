"""No kernel of ours touches memory that is not its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def sanitize(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Small cases of every kernel under compute-sanitizer, each tensor in an allocation of its own.

    Calls that the driver refuses are not reported: Triton 3.8 tries an attribute of functions that an H200 has not.
    """
    tool = shutil.which("compute-sanitizer") or pytest.skip("needs compute-sanitizer")
    options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    command = [tool, *options, sys.executable, "-m", "tests.ops.sanitized"]
    return subprocess.run(
        [*command, *arguments],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "VLLM_BATCH_INVARIANT_LINEAR": "triton"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_small_cases_of_every_kernel_are_clean():
    run = sanitize()
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


def test_a_read_outside_is_seen():
    run = sanitize("outside")
    assert run.returncode == 9, run.stdout[-4000:] + run.stderr[-2000:]
    assert "Invalid __global__ read" in run.stdout
