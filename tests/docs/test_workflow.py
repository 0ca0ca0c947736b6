"""What is in .github/workflows and .pre-commit-config.yaml runs what the project has, and may do no more than read."""

import re
import shlex
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import yaml

from scripts import run_tests
from tests.docs.documents import PROJECT, ROOT, of_command

MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOW = (ROOT / ".github" / "workflows" / "test.yml").read_text()
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
RUNNERS_OWN = {"github.workflow", "github.ref"}


def jobs(workflow: str) -> dict[str, Any]:
    return yaml.safe_load(workflow)["jobs"]


def commands(workflow: str) -> Iterator[str]:
    """Every command, once for each entry of its job's matrix."""
    for job in jobs(workflow).values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for values in product(*matrix.values()):
            for line in (line for step in job["steps"] for line in step.get("run", "").splitlines()):
                for name, value in zip(matrix, values, strict=True):
                    line = line.replace(f"${{{{ matrix.{name} }}}}", value)
                yield line


def recipe(target: str) -> list[str]:
    """The commands of a target of the Makefile that this project's Python runs."""
    lines = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1].splitlines()
    return [line.partition("$(RUN) ")[2] for line in lines]


def test_every_command_is_one_of_the_makefile_or_a_script_that_is_there() -> None:
    found = list(commands(WORKFLOW))
    assert len(set(found)) == 9
    assert [problem for command in found for problem in of_command(command)] == []


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("make lint DEVICE", "make lint-all DEVICE", "the Makefile has no lint-all"),
        ("test-others,", "test-operations,", "the Makefile has no test-operations"),
        ("make test-site PYTHON", "make test-site PYHTON", "the Makefile has no PYHTON"),
        ("make lint DEVICE=cpu", "python scripts/lint.py", "there is no scripts/lint.py"),
    ],
)
def test_a_command_that_is_not_there_is_found(before: str, after: str, problem: str) -> None:
    changed = WORKFLOW.replace(before, after)
    assert problem in {found for command in commands(changed) for found in of_command(command)}


def test_every_part_of_make_test_runs_with_every_python() -> None:
    versions = {line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if "Python :: 3." in line}
    matrices = {name: job.get("strategy", {}).get("matrix", {}) for name, job in jobs(WORKFLOW).items()}
    assert set(matrices["lint"]["python"]) == set(matrices["test"]["python"]) == versions
    engines, lint, rest, *others = run_tests.parts(False)
    halves = [recipe(name)[0] for name in ("test-engines", "test-others")]
    assert [shlex.split(half)[2] for half in halves] == [engines.command[-1], rest.command[-1]]
    parts = {part.command[-1] if part.command[0] == "make" else f"test-{part.command[-1]}" for part in others}
    runs = {shlex.split(command)[1] for command in commands(WORKFLOW)}
    alone = {"test-witnesses", "test-fleet"}  # against the last release; with Ray
    assert runs == {"install", lint.command[-1], "test-engines", "test-others"} | parts | alone


def test_the_fleet_is_tested_where_ray_is_and_in_full() -> None:
    """Its tests are skipped without Ray, and are exhaustive: an ordinary run says nothing of them."""
    assert re.search(r"^test-fleet: \$\(VENV\)/installed-fleet$", MAKEFILE, re.MULTILINE)
    [words] = [shlex.split(command) for command in recipe("test-fleet")]
    assert words[:2] == ["pytest", "--exhaustive"]
    assert "tests/server/test_fleet.py" in words
    assert re.findall(r"^ray\[serve\]==", (ROOT / "requirements" / "fleet.txt").read_text(), re.MULTILINE)


def test_a_run_reads_the_checkout_and_ends() -> None:
    workflow = yaml.safe_load(WORKFLOW)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    assert all("permissions" not in job and 0 < job["timeout-minutes"] <= 90 for job in workflow["jobs"].values())
    actions = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert [action for action in actions if not re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", action)] == []
    named = set(re.findall(r"\$\{\{ (.*?) \}\}", WORKFLOW))
    assert named <= RUNNERS_OWN | {"matrix.python", "matrix.part"}, "no secrets, and nothing that a title can write"


def test_hooks_run_what_make_lint_runs_and_download_nothing() -> None:
    assert [repository["repo"] for repository in HOOKS] == ["local"]
    [hooks] = [repository["hooks"] for repository in HOOKS]
    assert {hook["language"] for hook in hooks} <= {"system", "pygrep"}
    of_python = [hook["entry"].removeprefix(".venv/bin/python -m ") for hook in hooks]
    linted = [command.removesuffix(" .") for command in recipe("lint")]
    assert [entry.replace(" --force-exclude", "") for entry in of_python[: len(linted)]] == linted
