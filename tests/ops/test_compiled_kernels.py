"""Kernels compile for GPUs that are not there; beside the interpreted tests, because it takes a core for a minute."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.interpreted


def test_the_kernels_compile_with_the_installed_triton_and_fit_in_shared_memory() -> None:
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.compiled_kernels"],
        cwd=Path(__file__).parents[2],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
