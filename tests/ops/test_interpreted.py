"""GPU kernels without a GPU: their logic in Triton's interpreter, not the bits of tensor cores."""

import pytest

from tests.ops import interpreted_programs


@pytest.mark.parametrize("program", interpreted_programs.INTERPRETED)
def test_the_kernels_compute_in_tritons_interpreter(program: str) -> None:
    passes(program)


@pytest.mark.parametrize("program", ["compiled_kernels"])
def test_the_kernels_compile_with_the_installed_triton_and_fit_in_shared_memory(program: str) -> None:
    passes(program)


def passes(program: str) -> None:
    pytest.importorskip("triton")
    status, output = interpreted_programs.result(program)
    assert status == 0, output
    assert sum(line.startswith("ok ") for line in output.splitlines()) == interpreted_programs.CHECKS[program], output
