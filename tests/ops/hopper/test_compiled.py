"""The installed Triton compiles for a Hopper what the definition of its arithmetic has written down. Beside the
interpreted tests, as other compilations are.
"""

import pytest

from tests.ops.test_compiled_kernels import program

pytestmark = pytest.mark.interpreted


def test_the_compiler_does_what_the_definition_says() -> None:
    done = program("hopper.compiled")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("ok ") > 12
