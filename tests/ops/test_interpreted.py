"""GPU kernels without a GPU: their logic in Triton's interpreter, not the bits of tensor cores."""

import pytest

from tests.ops import interpreted_programs


@pytest.mark.parametrize("program", interpreted_programs.CHECKS)
def test_the_kernels_compute_in_tritons_interpreter(program: str) -> None:
    pytest.importorskip("triton")
    status, output = interpreted_programs.result(program)
    assert status == 0, output
    assert output.count("ok") == interpreted_programs.CHECKS[program], output
