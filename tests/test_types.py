"""What a user's type checker, editor and ``help`` see of the public names."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_batch_invariant
from vllm_batch_invariant import aten, compare

PACKAGE = Path(vllm_batch_invariant.__file__).parent
PROGRAM = """
import torch
from vllm_batch_invariant import batch_invariant_mode, is_batch_invariant_mode_enabled, set_batch_invariant_mode
from vllm_batch_invariant.compare import assert_same_bits, bitwise_comparison

with batch_invariant_mode(), set_batch_invariant_mode(True):
    on: bool = is_batch_invariant_mode_enabled()
found = bitwise_comparison(torch.ones(1), torch.ones(1))
reveal_type(batch_invariant_mode)
reveal_type(found)
"""
CONFIGURATION = """
[mypy]
strict = True
warn_unused_configs = False
follow_imports = silent
[mypy-torch.*]
follow_imports = skip
"""
"""PyTorch is not followed, because that takes a minute."""


def checked(program: str, folder: Path) -> subprocess.CompletedProcess:
    (folder / "program.py").write_text(program)
    (folder / "mypy.ini").write_text(CONFIGURATION)
    command = [sys.executable, "-m", "mypy", "program.py", "--cache-dir", str(folder / "cache")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_users_program_passes_a_strict_type_checker(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    found = checked(PROGRAM, tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert 'type is "def () -> contextlib.AbstractContextManager[None' in found.stdout
    assert 'type is "vllm_batch_invariant.compare.Comparison"' in found.stdout
    wrong = PROGRAM.replace("on: bool", "on: str").replace(
        "set_batch_invariant_mode(True)", "set_batch_invariant_mode(1.5)"
    )
    assert checked(wrong, tmp_path).stdout.count("error:") == 2


def test_the_package_says_that_it_has_types() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_completion_and_star_imports_see_every_public_name() -> None:
    assert set(aten.__all__) < set(vllm_batch_invariant.__all__) < set(dir(vllm_batch_invariant))
    for module in (vllm_batch_invariant, compare):
        assert all(inspect.getdoc(getattr(module, name)) for name in module.__all__ if callable(getattr(module, name)))
        assert all(hasattr(module, name) for name in module.__all__)
    public = {name for name, value in vars(compare).items() if getattr(value, "__module__", "") == compare.__name__}
    assert {name for name in public if not name.startswith("_")} <= set(compare.__all__)


def test_help_of_the_mode_says_what_it_leaves_out_and_whom_it_affects() -> None:
    said = inspect.getdoc(vllm_batch_invariant.batch_invariant_mode)
    assert all(word in said for word in ("whole process", "convolutions", "LSTM", "svd", "alpha"))
