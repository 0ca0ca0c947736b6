"""The README says what the code does."""

import subprocess
import sys
import tomllib
from pathlib import Path

from vllm_batch_invariant import cli, envs
from vllm_batch_invariant.integration import coverage
from vllm_batch_invariant.integration.reviews import versions
from vllm_batch_invariant.verify import tables

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
LONGEST_ROW = 360
"""Characters."""


def test_the_tables_of_coverage_are_those_that_the_start_up_check_runs() -> None:
    assert f"{coverage.markdown()}\n" in (ROOT / "docs" / "coverage.md").read_text(), (
        "put what `vllm-batch-invariant coverage` prints into docs/coverage.md"
    )


def test_no_row_of_the_tables_of_coverage_is_a_paragraph() -> None:
    assert [row for row in coverage.markdown().splitlines() if len(row) > LONGEST_ROW] == []


def test_the_plugin_is_named_after_its_version_and_can_be_cited() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"Status: {'.'.join(version.split('.')[:2])}." in README


def test_the_versions_are_those_that_the_plugin_accepts() -> None:
    oldest, newest = (version.rpartition(".")[0] for version in versions.ends("cuda"))
    assert f"vLLM {oldest} to {newest}" in README


def test_every_command_is_mentioned() -> None:
    assert {name for name in cli.COMMANDS if f"vllm-batch-invariant {name}" not in README} == set()


def test_the_command_line_prints_the_table_and_the_settings() -> None:
    def run(*words: str) -> str:
        command = [sys.executable, "-m", "vllm_batch_invariant.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert run("coverage").strip() == coverage.markdown()
    assert all(variable.values[-1] in run("settings") for variable in envs.VARIABLES)


def test_a_wrong_setting_is_one_line_and_status_2(monkeypatch) -> None:
    monkeypatch.setenv(f"{envs.FLAG}_ATENTION", "flex")
    process = subprocess.run(
        [sys.executable, "-m", "vllm_batch_invariant.cli", "settings"], capture_output=True, text=True
    )
    assert process.returncode == 2
    assert process.stderr.startswith("vllm-batch-invariant settings: unknown environment variable")
    assert process.stderr.count("\n") == 1


def test_a_command_that_fails_as_nobody_foresaw_does_not_end_as_if_bits_differed(monkeypatch, capsys) -> None:
    def fail(*_: object) -> int:
        raise OSError("no such device\x1b[8m")

    monkeypatch.setattr(tables, "_settings", fail)
    assert cli.main(["settings"]) == 2
    said = "vllm-batch-invariant settings: the run failed: OSError: no such device\\x1b[8m\n"
    assert capsys.readouterr().err == said
