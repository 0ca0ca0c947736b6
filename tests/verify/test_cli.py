"""The one parser of all commands, and how a signal ends them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.server import Page, fake_server
from tests.verify.commands import ended
from vllm_batch_invariant.cli import COMMANDS, _reason
from vllm_batch_invariant.version import __version__

ROOT = Path(__file__).parents[2]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(capsys, "--version") == (0, f"vllm-batch-invariant {__version__}\n", "")


@pytest.mark.parametrize("arguments", [(), ("receipt",)])
def test_without_a_command_help_is_printed(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    status, out, err = ended(capsys, *arguments)
    assert (status, err) == (2, "")
    assert out.startswith(f"usage: {' '.join(('vllm-batch-invariant', *arguments))} [-h]")


def test_a_misspelt_command_is_one_line_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    said = "vllm-batch-invariant: there is no command 'chek'; did you mean check?; see --help\n"
    assert ended(capsys, "chek", "MODEL") == (2, "", said)
    assert "there are check, reproduce" in ended(capsys, "xyz")[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_says_its_whole_name_and_no_empty_default(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    status, out, _ = ended(capsys, command, "--help")
    assert status == 0
    assert out.startswith(f"usage: vllm-batch-invariant {command} ")
    assert [text for text in ("default: None", "default: )", "``", "default: []") if text in out] == []


def test_a_command_without_a_servers_address_does_not_speak_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--base-url" not in ended(capsys, "bisect", "--help")[1]
    assert "with --base-url, the name of the served model" in " ".join(ended(capsys, "check", "--help")[1].split())


HEAVY = ("torch", "vllm", "numba", "transformers", "openai", "httpx", "pydantic")
"""Packages that take from a quarter of a second to many seconds to import."""


@pytest.mark.parametrize("command", [*COMMANDS, "receipt make", "receipt verify", "receipt compare"])
def test_help_imports_nothing_that_takes_long(command: str) -> None:
    program = f"""
import sys
from vllm_batch_invariant.cli import main
try:
    main({[*command.split(), "--help"]!r})
except SystemExit:
    print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"usage: vllm-batch-invariant {command} ")
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["coverage", "settings"])
def test_a_reader_that_has_read_enough_is_no_failure(command: str) -> None:
    """As `| head` is."""
    running = subprocess.Popen(
        [sys.executable, "-m", "vllm_batch_invariant.cli", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert running.stdout
    running.stdout.close()
    assert running.stderr
    said = running.stderr.read()
    assert (running.wait(), said) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("vllm-batch-invariant re", {"reproduce", "receipt"}),
        ("vllm-batch-invariant check MODEL --j", {"--json", "--junit", "--jobs"}),
        ("vllm-batch-invariant receipt ver", {"verify"}),
        ("vllm-batch-invariant check MODEL --fuzz 1 --without js", {"json"}),
    ],
)
def test_a_shell_completes_commands_options_and_choices(tmp_path: Path, line: str, completed: set[str]) -> None:
    pytest.importorskip("argcomplete")
    told = tmp_path / "told"
    of_shell = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    subprocess.run(
        [sys.executable, "-m", "vllm_batch_invariant.cli"],
        env=os.environ | of_shell | {"_ARGCOMPLETE_STDOUT_FILENAME": str(told)},
        check=True,
    )
    assert {word.strip() for word in told.read_text().split("\n")} == completed


def test_what_is_left_over_is_refused_under_the_name_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    said = "vllm-batch-invariant settings: unrecognized arguments: --unheard-of; see --help\n"
    assert ended(capsys, "settings", "--unheard-of") == (2, "", said)


@pytest.mark.parametrize("command", [("coverage",), ("make-checkpoint", "new"), ("receipt", "compare", "a", "b")])
def test_a_wrong_setting_is_refused_before_anything_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "true")
    status, out, err = ended(capsys, *command)
    assert (status, out, list(tmp_path.iterdir())) == (2, "", [])
    assert err.startswith(f"vllm-batch-invariant {command[0]}: VLLM_BATCH_INVARIANT='true' is not a value")


COMMANDS_OF_SERVERS = [("reproduce",), ("check", "--quick"), ("receipt", "make", "new.json")]


@pytest.mark.parametrize("command", COMMANDS_OF_SERVERS)
def test_a_web_page_in_the_place_of_a_server_is_said_to_be_one(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    with fake_server(models=Page("<html>welcome</html>")) as url:
        status, _, err = ended(capsys, *command, "--base-url", url)
    assert status == 2
    assert "its answer at /v1/models is no list of models in JSON; is it a web page or a proxy?" in err


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("http://127.0.0.1:9", "connection refused"),
        ("http://no-such-host.invalid", "the name of the host is not known"),
    ],
)
def test_why_there_is_no_connection_is_said(capsys: pytest.CaptureFixture[str], address: str, why: str) -> None:
    status, _, err = ended(capsys, "reproduce", "--base-url", address)
    assert status == 2
    assert why in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_server_that_was_started(tmp_path: Path, number: signal.Signals) -> None:
    pid = tmp_path / "pid"
    start = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # whatever ran the tests has ignored
        "from vllm_batch_invariant.cli import main; from vllm_batch_invariant.verify.harness import server; "
        "server._module = lambda model: ['tests.verify.fake_server']; sys.exit(main(['reproduce', 'x/y']))"
    )
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-c", start],
        env=os.environ | {"PYTHONPATH": paths, "FAKE_SERVER": "hangs", "FAKE_SERVER_PID": str(pid)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err.endswith("vllm-batch-invariant reproduce: interrupted; nothing was decided\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from vllm_batch_invariant import cli; "
    code += "cli._catch_signals(); assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_error_that_says_nothing_by_its_name_is_told_without_it() -> None:
    assert _reason(Exception("No space left on device (os error 28)")) == (
        "the run failed: No space left on device (os error 28)"
    )
    assert _reason(KeyError("layer")) == "the run failed: KeyError: 'layer'"
