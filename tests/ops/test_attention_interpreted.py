"""The GPU's attention kernels without a GPU: their logic, not the bits of tensor cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("program", "checks"), [("interpreted_attention", 15), ("interpreted_flex", 38)])
def test_the_kernels_compute_attention_in_tritons_interpreter(program: str, checks: int) -> None:
    pytest.importorskip("triton")
    process = subprocess.run(
        [sys.executable, "-m", f"tests.ops.{program}"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("ok") == checks
