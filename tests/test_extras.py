"""The plugin needs none of the packages that its commands need: those are the extra [verify], and a command says so."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.import_graph import at_run_time, imports, outside, room_of
from tests.fakes.server import MODELS, fake_server
from tests.verify.receipts import receipt
from tests.verify.test_receipt_cli import ENVIRONMENT, answer
from vllm_batch_invariant.cli import COMMANDS, OF_VERIFY
from vllm_batch_invariant.installing import how_to_install

ROOT = Path(__file__).parents[1]
OUTSIDE = outside(imports())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CLIENT = "vllm_batch_invariant.resume"
"""Runs beside a client of OpenAI's, who has its package."""
WITHOUT = ("coverage", "settings")
"""Commands that work without the extra."""

OF_ENGINES = ("torch", "vllm", "numba", "triton")
"""Modules that a laptop lacks which verifies a server elsewhere."""

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


def run(*arguments: str, without: Sequence[str] = OF_VERIFY) -> tuple[str, str]:
    """The status and the output of a command in a process that has none of the packages."""
    code = IN_A_PROCESS.format(packages=without, arguments=list(arguments))
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    status, _, text = printed.partition("|")
    return status, text


def requirements(extra: str) -> set[str]:
    """Names of the packages of an extra, as modules."""
    names = (re.match(r"[\w-]+", requirement)[0] for requirement in PROJECT["optional-dependencies"][extra])
    return {name.replace("-", "_") for name in names}


def test_the_extra_is_what_the_command_line_knows_of_it() -> None:
    assert requirements("verify") == set(OF_VERIFY)


def test_the_plugin_itself_needs_two_small_packages() -> None:
    assert [re.match(r"[\w-]+", requirement)[0] for requirement in PROJECT["dependencies"]] == ["filelock", "packaging"]


BROUGHT = {
    "vllm": {"torch", "triton", "numpy", "huggingface_hub", "PIL", "zmq"},
    "numba": {"llvmlite"},
    "vllm-ascend": {"batch_invariant_ops", "flash_attn_npu_v3"},
}
"""Modules that a declared package brings, and whose code here is of no use without that package."""
TRAINERS = {"verl", "ray"}
"""A trainer that people have, whose releases do not all admit one vLLM."""


def test_every_import_is_declared() -> None:
    """Not merely brought along by something else, such as vLLM, in whose absence some commands run."""
    declared = {re.match(r"[\w-]+", one)[0] for extra in PROJECT["optional-dependencies"].values() for one in extra}
    declared |= {re.match(r"[\w-]+", one)[0] for one in PROJECT["dependencies"]}
    declared = {"nvmath" if name == "nvmath-python" else name.replace("-", "_") for name in declared}
    imported = set().union(*OUTSIDE.values()) - sys.stdlib_module_names
    assert imported - declared - TRAINERS - set().union(*BROUGHT.values()) == set()


def test_only_the_commands_import_the_extra() -> None:
    known = set(OF_VERIFY)
    assert {module: packages & known for module, packages in OUTSIDE.items() if packages & known} == {
        module: packages & known
        for module, packages in OUTSIDE.items()
        if packages & known and (room_of(module) == "verify" or module == CLIENT)
    }


def test_an_import_of_the_extra_would_be_seen() -> None:
    [node] = at_run_time(ast.parse("def late():\n    from rich.table import Table"))
    assert node.module == "rich.table"
    assert "openai" in set().union(*OUTSIDE.values())


@pytest.mark.parametrize("command", ["reproduce", "check", "bisect", "receipt", "make-checkpoint"])
def test_a_command_without_the_extra_is_one_line_that_says_what_to_install(command: str) -> None:
    status, text = run(command, *{"receipt": ("compare", "a", "b"), "reproduce": ()}.get(command, ("MODEL",)))
    assert status == "2"
    line = rf"vllm-batch-invariant {command}: \w+ is not installed: {re.escape(how_to_install('verify'))}\n"
    assert re.fullmatch(line, text)


@pytest.mark.parametrize("command", ["reproduce", "certificate", "coverage", "settings", "make-checkpoint"])
def test_help_needs_nothing(command: str) -> None:
    status, text = run(command, "--help")
    assert (status, text.startswith(f"usage: vllm-batch-invariant {command} ")) == ("0", True)


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (("coverage",), "0", "| Devices | "),
        (("reproduce", "--base-url", "URL", "--samples", "2"), "2", "lacks vllm:num_requests_running"),
        (("check", "--base-url", "URL", "--quick"), "2", "lacks vllm:num_requests_running"),
        (
            ("receipt", "make", "NEW", "--base-url", "URL", "--prompt", "a prompt"),
            "0",
            "the bits of 6 logprobs of fake",
        ),
        (("receipt", "verify", "KEPT", "--base-url", "URL", "--concurrent", "0"), "1", "differs: at token "),
        (("receipt", "compare", "KEPT", "KEPT"), "0", "equal: 3 tokens"),
        (("bisect", "x/y"), "2", "bisect: PyTorch is not installed in this Python"),
        (("certificate",), "2", "certificate: PyTorch is not installed in this Python"),
        (("make-checkpoint", "NEW"), "2", "make-checkpoint: PyTorch is not installed in this Python"),
        (("check", "x/y"), "2", "an engine needs vLLM in this Python; give --base-url of a server"),
        (("reproduce", "x/y"), "2", "a server needs vLLM in this Python; give --base-url of one that runs elsewhere"),
        (("reproduce", "x/y", "--offline"), "2", "an engine needs vLLM in this Python"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_on_a_laptop_without_pytorch_a_command_works_or_is_one_line(
    tmp_path: Path, arguments: tuple[str, ...], status: str, line: str
) -> None:
    kept = tmp_path / "kept.json"
    receipt().save(kept)
    with fake_server(models=MODELS, batch_invariant=ENVIRONMENT, completions=answer()) as url:
        words = {"URL": url, "KEPT": str(kept), "NEW": str(tmp_path / "new.json")}
        got, text = run(*(words.get(word, word) for word in arguments), without=OF_ENGINES)
    assert (got, "Traceback" in text) == (status, False), text
    assert line in text


@pytest.mark.parametrize("command", WITHOUT)
def test_a_command_that_needs_nothing_works_without_the_extra(command: str) -> None:
    assert command in COMMANDS
    status, text = run(command)
    assert status == "0"
    assert len(text.splitlines()) > 3


def test_the_line_that_gives_the_speed_of_the_readme_brings_what_it_takes() -> None:
    line = "pip install '.[cuda]'"
    assert line in Path(ROOT / "README.md").read_text()
    assert requirements("cuda") == {"vllm", "nvmath_python"}
