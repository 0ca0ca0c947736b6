"""What others wrote cannot act on a terminal, nor look like what the command says."""

import copy
import json
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.server import METRICS, Page, fake_server
from tests.verify.commands import ended
from tests.verify.receipts import CPU, receipt, rewritten
from vllm_batch_invariant.verify import printing
from vllm_batch_invariant.verify.answers import Answer, GeneratedToken
from vllm_batch_invariant.verify.bisect import report as bisect_report
from vllm_batch_invariant.verify.bisect.engine import BisectResult as Bisection
from vllm_batch_invariant.verify.bisect.engine import Case, Setting
from vllm_batch_invariant.verify.bisect.recording import Coverage
from vllm_batch_invariant.verify.harness.load import Run
from vllm_batch_invariant.verify.harness.metrics import BatchLog, Reading
from vllm_batch_invariant.verify.outcome import NoTestError
from vllm_batch_invariant.verify.printing import consoles, one_line, printable
from vllm_batch_invariant.verify.receipt import Receipt
from vllm_batch_invariant.verify.reproduce.report import ReproduceResult, print_report

FALSE_LINE = "equal: 3 tokens and the bits of 9 logprobs"
HOSTILE = f"x\n{FALSE_LINE}\r\x1b[8m\x9b2J\u202e\u200b\u2028\u0336 [red]:100:[/] \ud800 {' ' * 200}{FALSE_LINE}"
"""A line break and as many spaces, each before a false line; escape sequences in 7 and 8 bits; text turned round, of no
width and struck through; rich's markup and an emoji's name; half of a surrogate pair.
"""

