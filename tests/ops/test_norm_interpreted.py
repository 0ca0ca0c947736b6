"""The GPU's norm kernels without a GPU: values, strides and tails. Which bits a GPU gives is tested on one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_kernels_normalise_and_turn_in_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    process = subprocess.run(
        [sys.executable, "-m", "tests.ops.interpreted_norm"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("ok") == 3
