"""The command ``vllm-batch-invariant``: one parser, and how every command ends."""

import argparse
import difflib
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from types import FrameType, ModuleType
from typing import Any

from .installing import how_to_install
from .verify.arguments import OneLineParser
from .verify.printing import PROGRAM
from .version import __version__

OF_VERIFY = (
    *("openai", "httpx", "pydantic", "prometheus_client", "rich"),
    *("tokenizers", "safetensors", "jinja2"),
)
"""Modules of the packages in the extra [verify], which no other part of this project imports."""
_OF_ENGINES = {"torch": "PyTorch", "vllm": "vLLM", "numba": "numba"}
"""Packages that an engine needs and a client does not, by module."""
_PACKAGES = (*OF_VERIFY, *_OF_ENGINES)
_OF_CLIENTS = ("rich", "pydantic", "httpx", "openai", "prometheus_client")


@dataclass(frozen=True)
class Command:
    """A command, whose module is imported only for it.

    Attributes:
        module: under ``verify``; has ``add_arguments(parser)``, which sets ``run(options, parser)``: it returns the
            exit status.
        about: what it does, in a line.
        needs: modules of packages without which it does nothing.
    """

    module: str
    about: str
    needs: tuple[str, ...] = ()

    def load(self) -> ModuleType:
        """Import the module."""
        return import_module(f".verify.{self.module}", __package__)


COMMANDS = {
    "check": Command(
        "check.command",
        "check which guarantees of the contract hold on this machine and model, or on a server",
        _OF_CLIENTS,
    ),
    "reproduce": Command(
        "reproduce.command",
        "send one request many times under a load that varies the batch, and compare the answers",
        _OF_CLIENTS,
    ),
    "bisect": Command(
        "bisect.command",
        "find the first layer and operation whose bits depend on concurrent requests",
        ("rich", "prometheus_client", "torch", "vllm"),
    ),
    "receipt": Command(
        "receipt.command",
        "make the receipt of a completion, compute it again elsewhere, compare two receipts",
        _OF_CLIENTS,
    ),
    "certificate": Command(
        "autotune_command",
        "print how matmuls and attention are computed on this GPU, and whose bits were compared",
        ("rich", "torch"),
    ),
    "coverage": Command("tables", "print what the mode covers and refuses, or whether a model would start"),
    "settings": Command("tables", "print every environment variable, its values and the one in force"),
    "make-checkpoint": Command(
        "demo_model",
        "write a small Qwen3 model with random weights and a tokenizer, to try things on",
        ("tokenizers", "safetensors", "torch"),
    ),
}


_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command in order: engines and servers that it started are stopped first."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0 equal, 1 different, 2 it could not be tested (also a bad argument, a
    bad setting or a refusal, in one line), 128 and the signal's number if it was interrupted.
    """
    if "_ARGCOMPLETE" in os.environ:
        return _complete()
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = next((word for word in words if not word.startswith("-")), "")
    began, before = datetime.now().astimezone(), _catch_signals()
    try:
        parser, chosen = _parsers(name, {name: COMMANDS[name].load()} if name in COMMANDS else {})
        options = parser.parse_args(words)
        if "run" not in options:
            (chosen or parser).print_help()
            return 2
        if missing := next((needed for needed in COMMANDS[name].needs if find_spec(needed) is None), None):
            return _end(name, _install(missing))
        _check_settings()
        options.began = began
        with redirect_stdout(sys.stderr) if _prints_json(options) else nullcontext():
            status = int(options.run(options, chosen))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as error:
        number = getattr(error, "number", signal.SIGINT)
        seen = "; ".join(getattr(error, "__notes__", ())) or "nothing was decided"
        return _end(name, f"interrupted; {seen}", 128 + number)
    except BrokenPipeError as error:
        return 128 + signal.SIGPIPE if _nobody_reads() else _end(name, _reason(error))
    except Exception as error:  # a traceback ends with status 1, which means that bits differ
        return _end(name, _reason(error))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _complete() -> int:
    """Answer a shell that completes a command line, by the extra [completion]: argcomplete ends the process."""
    import argcomplete

    argcomplete.autocomplete(_parsers("", {name: command.load() for name, command in COMMANDS.items()})[0])
    return 2


def _parsers(name: str, modules: Mapping[str, ModuleType]) -> tuple[OneLineParser, OneLineParser | None]:
    """The parser, and that of the command of this name. Commands whose modules are given get their arguments."""
    parser = OneLineParser(
        prog=PROGRAM,
        description="Batch-invariant inference for vLLM: what it covers, and commands that verify it.",
        epilog="Exit status: 0 equal, 1 different, 2 it could not be tested, 128 + N ended by the signal N.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    chosen = None
    for each, command in COMMANDS.items():
        of_command = commands.add_parser(each, help=command.about, description=f"{_capital(command.about)}.")
        if each in modules:
            of_command.set_defaults(command=each)
            modules[each].add_arguments(of_command)
        if each == name:
            chosen = of_command
            parser.error = chosen.error  # type: ignore[method-assign] # of this one object, of what is left over
    if name and chosen is None:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(COMMANDS)}"
        parser.error(f"there is no command {name!r}; {hint}")
    return parser, chosen


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _check_settings() -> None:
    """Refuse variables with a wrong name or value before a command spends time."""
    from . import envs

    envs.check_names()
    for variable in envs.VARIABLES:
        variable.read()


def _nobody_reads() -> bool:
    """Whether the reader of stdout has gone, such as ``head``; what is left is then dropped."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    gone = any(events & select.POLLERR for _, events in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def _prints_json(options: argparse.Namespace) -> bool:
    """Whether stdout is for JSON alone; tables then go to stderr."""
    json = getattr(options, "json", None)
    return json is not None and json.path is None


def _reason(error: Exception) -> str:
    """Why a command ends without a result, in a line."""
    from .errors import BadSetting, NotCovered
    from .verify.outcome import NoTestError
    from .verify.printing import one_line

    if isinstance(error, NoTestError | BadSetting | NotCovered):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and (missing := (error.name or "").partition(".")[0]) in _PACKAGES:
        return _install(missing)
    name = "" if type(error) is Exception else f"{type(error).__name__}: "  # which says nothing by its name
    return f"the run failed: {name}{one_line(error)}"


def _install(missing: str) -> str:
    """What to do about a package that is not installed."""
    if missing in OF_VERIFY:
        return f"{missing} is not installed: {how_to_install('verify')}"
    return (
        f"{_OF_ENGINES[missing]} is not installed in this Python: run this where vLLM is, or "
        f"{how_to_install('cuda', 'verify')}; on a CPU: {how_to_install('cpu', 'verify')}"
    )


def _end(name: str, line: str, status: int = 2) -> int:
    from .verify.printing import complain

    complain(name, line)
    return status


def _catch_signals() -> dict[int, _Handler]:
    """Have signals raise, so that what was started is stopped; returns the handlers before. Ctrl-C is also caught where
    a shell's background jobs ignore it; a hangup that ``nohup`` has made ignored stays so.
    """

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(number)

    caught = [signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.getsignal(number) for number in caught}
    caught = [number for number in caught if before[number] is not signal.SIG_IGN]
    try:
        handlers: dict[int, _Handler] = {number: signal.signal(number, interrupt) for number in caught}
        # asyncio knows Python's own handler, and cancels what runs
        return handlers | {signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler)}
    except ValueError:  # in a thread nobody gets signals
        return {}


if __name__ == "__main__":
    sys.exit(main())
