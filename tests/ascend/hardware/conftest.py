"""The same tests on the CPU and on an Ascend NPU: ``pytest -m npu`` runs those of the NPU alone.

No NPU was at hand when they were written: every test with a ``device`` has run on the CPU, none has run on an NPU.
"""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.ascend.hardware.machine import absence, description

_LINES: list[str] = []


@pytest.fixture
def npu() -> str:
    """The device of an NPU, for tests that only it can run; skipped without one."""
    if (reason := absence()) is not None:
        pytest.skip(reason)
    return "npu"


@pytest.fixture(params=["cpu", pytest.param("npu", marks=pytest.mark.npu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device on which a test puts its tensors; skipped where there is none. On the CPU tests are only tried, in one
    dtype.
    """
    dtype = getattr(request.node, "callspec", None) and request.node.callspec.params.get("dtype")
    if request.param == "cpu" and dtype in (torch.float32, torch.float16) and "accuracy" not in request.node.name:
        pytest.skip("tried on the CPU in other dtypes")
    return request.param if request.param == "cpu" else request.getfixturevalue("npu")


@pytest.fixture
def report(device: str) -> Iterator[Callable[[str], None]]:
    """Takes a line to print below the results, for what is worth knowing of an NPU and is no failure."""
    yield lambda line: _LINES.append(f"{device}: {line}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = terminalreporter.stats.get("skipped")
    if skipped and config.option.markexpr == "npu" and (reason := absence()) is not None:
        terminalreporter.write_line(f"All were skipped: {reason}.")
    of_npu = [line for line in _LINES if line.startswith("npu")]
    if of_npu:
        terminalreporter.section("what was found on this NPU")
        for line in [description(), *of_npu]:
            terminalreporter.write_line(line)
