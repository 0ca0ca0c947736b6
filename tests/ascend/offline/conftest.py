"""These tests run in the environment that scripts/install_npu.sh makes; any other collects none of them.

triton-ascend owns the import name ``triton``, so it cannot be installed beside the Triton of a GPU.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import pytest

try:
    for package in ("triton-ascend", "ascendnpu-ir"):
        version(package)
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    from tests.ascend.offline.compiler import Compiler

    compiler = Compiler(tmp_path_factory.mktemp("hivm"))
    yield compiler
    compiler.close()


@pytest.fixture(scope="session")
def session_device(compiler, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    from tests.ascend.offline.driver import installed

    with installed(compiler, str(tmp_path_factory.mktemp("triton"))) as device:
        yield device


@pytest.fixture
def device(session_device) -> object:
    """A device that has launched nothing yet. It keeps what it has compiled."""
    from tests.ascend.offline.driver import CHIPS

    session_device.launches.clear()
    session_device.chip = CHIPS[0]
    return session_device
