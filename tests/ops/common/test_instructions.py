"""Kernels on a CPU have the same bits by every set of instructions, and in any number of threads."""

import os
import subprocess
import sys

import pytest

CPUS = {
    "AVX2": ("haswell", ""),
    "AVX-512": ("skylake-avx512", "+avx512f,+avx512vl,+avx512bw,+avx512dq,+fma,+f16c"),
    "SSE2 with FMA": ("generic", "+fma"),
    "SSE2, FMA by the C library": ("generic", ""),
}
"""NUMBA_CPU_NAME and NUMBA_CPU_FEATURES."""


def _flags() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return ""


def run(*arguments: str, **told: str) -> str:
    command = sys.executable, "-m", "tests.ops.common.digest", *arguments
    return subprocess.run(command, env=os.environ | told, check=True, capture_output=True, text=True).stdout


def digest(threads: int, name: str = "", features: str = "") -> str:
    return run(str(threads), **({"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features} if name else {}))


@pytest.fixture(scope="module")
def here() -> str:
    """That of the instructions that this CPU has."""
    return digest(1)


def test_two_threads_have_the_bits_of_one(here: str) -> None:
    assert digest(2) == here


@pytest.mark.parametrize("cpu", ["AVX2", *(pytest.param(cpu, marks=pytest.mark.exhaustive) for cpu in list(CPUS)[1:])])
def test_another_set_of_instructions_has_the_bits_of_this_cpu(cpu: str, here: str) -> None:
    if (cpu == "AVX-512") > ("avx512dq" in _flags()) or "avx2" not in _flags():
        pytest.skip("this CPU has no such instructions")
    assert digest(2, *CPUS[cpu]) == here


def test_stock_functions_have_other_bits_by_other_instructions() -> None:
    found = [run("1", "stock", ATEN_CPU_CAPABILITY=capability) for capability in ("default", "avx2")]
    assert found[0] != found[1]
