"""The command ``vllm-batch-invariant``."""

import argparse
import signal
import sys
import textwrap
from collections.abc import Callable


def _coverage(arguments: list[str]) -> int:
    """what the mode covers and what it refuses, as Markdown"""
    _parser("coverage", _coverage).parse_args(arguments)
    from .integration.coverage import markdown

    print(markdown())
    return 0


def _settings(arguments: list[str]) -> int:
    """every environment variable, its values and the one in force"""
    _parser("settings", _settings).parse_args(arguments)
    from . import envs

    envs.check_names()
    for variable in envs.VARIABLES:
        print(f"{variable.name}={variable.read()}    of {', '.join(variable.values)}")
        print(textwrap.indent(textwrap.fill(variable.meaning), "    "))
    return 0


def _reproduce(arguments: list[str]) -> int:
    """send one request many times under a load that varies the batch, and compare the answers"""
    from .verify.reproduce.command import main as reproduce

    return reproduce(arguments)


def _certificate(arguments: list[str]) -> int:
    """how GEMMs and attention are computed on this GPU, and whose bits were compared"""
    from .verify.autotune_command import main as certificate

    return certificate(arguments)


def _bisect(arguments: list[str]) -> int:
    """find the first layer and operation whose bits depend on concurrent requests"""
    from .verify.bisect.command import main as bisect

    return bisect(arguments)


def _receipt(arguments: list[str]) -> int:
    """make the receipt of a completion, compute it again elsewhere, compare two receipts"""
    from .verify.receipt.command import main as receipt

    return receipt(arguments)


def _make_checkpoint(arguments: list[str]) -> int:
    """write a small Qwen3 model with random weights and a tokenizer, to try things on"""
    from .verify.demo_model import main as make_checkpoint

    return make_checkpoint(arguments) or 0


def _check(arguments: list[str]) -> int:
    """check which guarantees of the contract hold on this machine, or on a server"""
    from .verify.check.command import main as check

    return check(arguments)


OF_VERIFY = (
    *("openai", "httpx", "pydantic", "prometheus_client", "rich"),
    *("tokenizers", "safetensors", "jinja2"),
)
"""Modules of the packages in the extra [verify], which no other part of this project imports."""

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "check": _check,
    "reproduce": _reproduce,
    "bisect": _bisect,
    "receipt": _receipt,
    "certificate": _certificate,
    "coverage": _coverage,
    "settings": _settings,
    "make-checkpoint": _make_checkpoint,
}


def _parser(name: str, command: Callable[[list[str]], int]) -> argparse.ArgumentParser:
    from .verify.arguments import OneLineParser

    return OneLineParser(prog=f"vllm-batch-invariant {name}", description=command.__doc__)


def main(arguments: list[str] | None = None) -> int:
    """Run one command. A bad setting or a refusal is one line and status 2."""
    from .errors import BadSetting, NotCovered
    from .verify.arguments import OneLineParser
    from .verify.printing import printable

    listing = "\n".join(f"  {name:<17}{command.__doc__}" for name, command in COMMANDS.items())
    parser = OneLineParser(
        prog="vllm-batch-invariant",
        description="Batch-invariant inference for vLLM.",
        epilog=f"commands:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see: vllm-batch-invariant COMMAND --help")
    parsed = parser.parse_args(arguments)
    try:
        return COMMANDS[parsed.command](parsed.arguments)
    except (BadSetting, NotCovered) as error:
        print(f"vllm-batch-invariant: {printable(str(error))}", file=sys.stderr)
        return 2
    except Exception as error:  # a traceback ends with status 1, which means that bits differ
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing in OF_VERIFY:
            why = f"{parsed.command} needs {missing}: pip install 'vllm-batch-invariant[verify]'"
            print(f"vllm-batch-invariant: {why}", file=sys.stderr)
            return 2
        from .verify.printing import one_line

        why = f"{type(error).__name__}: {one_line(error)}"
        print(f"vllm-batch-invariant: {parsed.command} failed: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while Python imports, before the command begins
        print("vllm-batch-invariant: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
