"""``scripts/install.sh`` asks PyTorch's index for a CPU build unless one lies on this machine. pip and uv are fakes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
case "$*" in
"-m pip install"*) ;;
"-m pip config get global.find-links") [ -n "$LINKS" ] && echo "$LINKS" ;;
*) exec {python} "$@" ;;
esac
"""
UV = '#!/bin/sh\necho "links=$UV_FIND_LINKS"\necho "arguments=$*"\n'
HERE = "cp{}{}".format(*sys.version_info[:2])


def asked(folder: Path, links: str, device: str = "cpu") -> str:
    """What uv is given by the script."""
    programs = folder / "venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in (("python", PYTHON.format(python=sys.executable)), ("uv", UV)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    command = ["sh", "scripts/install.sh", str(folder / "venv"), device, sys.executable]
    environment = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"} | {"LINKS": links}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("wheel", ["numpy-2.0.0-py3-none-any.whl", "torch-2.13.0+cpu-cp39-cp39-linux_x86_64.whl"])
def test_wheels_on_this_machine_without_a_pytorch_for_it_leave_pytorchs_index_in(wheel: str, tmp_path: Path) -> None:
    (tmp_path / wheel).touch()
    found = asked(tmp_path, str(tmp_path))
    assert f"links={tmp_path}\n" in found
    assert "--torch-backend cpu" in found


def test_a_pytorch_on_this_machine_serves(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / f"torch-2.13.0+cpu-{HERE}-{HERE}-linux_x86_64.whl").touch()
    found = asked(tmp_path, f"https://wheels.invalid/company\nfile://{tmp_path}/wheels")
    assert f"links=https://wheels.invalid/company,file://{tmp_path}/wheels\n" in found
    assert "--torch-backend" not in found


def test_without_wheels_on_this_machine_pytorchs_index_serves(tmp_path: Path) -> None:
    found = asked(tmp_path, "")
    assert "links=\n" in found
    assert "--torch-backend cpu --override requirements/overrides-cpu.txt" in found


def test_an_installation_for_a_gpu_takes_the_usual_pytorch(tmp_path: Path) -> None:
    found = asked(tmp_path, "", "cuda")
    assert "--torch-backend" not in found
    assert ".[cuda,dev]" in found