SENT = HOSTILE.replace("\ud800", "")
"""As JSON that is read again can say it."""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("Größe 模型 модель", "Größe 模型 модель"),
        ("back\\slash", "back\\slash"),
        ("a\nb\r\tc\0", r"a\nb\r\tc\x00"),
        ("\x1b[8mhidden\x9b0m\x7f", r"\x1b[8mhidden\x9b0m\x7f"),
        ("\u202eturned\u2066", r"\u202eturned\u2066"),
        ("zero\u200b\u200d\ufeffwidth\u00ad", r"zero\u200b\u200d\ufeffwidth\xad"),
        ("line\u2028paragraph\u2029next\x85", r"line\u2028paragraph\u2029next\x85"),
        ("struck\u0336 vary\ufe0f", r"struck\u0336 vary\ufe0f"),
        ("blank\u2800\u3164\u00a0", r"blank\u2800\u3164\xa0"),
        ("a   b", r"a \x20\x20b"),
        ("file-\udcff", r"file-\udcff"),
        ("\U000e0041tag", r"\U000e0041tag"),
        ("", ""),
    ],
)
def test_a_text_shows_as_it_is_or_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_an_error_that_quotes_anything_is_one_printable_line() -> None:
    for said in (str(NoTestError(HOSTILE)), one_line(ValueError(HOSTILE)), one_line(NoTestError(HOSTILE))):
        assert said.isprintable()
        assert "\n" not in said


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a receipt there is a string that may say anything."""
    held = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in held:
        if isinstance(value, str) and not re.fullmatch("[0-9a-f]{8}|[0-9a-f]{64}", value):
            yield (*path, key)
        yield from leaves(value, (*path, key))


def changed(path: tuple[Any, ...], text: str) -> str:
    """A receipt of another completion, with one of its strings replaced, and hashed again."""

    def change(data: dict[str, Any]) -> None:
        data["completion"]["logprobs"][0] = "bf000001"
        data["sampling"]["stop"] = ["</s>"]
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = text

    return rewritten(receipt(), change)


STRINGS = [
    ("note",),
    ("sampling", "stop", 0),
    *(path for path in leaves(json.loads(receipt().to_json())) if path not in (("format",), ("sha256",))),
]


def said_by(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    """The exit status and every line on stdout and stderr."""
    status, out, err = ended(capsys, *arguments)
    return status, (out + err).split("\n")


def assert_printable(lines: list[str], path: object = None) -> None:
    assert [line for line in lines if not line.isprintable()] == [], path
    assert [line for line in lines if line.startswith("equal:") or "   " in line] == [], path


@pytest.mark.parametrize("path", STRINGS, ids=str)
def test_no_string_of_a_receipt_prints_a_line_or_hides_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, path: tuple[Any, ...]
) -> None:
    receipt().save(tmp_path / "a.json")
    (tmp_path / "b.json").write_text(changed(path, SENT))
    (tmp_path / "plain.json").write_text(changed(path, "something"))
    status, lines = said_by(capsys, "receipt", "compare", tmp_path / "a.json", tmp_path / "b.json")
    assert status in (1, 2)
    assert_printable(lines, path)
    plain, expected = said_by(capsys, "receipt", "compare", tmp_path / "a.json", tmp_path / "plain.json")
    assert (status, len(lines)) == (plain, len(expected))


@pytest.mark.parametrize("section", ["versions", "device", "engine", "reductions"])
def test_no_name_of_what_an_engine_reports_prints_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, section: str
) -> None:
    receipt().save(tmp_path / "a.json")
    value = {"size": 1} if section == "reductions" else "1"
    text = rewritten(receipt(), lambda data: data["environment"][section].update({SENT: value}))
    (tmp_path / "b.json").write_text(text)
    status, lines = said_by(capsys, "receipt", "compare", tmp_path / "a.json", tmp_path / "b.json")
    assert status == 0
    assert [line for line in lines if not line.isprintable()] == []
    assert [line.startswith(("engines:", section, "model", "equal:")) for line in lines] == [True] * 3 + [False]


def test_no_file_name_prints_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = [tmp_path / f"a\n{FALSE_LINE}\x1b[8m", tmp_path / "b\udcff"]
    for name in names:
        name.write_text(changed(("completion", "finish_reason"), "stop") if name == names[0] else receipt().to_json())
    status, lines = said_by(capsys, "receipt", "compare", *names)
    assert status == 2, "they are of different requests"
    assert_printable(lines)
    status, lines = said_by(capsys, "receipt", "compare", names[0], tmp_path / f"none\n{FALSE_LINE}")
    assert status == 2
    assert_printable(lines)
    assert len(lines) == 2
    status, lines = said_by(capsys, "receipt", "make", names[0], "--base-url", f"http://x\n{FALSE_LINE}")
    assert status == 2
    assert_printable(lines)


def hostile_server(choice: dict[str, Any] | None, **pages: Page) -> AbstractContextManager[str]:
    """A server that says :data:`SENT` wherever it can say anything."""
    model = {"id": SENT, "object": "model", "created": 0, "owned_by": SENT, "root": SENT, "max_model_len": 512}
    found = {"models": Page({"object": "list", "data": [model]}), "version": Page({"version": SENT})}
    if choice is not None:
        completion = {"id": "1", "object": "text_completion", "created": 0, "model": SENT, "choices": [choice]}
        found["completions"] = Page(completion)
    return fake_server(**found | pages)


TOKEN = {"index": 0, "text": SENT, "finish_reason": SENT}


def answer(token: str) -> dict[str, Any]:
    logprobs = {"tokens": [token], "token_logprobs": [-0.5], "top_logprobs": [{token: -0.5}]}
    return TOKEN | {"logprobs": logprobs, "prompt_token_ids": [11, 12, 13], "token_ids": [5]}


@pytest.mark.parametrize(
    ("status", "pages"),
    [
        (2, {"completions": Page({"error": {"message": HOSTILE, "type": "x", "code": 400}}, 400)}),
        (2, {"completions": Page(SENT, 400)}),
        (2, {"batch_invariant": Page({SENT: 1})}),
        (2, {"batch_invariant": Page(SENT, 500)}),
        (2, {"models": Page({"error": {"message": HOSTILE}}, 400)}),
        (2, {}),
    ],
)
def test_nothing_that_a_server_says_prints_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, status: int, pages: dict[str, Page]
) -> None:
    receipt().save(tmp_path / "kept.json")
    for command in (
        ("receipt", "make", tmp_path / "new.json", "--model", "another"),
        ("receipt", "make", tmp_path / "new.json"),
        ("receipt", "verify", tmp_path / "kept.json", "--concurrent", 0),
        ("reproduce", "--samples", 2, "--concurrency", 2),
        ("check", "--quick"),
    ):
        with hostile_server(None, metrics=METRICS, **pages) as url:
            ended, lines = said_by(capsys, *command, "--base-url", url)
        assert ended == status, (command, lines)
        assert_printable(lines, command)


def test_a_receipt_of_a_hostile_server_is_made_and_verified_in_printable_lines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    environment = copy.deepcopy(CPU)
    page = Page({"mode": True, "versions": environment.versions | {"vllm": SENT}})
    receipt().save(tmp_path / "kept.json")
    with hostile_server(answer("token_id:5"), batch_invariant=page) as url:
        status, lines = said_by(capsys, "receipt", "make", tmp_path / "new.json", "--base-url", url)
        assert status == 0
        assert_printable(lines)
        verify = "receipt", "verify", tmp_path / "kept.json", "--concurrent", 0
        status, lines = said_by(capsys, *verify, "--base-url", url)
    assert status == 1
    assert_printable(lines)
    assert sum(line.startswith(("equal", "differs")) for line in lines) == 1
    assert Receipt.load(tmp_path / "new.json").completion.finish_reason == TOKEN["finish_reason"], "kept as it came"


def test_the_page_and_the_report_of_a_hostile_server_are_printable(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, report = tmp_path / "page.html", tmp_path / "report.json"
    with hostile_server(answer(SENT), metrics=METRICS) as url:
        status, lines = said_by(capsys, "check", "--quick", "--base-url", url, "--html", page, "--json", report)
    assert status == 0
    assert [line for line in lines if not line.isprintable()] == []
    assert json.loads(report.read_text())["runs"][0]["info"]["model"] == SENT, "for machines"
    shown = page.read_text()
    assert [line for line in shown.split("\n") if not line.isprintable()] == []
    assert f">{FALSE_LINE}" not in shown
    assert r"\n" + FALSE_LINE in shown
    assert ":100:" in shown


def differing(token: str) -> ReproduceResult:
    """A run of two answers that differ in their tokens."""
    steps = [[GeneratedToken(text, -0.5, ((text, -0.5),))] for text in ("token_id:1", token)]
    answers = tuple(Answer.of(name, step) for name, step in zip(("plain", token), steps, strict=True))
    log = BatchLog([Reading(1, {}), Reading(2, {})])
    return ReproduceResult.of("server", Run(answers, 1.0, 0, 0, 0), log, {"mode": "off"})


def test_tokens_that_differ_are_shown_as_they_are_and_on_their_own_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")

    def shown(token: str) -> list[str]:
        print_report(consoles()[0], [differing(token)])
        return capsys.readouterr().out.split("\n")

    lines = shown(SENT)
    assert [line for line in lines if not line.isprintable()] == []
    assert len(lines) == len(shown("token_id:2"))
    assert any("[red]:100:[/]" in line for line in lines), "neither markup nor an emoji"


def test_a_models_name_is_shown_as_it_is_in_the_title_of_a_bisection(capsys: pytest.CaptureFixture[str]) -> None:
    case, coverage = Case((1,), ((2,),), 0, 1), Coverage(1, 0, 1, {}, {}, {})
    result = Bisection(None, coverage, (2,), None, None, answers_recorded=True, unrecorded_differ=False)
    setting = Setting("models/[red]:100:\x1b[8m", "0", "cpu", "bfloat16", "1", "vllm-batch-invariant")
    bisect_report.print_results(consoles()[0], setting, [(case, result)])
    out = capsys.readouterr().out
    assert r"models/[red]:100:\x1b[8m: a prompt of 1 token alone" in out
    assert [line for line in out.split("\n") if not line.isprintable()] == []


@pytest.mark.parametrize(
    ("on_path", "called", "beside", "program"),
    [
        ("ENV/vllm-batch-invariant", "ENV/vllm-batch-invariant", True, "vllm-batch-invariant"),
        ("ENV/vllm-batch-invariant", "ENV/other.py", True, "vllm-batch-invariant"),
        ("OTHER/vllm-batch-invariant", "ENV/vllm-batch-invariant", True, "ENV/vllm-batch-invariant"),
        (None, "ENV/vllm-batch-invariant", True, "ENV/vllm-batch-invariant"),
        (None, "ENV/other.py", True, "ENV/vllm-batch-invariant"),
        (None, "ENV/other.py", False, "ENV/python -m vllm_batch_invariant.cli"),
    ],
)
def test_a_command_that_is_offered_can_be_pasted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_path: str | None, called: str, beside: bool, program: str
) -> None:
    """Whether or not its environment is activated."""

    def place(text: str) -> str:
        return text.replace("ENV", str(tmp_path))

    if beside:
        (tmp_path / "vllm-batch-invariant").touch()
    monkeypatch.setattr(printing, "which", lambda name: on_path and place(on_path))
    monkeypatch.setattr(sys, "argv", [place(called)])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert printing.command_line("check", "a folder") == f"{place(program)} check 'a folder'"
