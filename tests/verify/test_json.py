"""Every command writes its result as JSON, to a file or to stdout, in a format that says what it is."""

import json
from pathlib import Path

import pytest

from tests.fakes.server import LISTED, METRICS, MODELS, Page, completion, fake_server
from tests.verify.commands import Ended, ended
from tests.verify.receipts import receipt
from tests.verify.test_check_cli import fake_engine
from tests.verify.test_receipt_cli import ENVIRONMENT, answer
from vllm_batch_invariant.cli import COMMANDS, main
from vllm_batch_invariant.version import __version__

__all__ = ["fake_engine"]
OF_EVERY = {"format", "version", "status", "began", "seconds", "written_by", "environment", "machine"}
PAGES = {"models": MODELS, "metrics": METRICS, "batch_invariant": ENVIRONMENT, "version": Page({"version": "0.32.0"})}

CASES = {
    "coverage": (("coverage",), {"covered", "refused"}),
    "settings": (("settings",), {"settings"}),
    "make-checkpoint": (("make-checkpoint", "new", "--layers", "1"), {"folder", "bytes", "seed", "shape"}),
    "receipt compare": (
        ("receipt", "compare", "kept.json", "kept.json"),
        {"first", "second", "equal", "promised", "notes", "difference", "compared"},
    ),
    "receipt make": (
        ("receipt", "make", "new.json", "--base-url", "URL"),
        {"receipt", "sha256", "model", "digest", "tokens", "mode"},
    ),
    "receipt verify": (
        ("receipt", "verify", "kept.json", "--base-url", "URL", "--concurrent", "0"),
        {"receipt", "equal", "promised", "notes", "difference", "compared"},
    ),
    "check": (("check", "x/y", "--quick"), {"target", "preset", "arguments", "partial", "runs"}),
}


def run(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> Ended:
    with fake_server(**PAGES, completions=answer()) as url:
        return ended(capsys, *(url if word == "URL" else word for word in arguments))


@pytest.mark.parametrize("command", CASES)
def test_the_object_says_its_format_and_holds_what_is_documented(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    receipt().save("kept.json")
    arguments, own = CASES[command]
    status, out, err = run(capsys, (*arguments, "--json", "-"))
    data = json.loads(out)
    assert (data["format"], data["version"], data["status"]) == (f"vllm-batch-invariant {command}", 1, status)
    assert data["written_by"] == __version__
    assert set(data) == OF_EVERY | own
    documented = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    assert {field for field in own if f"`{field}`" not in documented} - {"first", "second"} == set()
    assert err, "what is printed otherwise is on stderr"


def test_a_file_holds_the_same_and_stdout_has_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, _ = run(capsys, ("coverage", "--json", str(tmp_path / "coverage.json")))
    assert (status, out.startswith("| | covered |")) == (0, True)
    assert json.loads((tmp_path / "coverage.json").read_text())["format"] == "vllm-batch-invariant coverage"


def test_every_command_has_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [(command,) for command in COMMANDS if command != "receipt"]
    commands += [("receipt", each) for each in ("make", "verify", "compare")]
    for command in commands:
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        assert "--json FILE" in capsys.readouterr().out, command


def test_a_server_that_is_checked_is_told_in_json_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(models=MODELS, metrics=METRICS, completions=completion(LISTED)) as url:
        assert main(["check", "--base-url", url, "--quick", "--json", "-"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["target"] == url
    assert "server: holds run" in said.err


@pytest.mark.parametrize("command", ["receipt make", "receipt verify", "receipt compare", "check"])
def test_a_page_is_written_beside_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    receipt().save("kept.json")
    run(capsys, (*CASES[command][0], "--html", "page.html"))
    assert f"vllm-batch-invariant {command}" in Path("page.html").read_text()
