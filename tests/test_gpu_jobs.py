"""The script that runs commands on several GPUs at a time. Its commands here use none."""

import json
import time
from pathlib import Path

import pytest

from scripts import gpu_jobs

ROOT = Path(__file__).parents[1]
SPAN = 'began=$(date +%s%N); sleep 0.6; echo "$CUDA_VISIBLE_DEVICES" $began $(date +%s%N)'


def run(out: Path, jobs: str, *arguments: str) -> int:
    (out / "jobs.toml").write_text(jobs)
    return gpu_jobs.main([str(out / "jobs.toml"), str(out), "--seconds", "60", "--gpus", "2", *arguments])


def job(name: str, command: str = SPAN, **more: object) -> str:
    values = {"name": name, "command": command} | more
    return "[[job]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def spans(out: Path, *names: str) -> list[tuple[str, int, int]]:
    """Of jobs the GPUs, the beginning and the end."""
    found = [(out / f"{name}.log").read_text().split() for name in names]
    return [(gpus, int(began), int(ended)) for gpus, began, ended in found]


def overlap(one: tuple[str, int, int], other: tuple[str, int, int]) -> bool:
    return one[1] < other[2] and other[1] < one[2]


def test_jobs_share_gpus_and_each_leaves_a_log_and_a_line(tmp_path: Path) -> None:
    assert run(tmp_path, "".join(map(job, "abc")), "--each", "1") == 0
    a, b, c = spans(tmp_path, *"abc")
    assert {a[0], b[0]} == {"0", "1"}
    assert overlap(a, b)
    assert not (overlap(a, c) and overlap(b, c))
    lines = (tmp_path / "jobs.txt").read_text()
    assert lines.count("begins on") == lines.count("exit status 0") == 3


def test_a_job_that_wants_its_gpus_alone_has_them_alone(tmp_path: Path) -> None:
    assert run(tmp_path, job("a") + job("alone", gpus=2, alone=True) + job("b")) == 0
    a, alone, b = spans(tmp_path, "a", "alone", "b")
    assert alone[0] == "0,1"
    assert not overlap(alone, a)
    assert not overlap(alone, b)


def test_of_jobs_on_several_gpus_only_so_many_run_at_a_time(tmp_path: Path) -> None:
    jobs = job("a", gpus=2) + job("b", gpus=2) + job("c")
    assert run(tmp_path, jobs, "--shared", "1") == 0
    a, b, c = spans(tmp_path, *"abc")
    assert not overlap(a, b)
    assert overlap(a, c)


@pytest.mark.parametrize(
    ("jobs", "status", "said"),
    [
        (job("bad", "exit 3"), 1, "bad: exit status 3"),
        (job("wide", gpus=4), 2, "wide was not begun"),
        (job("bad", "exit 1") + job("wide", gpus=4), 1, "wide was not begun"),
    ],
)
def test_what_failed_and_what_was_not_begun_is_said(tmp_path: Path, jobs: str, status: int, said: str) -> None:
    assert run(tmp_path, jobs) == status
    assert said in (tmp_path / "jobs.txt").read_text()


def test_a_job_whose_time_is_over_says_what_it_has_and_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_jobs, "LAST_WORDS", 1.0)
    polite = "trap 'echo $((1000 - 7)); exit' INT; sleep 60 & wait"  # bash is there at once
    stubborn = "(trap '' INT; setsid sleep 61 & wait); sleep 60"
    began = time.monotonic()
    jobs = job("polite", polite, seconds=3) + job("stubborn", stubborn, seconds=1)
    assert run(tmp_path, jobs) == 2
    assert time.monotonic() - began < 20
    assert "993" in (tmp_path / "polite.log").read_text()
    assert (tmp_path / "jobs.txt").read_text().count("its time was over") == 2
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _reads(path) == b"sleep\x0061\x00"]
    assert left == []


def _reads(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("name", ["untried", "covered"])
def test_the_lists_are_of_tests_that_exist(name: str) -> None:
    jobs = gpu_jobs.read(ROOT / "scripts" / f"{name}.toml")
    assert len({one.name for one in jobs}) == len(jobs)
    files = [word for one in jobs for word in one.command.split() if word.startswith("tests/")]
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert max(one.gpus for one in jobs) <= 8


def test_jobs_of_a_file_share_a_command(tmp_path: Path) -> None:
    assert run(tmp_path, 'command = "echo {tests}"\n[[job]]\nname = "a"\ntests = "tests/a.py -k b"\n') == 0
    assert (tmp_path / "a.log").read_text() == "tests/a.py -k b\n"


def test_an_unknown_key_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="minutes"):
        run(tmp_path, job("a", minutes=3))
