"""Without an NPU, every test of one is skipped for a reason that says what is missing."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.ascend.hardware import machine


@pytest.fixture
def installed(monkeypatch):
    """Makes torch_npu a module that imports, or fails to, and finds NPUs, or none."""

    def install(error: Exception | None = None, available: bool = False) -> None:
        def load(name: str) -> None:
            if error is not None:
                raise error

        monkeypatch.setattr(machine, "find_spec", lambda name: object())
        monkeypatch.setattr(importlib, "import_module", load)
        monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: available), raising=False)

    return install


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    assert machine.absence.__wrapped__() == "needs an Ascend NPU: torch_npu is not installed"


def test_a_package_that_does_not_load_is_quoted_by_one_line(installed):
    installed(ImportError("libascendcl.so: cannot open shared object file\nsource set_env.sh first"))
    expected = "needs an Ascend NPU: torch_npu does not load, libascendcl.so: cannot open shared object file"
    assert machine.absence.__wrapped__() == expected
    installed(OSError())
    assert machine.absence.__wrapped__().endswith("does not load, OSError")


def test_a_package_that_finds_no_npu_says_so(installed):
    installed()
    assert machine.absence.__wrapped__() == "needs an Ascend NPU: torch_npu finds none, see npu-smi info"
    installed(available=True)
    assert machine.absence.__wrapped__() is None


@pytest.mark.skipif(machine.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_the_command_says_once_why_all_were_skipped():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "npu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("All were skipped: needs an Ascend NPU: torch_npu is not installed.") == 1
    assert " passed" not in done.stdout
