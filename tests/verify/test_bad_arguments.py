"""Every command refuses a bad argument in one line, with status 2."""

import pytest

from tests.verify.commands import ended

SERVER, NEW = ("--base-url", "http://127.0.0.1:1"), ("make", "new.json")
OF_EVERY = (
    ((), "nothing to "),
    (("--model", "./nowhere"), "model ./nowhere: no model there"),
    (("--model", "tests"), "no model there"),
    (("--model", "x/y", "--serve-args", "'"), "--serve-args: "),
    (("--model", "x/y", "--json", "no/such/folder/report.json"), "no such folder"),
    (("--model", "x/y", "--html", "no/such/folder/report.html"), "no such folder"),
    (("--model", "x/y", "--json", "tests"), "--json tests: Is a directory"),
    (("--no-such-option",), "unrecognized"),
)
OF_ALL_WITH_SERVERS = (
    (("--base-url", "localhost:8000"), "not an http address"),
    (("--base-url", "http://127.0.0.1:port"), "not an http address"),
    ((*SERVER, "--serve-args=--a"), "already runs"),
    ((*SERVER, "--plain"), "--plain goes without --base-url"),
)
COMMANDS = {"bisect": ("bisect",), "check": ("check",), "reproduce": ("reproduce",), "receipt": ("receipt", *NEW)}
OWN = {
    "bisect": (
        (("x/y", "--concurrent", "0"), "'0' is not a whole number of at least 1"),
        (("x/y", "--concurrent", "16", "none"), "'none' is not a whole number"),
        (("x/y", "--concurrent-tokens", "0"), "at least 1"),
        (("x/y", "--max-tokens", "0"), "at least 1"),
        (("x/y", "--place", "-1"), "at least 0"),
        (("x/y", "--prompt", ""), "--prompt is empty"),
        (("x/y", "--prompts", "no/such/file"), "--prompts no/such/file: "),
        (("x/y", "--prompts", "/dev/null"), "no prompt in it"),
        (("x/y", "--prompts", "/dev/null", "--concurrent", "3"), "leave out --concurrent"),
        (("x/y", "--serve-args", "--worker-extension-cls a.B"), "taken by the recording"),
        (("x/y", "--adapter", "."), "needs an engine with adapters: --serve-args='--enable-lora"),
        (("x/y", "--adapter", ".", "--serve-args=--enable-lora", "--case", "f.json"), "--concurrent and --adapter"),
    ),
    "check": (
        ((*SERVER, "--timeout", "soon"), "not a number from 0 on"),
        ((*SERVER, "--compare"), "already runs"),
        (("x/y", "--quick", "--thorough"), "not allowed with"),
        (("x/y", "--plain", "--compare"), "--plain goes without --compare"),
        (("x/y", "--model", "y/z"), "two models: x/y and --model y/z"),
        (("x/y", "--junit", "no/such/folder/r.xml"), "--junit no/such/folder/r.xml: no such folder"),
        (("x/y", "--junit", "r.xml", "--compare"), "--junit goes without --compare"),
        (("x/y", "--junit", "r.xml", "--fuzz", "1"), "--fuzz goes without --junit"),
        (("x/y", "--adapter", "nowhere", "--serve-args=--enable-lora"), "--adapter nowhere: no such folder"),
        (("x/y", "--adapter", "."), "needs an engine with adapters: --serve-args='--enable-lora"),
        ((*SERVER, "--adapter", "."), "for an engine that is started here"),
        (("x/y", "--adapter", ".", "--fuzz", "1"), "--fuzz goes without --adapter"),
    ),
    "reproduce": (
        ((*SERVER, "--compare"), "already runs"),
        ((*SERVER, "--offline"), "already runs"),
        (("x/y", "--compare", "--offline"), "leave out --offline"),
        (("x/y", "--samples", "1"), "at least 2"),
        (("x/y", "--samples", "many"), "at least 2"),
        (("x/y", "--concurrency", "1"), "at least 2"),
        (("x/y", "--logprobs", "0"), "at least 1"),
        (("x/y", "--temperature", "-1"), "from 0 on"),
        (("x/y", "--temperature", "1", "--seed", "-1"), "-1, which vLLM takes for no seed"),
        (("x/y", "--seed", "9223372036854775808"), "not a whole number of 64 bits"),
        (("x/y", "--seed", "x"), "not a whole number of 64 bits"),
        (("x/y", "--prompt", ""), "--prompt is empty"),
        (("x/y", "--chat", "--completions"), "not allowed with"),
        (("x/y", "--adapter", "."), "--adapter goes with --offline"),
        ((*SERVER, "--adapter", "."), "for an engine that is started here"),
    ),
    "receipt": (
        (("make",), "required: FILE"),
        (("mak", "new.json"), "invalid choice"),
        (("verify", "new.json"), "nothing to compute it"),
        ((*NEW, "x/y", "--model-files", "."), "--model-files is for a server"),
        ((*NEW, *SERVER, "--model-files", "nowhere"), "no such folder"),
        (("make", "no/such/folder/new.json", "x/y"), "cannot be written: no such folder"),
        (("make", "pyproject.toml", "x/y"), "exists, and a receipt overwrites nothing"),
        ((*NEW, "x/y", "--temperature", "-1"), "from 0 on"),
        ((*NEW, "x/y", "--temperature", "warm"), "from 0 on"),
        ((*NEW, "x/y", "--logprobs", "-1"), "at least 0"),
        ((*NEW, "x/y", "--prompt", ""), "--prompt is empty"),
        ((*NEW, "x/y", "--prompt", "a", "--prompt-file", "b"), "not allowed with"),
        (("verify", "nowhere.json", "x/y"), "cannot be read"),
        (("compare", "nowhere.json", "nowhere.json"), "cannot be read"),
    ),
}
CASES = [((*COMMANDS[name], *words), line) for name in COMMANDS for words, line in OF_EVERY]
CASES += [((*COMMANDS[name], *words), line) for name in [*COMMANDS][1:] for words, line in OF_ALL_WITH_SERVERS]
CASES += [((name, *words), line) for name, cases in OWN.items() for words, line in cases]


@pytest.mark.parametrize(("arguments", "line"), CASES)
def test_a_bad_argument_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    said = ended(capsys, *arguments)
    [err] = said.lines
    assert (said.status, said.out) == (2, "")
    assert err.startswith(f"vllm-batch-invariant {arguments[0]}")
    assert line in err
