"""Kernels compile for GPUs that are not there; beside the interpreted tests, because it takes a core for a minute."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.interpreted


def program(name: str) -> subprocess.CompletedProcess[str]:
    """A program of ``tests.ops`` with the installed Triton."""
    return subprocess.run(
        [sys.executable, "-m", f"tests.ops.{name}"],
        cwd=Path(__file__).parents[2],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_the_kernels_compile_with_the_installed_triton_and_fit_in_shared_memory() -> None:
    pytest.importorskip("triton")
    run = program("compiled_kernels")
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_launch_says_what_is_fused_and_no_batch_has_a_kernel_compiled_anew() -> None:
    pytest.importorskip("triton")
    run = program("launched_kernels")
    assert run.returncode == 0, run.stdout + run.stderr
