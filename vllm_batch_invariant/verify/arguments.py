"""Command lines: the parser of all commands, types of arguments, checks that commands share, and the arguments of
``reproduce``.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from .answers import PROMPT, RequestSpec
from .printing import printable
from .report.files import why_not_writable


class OneLineParser(argparse.ArgumentParser):
    """Ends with status 2 and one line if an argument is bad."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)}; see --help\n")


def at_least(lowest: int) -> Callable[[str], int]:
    """The type of an argument: a whole number not below ``lowest``."""

    def number(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {lowest}")
        return int(text)

    return number


def not_negative(text: str) -> float:
    """The type of an argument: a finite number not below 0."""
    with suppress(ValueError):
        number = float(text)
        if 0 <= number < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")


def above_zero(text: str) -> float:
    """The type of an argument: a finite number above 0."""
    number = not_negative(text)
    if number:
        return number
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check; a bad argument ends the process with status 2 and one line."""
    parser = OneLineParser(
        prog="reproduce",
        description="Send one request many times, with concurrent requests that vary the batch, and compare the "
        "answers bit for bit. Exit status: 0 all are identical, 1 they differ, 2 the run was no test, 130 or 143 it "
        "was interrupted.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    target = parser.add_argument_group("server or engine")
    add_base_url(target)
    target.add_argument("--model", help="a model to serve here; with --base-url, the name of the served model")
    target.add_argument("--serve-args", default="", help="more arguments for `vllm serve`, in one string")
    target.add_argument("--compare", action="store_true", help="serve with VLLM_BATCH_INVARIANT=0, then with 1")
    target.add_argument("--offline", action="store_true", help="run the model through vllm.LLM, without a server")
    request = parser.add_argument_group("request")
    request.add_argument("--prompt", default=PROMPT, help="the prompt")
    kind = request.add_mutually_exclusive_group()
    kind.add_argument("--chat", action="store_true", default=False, help="send it to /v1/chat/completions")
    kind.add_argument("--completions", dest="chat", action="store_false", help="send it to /v1/completions")
    request.add_argument("--max-tokens", type=at_least(1), default=64, help="tokens to generate")
    request.add_argument("--temperature", type=not_negative, default=0.0, help="0 is greedy")
    request.add_argument("--seed", type=int, default=0, help="seed of the request and of the load")
    request.add_argument("--logprobs", type=at_least(1), default=5, help="candidates to compare at each position")
    request.add_argument("--ignore-eos", action="store_true", help="always generate --max-tokens")
    load = parser.add_argument_group("load")
    load.add_argument("--samples", type=at_least(2), default=1000, help="number of times the request is sent")
    load.add_argument(
        "--concurrency", type=at_least(2), default=128, help="most requests in flight, samples and others"
    )
    load.add_argument("--timeout", type=not_negative, default=3600, help="seconds after which a run ends as no test")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--html", type=Path, help="also write an HTML page to this file")
    options = parser.parse_args(argv)
    _check(parser, options)
    options.serve_args = shlex.split(options.serve_args)
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not options.base_url and not options.model:
        parser.error("nothing to test: give --base-url of a server or --model to serve")
    if options.base_url and (options.offline or options.compare or options.serve_args):
        parser.error("--base-url is a server that already runs: leave out --offline, --compare and --serve-args")
    check_base_url(parser, options)
    if options.compare and options.offline:
        parser.error("--compare starts two servers: leave out --offline, or run --offline once with each setting")
    check_common(parser, options, "--model")


def check_common(parser: OneLineParser, options: argparse.Namespace, model: str) -> None:
    """Check the model (named ``model`` in the message), engine arguments, report files and prompt of any command."""
    check_model(parser, options, model)
    for report in ("json", "html"):
        path = getattr(options, report, None)
        if path and (why := why_not_writable(path)):
            parser.error(f"--{report} {path}: {why}")
    if getattr(options, "prompt", None) == "":
        parser.error("--prompt is empty")


def add_base_url(parser: argparse._ActionsContainer) -> None:
    """Add the options of every command that can send requests to a server."""
    parser.add_argument("--base-url", help="a running server, such as http://127.0.0.1:8000")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the server's API key")


def check_base_url(parser: OneLineParser, options: argparse.Namespace) -> None:
    """Check the address of a server, if there is one, and set ``options.api_key``. It is None unless a variable is
    named: another key of the environment is not for this server.
    """
    options.api_key = None
    if options.base_url is None:
        if options.api_key_env is not None:
            parser.error("--api-key-env is for a server that already runs: it goes with --base-url")
        return
    try:
        url = urlsplit(options.base_url)
        usable = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:  # not a port, or not an IPv6 address
        usable = False
    if not usable:
        parser.error(f"--base-url {options.base_url!r} is not an http address")
    if options.api_key_env is not None:
        if url.username or url.password:
            parser.error("--api-key-env: the address holds a password, which would be sent in the key's place")
        options.api_key = _key(parser, options.api_key_env)
        if url.scheme == "http" and not is_here(options.base_url):
            to = printable(url.hostname)
            print(f"{parser.prog}: the key of {options.api_key_env} goes to {to} unencrypted", file=sys.stderr)


def _key(parser: OneLineParser, name: str) -> str:
    key = os.environ.get(name, "")
    if not key:
        parser.error(f"--api-key-env {name}: there is no such environment variable, or it is empty")
    if not (key.isascii() and key.isprintable()):  # a key that cannot be sent would be quoted in an error
        parser.error(f"--api-key-env {name}: its value holds a line break or another character that no key has")
    return key


def is_here(url: str) -> bool:
    """Whether an address is of this machine."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def check_model(parser: OneLineParser, options: argparse.Namespace, model: str) -> None:
    """Check a model to load (named ``model`` in the message), and the engine arguments."""
    if options.model and not getattr(options, "base_url", None):
        path = Path(options.model).expanduser()
        is_path = options.model.startswith(("/", ".", "~")) or path.is_dir()
        if is_path and not any(file.is_file() for file in (path, path / "config.json", path / "params.json")):
            parser.error(f"{model} {options.model}: no model there (no config.json)")
    try:
        shlex.split(options.serve_args)
    except ValueError as error:
        parser.error(f"--serve-args: {error}")


def address(base_url: str) -> str:
    """The address of a server for a report, without a password."""
    url = urlsplit(base_url)
    return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()


def spec_from(options: argparse.Namespace) -> RequestSpec:
    """The request of the options."""
    return RequestSpec(
        prompt=options.prompt,
        chat=options.chat,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        logprobs=options.logprobs,
        ignore_eos=options.ignore_eos,
    )
