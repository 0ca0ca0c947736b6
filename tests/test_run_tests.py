"""``scripts/run_tests.py`` with small commands in the places of pytest's."""

import os
import re
import sys
from pathlib import Path

import pytest

from scripts import marks, run_tests
from scripts.run_tests import BEGIN, END, HEADER, Part, recorded, run


def part(name: str, code: str, **more: object) -> Part:
    return Part(name, (sys.executable, "-c", code), **more)


def counts(outcome: str, status: int = 0) -> str:
    return f"print('=== {outcome} in 0.10s ==='); raise SystemExit({status})"


@pytest.mark.parametrize("beside", [True, False])
def test_every_part_runs_once_and_its_status_and_counts_are_told(
    beside: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [part("second", counts("1 failed", 1)), part("third", counts("2 passed"))]
    done = run(part("first", counts("4 passed, 1 skipped")), others, beside)
    assert {ran.name: (ran.status, ran.outcome) for ran in done} == {
        "first": (0, "4 passed, 1 skipped"),
        "second": (1, "1 failed"),
        "third": (0, "2 passed"),
    }
    printed = capsys.readouterr().out
    assert [printed.count(text) for text in ("4 passed", "second:\n", "third begins")] == [1, 1, 1]


def test_a_part_that_pytest_did_not_count_has_its_exit_status() -> None:
    [ran] = run(part("first", "raise SystemExit(5)"), [], True)
    assert (ran.status, ran.outcome) == (5, "exit status 5")


def niceness(folder: Path, says: str, waits_for: str = "") -> str:
    """Code that tells its priority and makes a file, and ends when there is another file."""
    code = f"import os, pathlib, time; here = pathlib.Path({str(folder)!r}); (here / {says!r}).touch()"
    code += f"; print('===', os.nice(0) - {os.nice(0)}, 'passed in 1s')"
    wait = f"\nwhile not (here / {waits_for!r}).exists(): time.sleep(0.05)"
    return code + (wait if waits_for else "")


def test_only_what_runs_beside_engines_has_a_low_priority(tmp_path: Path) -> None:
    low = 19 - os.nice(0)
    others = [
        part("second", niceness(tmp_path, "second")),
        part("third", niceness(tmp_path, "third", "fourth")),
        part("fourth", niceness(tmp_path, "fourth")),
    ]
    done = run(part("first", niceness(tmp_path, "first", "third")), others, True)
    assert {ran.name: ran.outcome for ran in done} == {
        "first": "0 passed",
        "second": f"{low} passed",
        "third": f"{low} passed",
        "fourth": "0 passed",
    }


def test_parts_alone_have_the_usual_priority(tmp_path: Path) -> None:
    done = run(part("first", niceness(tmp_path, "first")), [part("second", niceness(tmp_path, "second"))], False)
    assert [(ran.name, ran.outcome) for ran in done] == [("first", "0 passed"), ("second", "0 passed")]


def test_a_failed_part_fails_the_run_and_a_missing_program_leaves_its_part_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = part("first", counts("1 passed")), part("second", counts("1 failed", 1))
    absent = part("third", counts("1 failed", 1), needs=("no-such-program",), without="nothing is built")
    monkeypatch.setattr(run_tests, "parts", lambda exhaustive: (good, absent))
    assert run_tests.main([]) == 0
    assert "no no-such-program, so nothing is built" in capsys.readouterr().out
    monkeypatch.setattr(run_tests, "parts", lambda exhaustive: (good, bad))
    assert run_tests.main([]) == 1
    assert "second: 1 failed" in capsys.readouterr().out


def test_a_run_takes_the_row_of_the_same_command_and_machine() -> None:
    page = f"before\n{BEGIN}{HEADER}{END}after\n"
    page = recorded(page, ("`make test`", "2026-01-01", "a CPU", "19", "all 3", "1 passed"))
    page = recorded(page, ("`make test`", "2026-01-02", "another CPU", "9", "all 3", "1 passed"))
    page = recorded(page, ("`make test`", "2026-01-03", "a CPU", "18", "all 3", "2 passed"))
    rows = marks.between(page, BEGIN + HEADER, END).splitlines()
    assert [row.split(" | ")[1:4] for row in rows] == [
        ["2026-01-02", "another CPU", "9"],
        ["2026-01-03", "a CPU", "18"],
    ]
    assert page.startswith("before\n")
    assert page.endswith(f"{END}after\n")


def test_the_page_has_a_place_for_runs() -> None:
    text = run_tests.PAGE.read_text()
    assert f"{BEGIN}{HEADER}" in text
    assert END in text


def test_the_parts_of_this_repository_are_commands() -> None:
    quick, every = run_tests.parts(False), run_tests.parts(True)
    assert [one.name for one in quick] == [one.name for one in every]
    assert ("--exhaustive" in quick[0].command, "--exhaustive" in every[0].command) == (False, True)
    made = Path("Makefile").read_text()
    assert all(f"\n{one.command[-1]}:" in made for one in quick if one.command[0] == "make")


def test_every_test_with_an_engine_is_in_a_folder_of_theirs() -> None:
    marked = [path for path in Path("tests").rglob("*.py") if re.search(r"mark\.(engine|server)\b", path.read_text())]
    assert len(marked) > 20
    assert [path for path in marked if "/".join(path.parts[:2]) not in run_tests.HAVE_ENGINES] == []
