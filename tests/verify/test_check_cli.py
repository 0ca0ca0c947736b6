"""What ``check`` says and how it ends, with engines and servers that have no model and go wrong as told."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.fakes.server import LISTED, METRICS, MODELS, completion, fake_server
from tests.verify.commands import ended
from tests.verify.fake_driver import INFO
from vllm_batch_invariant.cli import main
from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.verify.check import command as check_command
from vllm_batch_invariant.verify.check.report import INTERRUPTED
from vllm_batch_invariant.verify.harness import worker

ROOT = Path(__file__).parents[2]
DRIVER = "tests.verify.fake_driver"


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(worker, "DRIVER", DRIVER)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv(FLAG, "1")


def ends(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, list[str]]:
    """The exit status, what is on stdout, and the lines on stderr."""
    said = ended(capsys, "check", *arguments)
    return said.status, said.out, said.lines


def cases(path: Path, run: int = 0) -> dict[str, dict]:
    data = json.loads(path.read_text())
    return {case["name"]: case for guarantee in data["runs"][run]["guarantees"] for case in guarantee["cases"]}


def test_concurrent_requests_that_an_engine_refuses_are_counted(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "refuses")
    status, _, _ = ends(capsys, "x/y", "--quick", "--json", str(tmp_path / "report.json"))
    assert status == 0
    detail = cases(tmp_path / "report.json")["with concurrent requests"]["detail"]
    assert re.search(r"\(\d+ of them refused: no structured outputs here\)", detail)


def test_candidates_that_change_places_break_the_batch_guarantee(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "lists")
    status, _, _ = ends(capsys, "x/y", "--quick", "--json", str(tmp_path / "report.json"))
    assert status == 1
    assert cases(tmp_path / "report.json")["with concurrent requests"]["outcome"] == "breaks"


def test_a_check_that_holds_is_status_0_and_says_so_of_every_guarantee(capsys, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    status, out, err = ends(capsys, "x/y", "--quick", "--json", str(report), "--serve-args", "--seed 3")
    assert (status, err) == (0, [])
    assert "VLLM_BATCH_INVARIANT=1: holds run, batch, schedule" in out
    proof = cases(report)["with concurrent requests"]["detail"]
    assert "concurrent requests with logprobs none/0/1/5/20" in proof
    assert all(name in proof for name in ("bad_words", "logit_bias", "n", "seed", "structured_outputs", "top_p"))
    assert "refused" not in proof
    found = cases(report)
    assert {case["outcome"] for case in found.values()} == {"holds"}
    names = {"with concurrent requests", "preemption", "from a warm prefix cache", "prefill in small chunks"}
    assert names <= set(found)
    info = json.loads(report.read_text())["runs"][0]["info"]
    assert info["flag"] == "1"
    assert info["arguments"] == ["x/y", "--seed", "3"]


def test_a_break_is_status_1_and_named_with_its_token(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "breaks")
    report = tmp_path / "report.json"
    status, out, _ = ends(capsys, "x/y", "--quick", "--json", str(report))
    assert status == 1
    assert "breaks batch (from token 3 on)" in out
    found = cases(report)
    assert found["with concurrent requests"]["outcome"] == "breaks"
    assert found["with concurrent requests"]["difference"].startswith("token 3, with 1 other: 100 instead of ")
    assert found["the same request again"]["outcome"] == "holds"


@pytest.mark.parametrize(
    ("wrong", "case", "reason"),
    [
        ("never-batches", "with concurrent requests", "never ran two requests at a time"),
        ("never-batches", "the same batch again", "never ran two requests at a time"),
        ("never-batches", "seeded sampling with concurrent requests", "never ran two requests at a time"),
        ("never-batches", "prompt logprobs with concurrent requests", "never ran two requests at a time"),
        ("never-preempts", "preemption", "did not preempt"),
    ],
)
def test_what_was_not_provoked_is_not_called_a_pass(
    capsys, monkeypatch, tmp_path: Path, wrong: str, case: str, reason: str
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", wrong)
    report = tmp_path / "report.json"
    assert ends(capsys, "x/y", "--quick", "--json", str(report))[0] == 2
    assert cases(report)[case]["outcome"] == "not tested"
    assert reason in cases(report)[case]["detail"]


@pytest.mark.parametrize(
    ("flag", "arguments", "tested", "said"),
    [
        (None, (), "1", "testing the mode (VLLM_BATCH_INVARIANT=1); --plain tests plain vLLM"),
        ("1", (), "1", "testing the mode (VLLM_BATCH_INVARIANT=1); --plain tests plain vLLM"),
        (None, ("--plain",), "0", "testing plain vLLM, because of --plain"),
        ("1", ("--plain",), "0", "testing plain vLLM, because of --plain"),
        ("0", (), "0", "testing plain vLLM, because of VLLM_BATCH_INVARIANT=0 in the environment"),
    ],
)
def test_the_mode_is_tested_unless_plain_vllm_is_chosen_and_the_first_line_says_so(
    capsys, monkeypatch, flag: str | None, arguments: tuple[str, ...], tested: str, said: str
) -> None:
    monkeypatch.setenv(FLAG, "1")  # what the command sets goes with the test
    if flag is None:
        monkeypatch.delenv(FLAG)
    elif flag == "0":
        monkeypatch.setenv(FLAG, flag)
    assert main(["check", "x/y", "--quick", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines()[0].startswith(said)
    assert f"VLLM_BATCH_INVARIANT={tested}: holds" in printed.out


def test_while_it_runs_a_check_says_how_many_of_its_cases_it_has_reached(capsys, monkeypatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(check_command, "waiting", lambda *_, **__: nullcontext(told.append))
    assert ends(capsys, "x/y", "--quick")[0] == 0
    reached = [re.fullmatch(r"VLLM_BATCH_INVARIANT=1: (\d+) of 13 cases: .+", line) for line in told]
    numbers = [int(found[1]) for found in reached]
    assert (numbers[0], max(numbers)) == (0, 12), "the last case is reached when its request has been answered"
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 8


def test_both_settings_are_compared_and_the_status_is_the_modes(capsys, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert ends(capsys, "x/y", "--quick", "--compare", "--json", str(report))[0] == 0
    runs = json.loads(report.read_text())["runs"]
    assert [run["info"]["flag"] for run in runs] == ["0", "1"]
    assert all(run["latency"]["tokens a second"] > 0 for run in runs)


def test_a_model_that_does_not_load_is_one_line_and_status_2(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "no-start")
    report = tmp_path / "report.json"
    status, out, [said] = ends(capsys, "x/y", "--quick", "--json", str(report))
    assert (status, out) == (2, "")
    assert said.startswith(
        "vllm-batch-invariant check: VLLM_BATCH_INVARIANT=1: the engine did not start: no such model"
    )
    assert not report.exists()


def test_an_engine_that_dies_leaves_what_was_found_and_is_status_2(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "dies")
    report = tmp_path / "report.json"
    status, _, [said] = ends(capsys, "x/y", "--quick", "--json", str(report))
    assert status == 2
    assert "the engine's process ended (status 7)" in said
    assert cases(report)["operations alone and in batches"]["outcome"] == "holds"
    assert "process ended" in cases(report)["with concurrent requests"]["detail"]


def test_an_engine_without_logprobs_is_one_line_and_status_2(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "no-logprobs")
    status, _, [said] = ends(capsys, "x/y", "--quick")
    assert status == 2
    assert "the engine returned no logprobs" in said


def test_an_answer_that_nobody_foresaw_is_one_line_and_status_2_and_not_1(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "nonsense")
    report = tmp_path / "report.json"
    status, _, [said] = ends(capsys, "x/y", "--quick", "--json", str(report))
    assert status == 2
    assert "the check failed: KeyError: 'batches'" in said
    assert cases(report)["operations alone and in batches"]["outcome"] == "holds"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_report_that_cannot_be_written_is_one_line_and_status_2_and_printed_all_the_same(capsys) -> None:
    status, out, [said] = ends(capsys, "x/y", "--quick", "--json", "/dev/full")
    assert (status, said) == (2, "vllm-batch-invariant check: /dev/full cannot be written: No space left on device")
    assert "VLLM_BATCH_INVARIANT=1: holds run, batch, schedule" in out


def test_a_report_that_cannot_be_shown_is_not_taken_for_a_break(capsys, monkeypatch) -> None:
    """As one whose reader went away, or whose plot fails: a traceback's status is 1, which says that bits differ."""

    def refuse(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(check_command, "print_report", refuse)
    status, _, [said] = ends(capsys, "x/y", "--quick")
    assert (status, said) == (
        2,
        "vllm-batch-invariant check: the report failed: BrokenPipeError: [Errno 32] Broken pipe",
    )
    monkeypatch.setenv("FAKE_ENGINE", "breaks")
    assert ends(capsys, "x/y", "--quick")[0] == 1


def test_a_context_that_is_too_short_is_one_line_and_status_2(capsys, monkeypatch) -> None:
    monkeypatch.setitem(INFO, "context", 300)
    monkeypatch.setattr(worker.Engine, "ask", lambda self, command, argument: INFO)
    status, _, [said] = ends(capsys, "x/y", "--quick")
    assert status == 2
    assert "context of 300 tokens is too short: a check needs 600" in said


@pytest.mark.parametrize("interruption", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_check_keeps_a_report_that_is_marked_partial_and_leaves_no_engine(
    tmp_path: Path, interruption: signal.Signals
) -> None:
    pid, report, page = tmp_path / "pid", tmp_path / "report.json", tmp_path / "report.html"
    start = (
        "import sys; from vllm_batch_invariant.cli import main; "
        "from vllm_batch_invariant.verify.harness import worker; "
        f"worker.DRIVER = {DRIVER!r}; sys.exit(main(['check', *sys.argv[1:]]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", start, "x/y", "--quick", "--json", str(report), "--html", str(page)],
        env=os.environ | {"FAKE_ENGINE": "hangs", "FAKE_ENGINE_PID": str(pid)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as in a shell's background job
    )
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(interruption)
    _, err = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    [_, said] = err.strip().splitlines()
    assert said.endswith(f"check: interrupted; the results so far are in {report} and {page}, marked partial")
    assert json.loads(report.read_text())["partial"] == "It was interrupted while VLLM_BATCH_INVARIANT=1 was checked."
    assert cases(report)["the same request again"]["outcome"] == "holds"
    assert cases(report)["preemption"]["detail"] == "interrupted"
    assert "Partial report." in page.read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_server_is_put_through_what_a_client_can_provoke_and_the_rest_is_said_to_be_untested(
    capsys, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    with fake_server(models=MODELS, metrics=METRICS, completions=completion(LISTED)) as url:
        status, out, err = ends(capsys, "--base-url", url, "--quick", "--json", str(report))
    assert (status, err) == (0, [])
    assert "server: holds run, batch (3 of 5 cases tested); could not test schedule" in out
    found = cases(report)
    assert found["with concurrent requests"]["outcome"] == "holds"
    assert found["preemption"]["outcome"] == "not tested"
    assert "a client does not choose the server's KV cache" in found["preemption"]["detail"]
    left_out = found["chats, tools, responses and streams with concurrent requests"]
    assert left_out["outcome"] == "not tested"
    assert "a chat was not compared: its answer has no logprobs" in left_out["detail"]
    assert "a response was not compared: Error code: 404" in left_out["detail"]
    assert "no hit of its prefix cache" in found["from a warm prefix cache"]["detail"]
