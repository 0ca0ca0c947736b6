"""A key goes where its user said, and nowhere else."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes.server import METRICS, MODELS, Page, fake_server
from tests.verify.commands import ended
from vllm_batch_invariant.verify.arguments import OneLineParser, add_base_url, check_base_url

OPENAIS = {
    "OPENAI_API_KEY": "sk-openai",
    "OPENAI_ADMIN_KEY": "sk-admin",
    "OPENAI_ORG_ID": "org-secret",
    "OPENAI_PROJECT_ID": "project-secret",
    "OPENAI_CUSTOM_HEADERS": "X-Mine: header-secret\nAuthorization: Bearer sk-header",
}
"""What OpenAI's client adds to every request where it finds it."""
PAGES = {"models": MODELS, "metrics": METRICS, "version": Page({"version": "0.26.0"})}
COMMANDS = {
    "make": ("receipt", "make", "new.json"),
    "verify": ("receipt", "verify", "kept.json", "--concurrent", "0"),
    "reproduce": ("reproduce", "--samples", "2"),
    "check": ("check", "--quick"),
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests.verify.receipts import receipt

    monkeypatch.chdir(tmp_path)
    receipt().save("kept.json")
    monkeypatch.setenv("SERVER_KEY", "sk-server")
    for name, value in OPENAIS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_what_the_environment_holds_for_openai_goes_to_no_other_server(
    capsys: pytest.CaptureFixture[str], command: Sequence[str]
) -> None:
    heard: list[tuple[str, dict[str, str]]] = []
    with fake_server(heard, **PAGES) as url:
        ended(capsys, *command, "--base-url", url)
    assert {path.rsplit("/", 1)[-1] for path, _ in heard} >= {"models", "completions"}
    sent = " ".join(value for _, headers in heard for value in headers.values())
    assert [secret for secret in ("sk-", "secret") if secret in sent] == []


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_key_of_the_variable_named_goes_to_the_api_and_to_no_other_page(
    capsys: pytest.CaptureFixture[str], command: Sequence[str]
) -> None:
    heard: list[tuple[str, dict[str, str]]] = []
    with fake_server(heard, **PAGES) as url:
        *_, err = ended(capsys, *command, "--base-url", url, "--api-key-env", "SERVER_KEY")
    keys = {path: headers.get("authorization") for path, headers in heard}
    assert {path for path, key in keys.items() if key == "Bearer sk-server"} >= {"/v1/models", "/v1/completions"}
    assert {key for path, key in keys.items() if not path.startswith("/v1/")} <= {None}
    assert "unencrypted" not in err, "it stays on this machine"
    assert "sk-" not in err


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_server_that_wants_a_key_is_one_line_that_says_how_to_give_it(
    capsys: pytest.CaptureFixture[str], command: Sequence[str]
) -> None:
    with fake_server(models=Page({"error": "Unauthorized"}, 401)) as url:
        status, _, err = ended(capsys, *command, "--base-url", url)
    assert status == 2
    assert err.splitlines()[-1].endswith("name the environment variable with its key: --api-key-env NAME")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("variable", "value", "line"),
    [
        ("NO_SUCH_VARIABLE", None, "there is no such environment variable"),
        ("SERVER_KEY", "", "there is no such environment variable, or it is empty"),
        ("SERVER_KEY", "sk-secret\n", "holds a line break"),
        ("SERVER_KEY", "sk-secrét", "holds a line break or another character that no key has"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_key_that_cannot_be_sent_is_one_line_that_does_not_tell_it(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: Sequence[str],
    variable: str,
    value: str | None,
    line: str,
) -> None:
    if value is not None:
        monkeypatch.setenv(variable, value)
    status, _, err = ended(capsys, *command, "--base-url", "http://127.0.0.1:1", "--api-key-env", variable)
    assert (status, err.count("\n")) == (2, 1)
    assert line in err
    assert "sk-" not in err


def test_a_key_and_a_password_are_refused_because_only_one_would_be_sent(capsys: pytest.CaptureFixture[str]) -> None:
    address = "http://user:secret@127.0.0.1:1"
    status, _, err = ended(capsys, "reproduce", "--base-url", address, "--api-key-env", "SERVER_KEY")
    assert (status, "in the key's place" in err, "secret" in err) == (2, True, False)


@pytest.mark.parametrize("command", [("receipt", "make", "new.json"), ("reproduce",), ("check",)])
def test_a_key_without_a_server_is_refused(capsys: pytest.CaptureFixture[str], command: Sequence[str]) -> None:
    model = ("x/y",) if command == ("check",) else ("--model", "x/y")
    status, _, err = ended(capsys, *command, *model, "--api-key-env", "SERVER_KEY")
    assert status == 2
    assert "--api-key-env is for a server that already runs" in err


@pytest.mark.parametrize(
    ("address", "warned"),
    [
        ("http://example.com:8000", True),
        ("http://127.0.0.1.example.com", True),
        ("http://10.0.0.1", True),
        ("https://example.com", False),
        ("http://127.0.0.1:8000", False),
        ("http://localhost/v1", False),
        ("http://[::1]:8000", False),
    ],
)
def test_a_key_that_leaves_this_machine_unencrypted_is_said_before_it_does(
    capsys: pytest.CaptureFixture[str], address: str, warned: bool
) -> None:
    parser = OneLineParser()
    add_base_url(parser)

    def key(*arguments: str) -> str | None:
        options = parser.parse_args(["--base-url", address, *arguments])
        check_base_url(parser, options)
        return options.api_key

    assert key("--api-key-env", "SERVER_KEY") == "sk-server"
    err = capsys.readouterr().err
    assert err.endswith(" unencrypted\n") == warned
    assert err.count("\n") == warned
    assert key() is None
    assert capsys.readouterr().err == ""
