"""The plugin needs none of the packages that its commands need: those are the extra [verify], and a command says so."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.test_imports import OUTSIDE, ROOT, imported, room
from vllm_batch_invariant.cli import COMMANDS, OF_VERIFY

PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
WITHOUT = ("coverage", "settings")
"""Commands that work without the extra."""

IN_A_PROCESS = """
import contextlib, io, sys
for name in {packages!r}:
    sys.modules[name] = None  # an import of it fails
from vllm_batch_invariant.cli import main
out, err = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
        status = main({arguments!r})
    except SystemExit as end:
        status = end.code
print(status, out.getvalue() + err.getvalue(), sep="|", end="")
"""


def run(*arguments: str) -> tuple[str, str]:
    """The status and the output of a command in a process that has none of the packages."""
    code = IN_A_PROCESS.format(packages=OF_VERIFY, arguments=list(arguments))
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    status, _, text = printed.partition("|")
    return status, text


def requirements(extra: str) -> set[str]:
    """Names of the packages of an extra, as modules."""
    names = (re.match(r"[\w-]+", requirement)[0] for requirement in PROJECT["optional-dependencies"][extra])
    return {name.replace("-", "_") for name in names}


def test_the_extra_is_what_the_command_line_knows_of_it() -> None:
    assert requirements("verify") == set(OF_VERIFY)


def test_the_plugin_itself_needs_one_package() -> None:
    assert [re.match(r"[\w-]+", requirement)[0] for requirement in PROJECT["dependencies"]] == ["filelock"]


def test_only_the_commands_import_the_extra() -> None:
    known = set(OF_VERIFY)
    assert {module: packages & known for module, packages in OUTSIDE.items() if packages & known} == {
        module: packages & known
        for module, packages in OUTSIDE.items()
        if packages & known and room(module) == "verify"
    }


def test_an_import_of_the_extra_would_be_seen() -> None:
    [node] = imported(ast.parse("def late():\n    from rich.table import Table"))
    assert node.module == "rich.table"
    assert "openai" in set().union(*OUTSIDE.values())


@pytest.mark.parametrize("command", ["reproduce", "check", "bisect", "receipt", "make-checkpoint"])
def test_a_command_without_the_extra_is_one_line_that_says_what_to_install(command: str) -> None:
    status, text = run(command, *{"receipt": ("compare", "a", "b"), "reproduce": ()}.get(command, ("MODEL",)))
    assert status == "2"
    assert re.fullmatch(
        rf"vllm-batch-invariant {command}: \w+ is not installed: pip install 'vllm-batch-invariant\[verify\]'\n", text
    )


@pytest.mark.parametrize("command", ["reproduce", "certificate", "coverage", "settings", "make-checkpoint"])
def test_help_needs_nothing(command: str) -> None:
    status, text = run(command, "--help")
    assert (status, text.startswith(f"usage: vllm-batch-invariant {command} ")) == ("0", True)


@pytest.mark.parametrize("command", WITHOUT)
def test_a_command_that_needs_nothing_works_without_the_extra(command: str) -> None:
    assert command in COMMANDS
    status, text = run(command)
    assert status == "0"
    assert len(text.splitlines()) > 3


def test_the_line_that_gives_the_speed_of_the_readme_brings_what_it_takes() -> None:
    line = "pip install '.[cuda]'"
    assert line in Path(ROOT.parent / "README.md").read_text()
    assert requirements("cuda") == {"vllm", "nvmath_python"}
