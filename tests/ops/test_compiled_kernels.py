"""Kernels compile for GPUs that are not there: those that changed since compiled_variants.json was recorded, and all of
them with ``--exhaustive``. Beside the interpreted tests, because that takes a core for a minute.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.check_triton import unpacked

pytestmark = pytest.mark.interpreted
ROOT = Path(__file__).parents[2]
OLDEST = "3.6.0"
"""Triton of vLLM 0.26, the oldest that the mode serves on a GPU."""


def program(name: str, *arguments: str, path: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
    """A program of ``tests.ops`` with the installed Triton, or one in a folder of its ``path``."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # large tensors that nobody reads: memory is kept for the next, or the system clears every page of it anew
    environment |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return subprocess.run(
        [sys.executable, "-m", f"tests.ops.{name}", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


ASSEMBLY = """
        /*0000*/                   LDL R1, [R1] ;          /* 0x000 */
        /*0010*/                   STL [R1], R2 ;          /* 0x000 */
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0030*/                   {operation} ;
        /*0040*/              @P0  BRA {inner} ;
        /*0050*/                   LDL R3, [R1+0x8] ;
        /*0060*/                   BRA 0x10 ;
        /*0070*/                   BRA 0x70 ;
"""
"""Of a loop from 10 to 60 with another inside."""


@pytest.mark.parametrize(
    ("operation", "inner", "spills"),
    [
        ("NOP", "0x20", 0),
        ("STL [R1], R2", "0x20", 1),
        ("LDL.64 R2, [R1]", "`(.L_x) 0x20", 1),
        ("LDL R2, [R1]", "0x50", 3),
    ],
)
def test_registers_that_are_moved_in_an_innermost_loop_are_counted(operation: str, inner: str, spills: int) -> None:
    pytest.importorskip("triton")
    from tests.ops.compiled_kernels import spills_in_loops

    assert spills_in_loops(ASSEMBLY.format(operation=operation, inner=inner)) == spills


def test_the_kernels_compile_with_the_installed_triton_and_fit_in_shared_memory(pytestconfig: pytest.Config) -> None:
    pytest.importorskip("triton")
    run = program("compiled_kernels", *["--more"] * pytestconfig.option.exhaustive)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_variant_is_another_one_where_what_is_compiled_changes() -> None:
    pytest.importorskip("triton")
    run = program("variant_keys")
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_launch_says_what_is_fused_and_no_batch_has_a_kernel_compiled_anew() -> None:
    pytest.importorskip("triton")
    run = program("launched_kernels")
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_front_end_of_the_oldest_triton_takes_every_kernel() -> None:
    """Which is not the installed one: what it compiles, and runs interpreted, need not be what GPUs have."""
    pytest.importorskip("triton")
    try:
        version, folder = unpacked(f"triton=={OLDEST}")
    except subprocess.CalledProcessError as error:
        if os.environ.get("REAL_MODEL") == "required":  # as in continuous integration
            raise
        pytest.skip(f"no Triton {OLDEST}: {error.stderr[-300:]}")
    assert version == OLDEST
    run = program("compiled_kernels", "--first", path=(folder, ROOT))
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"Triton {OLDEST}" in run.stdout
