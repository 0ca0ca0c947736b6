"""``vllm-batch-invariant check``: which guarantees of the contract hold on this machine, or on a running server."""

import argparse
import asyncio
import shlex
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from ... import envs
from ..arguments import (
    OneLineParser,
    above_zero,
    add_base_url,
    address,
    at_least,
    check_base_url,
    check_common,
    not_negative,
)
from ..harness.requests import KINDS
from ..outcome import NoTestError, Status
from ..printing import complain, consoles, one_line
from ..report.files import why_not_writable
from .guarantees import cases_of_a_server, cases_of_engines
from .presets import PRESETS, QUICK, STANDARD, THOROUGH
from .report import Report, print_report, write_json
from .results import CheckResults


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check; a bad argument ends the process with status 2 and one line."""
    parser = OneLineParser(
        prog="check",
        description="Check which guarantees of the contract hold. Every operation is computed alone and in batches on "
        "this device; then engines compute a target request alone, with concurrent requests and under other schedules. "
        "Tokens and logprobs are compared bit for bit. With VLLM_BATCH_INVARIANT=1 the mode is checked, otherwise "
        "plain vLLM. Exit status: 0 all that was tested holds, 1 something breaks, 2 it could not be tested, 130 it "
        "was interrupted (the results so far are reported).",
    )
    parser.add_argument(
        "model", nargs="?", help="a model's folder or name; with --base-url, the name of the served model"
    )
    add_base_url(parser)
    parser.add_argument("--compare", action="store_true", help="check VLLM_BATCH_INVARIANT=0, then 1")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--quick", dest="preset", action="store_const", const=QUICK.name, help="about a minute on a CPU")
    depth.add_argument("--thorough", dest="preset", action="store_const", const=THOROUGH.name, help="many more batches")
    parser.add_argument("--serve-args", default="", help="more arguments of `vllm serve`, in one string")
    parser.add_argument(
        "--timeout", type=not_negative, default=3600, help="seconds for the check of a server (default: 3600)"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--html", type=Path, help="also write an HTML page to this file")
    fuzz = parser.add_argument_group("random requests in engines with random settings")
    fuzz.add_argument(
        "--fuzz", type=above_zero, metavar="MINUTES", help="instead, draw engines and requests for this long"
    )
    fuzz.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all draws (default: 0)")
    fuzz.add_argument("--settings", type=at_least(1), metavar="N", help="most engines (default: as time allows)")
    fuzz.add_argument(
        "--schedules",
        type=at_least(1),
        metavar="N",
        help="schedules per engine (default: for as long as the engine took to start)",
    )
    fuzz.add_argument(
        "--jobs", type=at_least(1), default=1, metavar="N", help="engines that run at a time (default: 1)"
    )
    fuzz.add_argument(
        "--without",
        action="append",
        default=[],
        choices=KINDS,
        metavar="KIND",
        help=f"leave out a kind of requests: {', '.join(KINDS)}; may be repeated",
    )
    fuzz.add_argument("--csv", type=Path, help="also append a row per engine to this file")
    fuzz.add_argument(
        "--found", type=Path, default=Path("."), metavar="FOLDER", help="folder for files of differences (default: .)"
    )
    fuzz.add_argument("--replay", type=Path, metavar="FILE", help="run the difference in a file of --fuzz again")
    options = parser.parse_args(argv)
    if options.fuzz is not None or options.replay is not None:
        _check_fuzz(parser, options)
    elif given := _fuzz_options(parser, options):
        parser.error(f"{', '.join(given)}: only with --fuzz")
    options.preset = PRESETS[options.preset or STANDARD.name]
    _check(parser, options)
    options.serve_args = shlex.split(options.serve_args)
    return options


_DRAWN = (
    *("--max-num-seqs", "--max-num-batched-tokens", "--block-size", "--enable-prefix-caching", "--enforce-eager"),
    *("--no-enable-prefix-caching", "--async-scheduling", "--no-async-scheduling", "--num-gpu-blocks-override"),
)
"""Arguments of ``vllm serve`` that --fuzz draws."""


def _fuzz_options(parser: OneLineParser, options: argparse.Namespace) -> list[str]:
    """The given options of --fuzz."""
    names = ("seed", "settings", "schedules", "jobs", "without", "csv", "found")
    return [f"--{name}" for name in names if getattr(options, name) != parser.get_default(name)]


def _check_fuzz(parser: OneLineParser, options: argparse.Namespace) -> None:
    mode = "--fuzz" if options.replay is None else "--replay"
    others = {"--base-url": options.base_url, "--compare": options.compare, "--json": options.json}
    others |= {"--html": options.html, "--quick or --thorough": options.preset}
    others |= {"--fuzz": options.fuzz, "--serve-args": options.serve_args} if options.replay else {}
    others |= dict.fromkeys(_fuzz_options(parser, options), True) if options.replay else {}
    if given := [name for name, value in others.items() if value]:
        parser.error(f"{mode} goes without {', '.join(given)}")
    if options.replay is None and not options.model:
        parser.error("--fuzz needs a model")
    if options.csv and (why := why_not_writable(options.csv)):
        parser.error(f"--csv {options.csv}: {why}")
    if not options.found.is_dir():
        parser.error(f"--found {options.found}: no such folder")
    with suppress(ValueError):  # a lone quote is refused later
        taken = [word for word in shlex.split(options.serve_args) if word.partition("=")[0] in _DRAWN]
        if taken:
            parser.error(f"--serve-args: {taken[0]} is drawn by --fuzz")


def _check(parser: OneLineParser, options: argparse.Namespace) -> None:
    if not options.model and not options.base_url and not options.replay:
        parser.error("nothing to check: give a model, or --base-url of a server")
    if options.base_url and (options.compare or options.serve_args):
        parser.error("--base-url is a server that already runs: leave out --compare and --serve-args")
    check_base_url(parser, options)
    check_common(parser, options, "model")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse_arguments(argv)
    # signals become exceptions, which stop engines and keep the results; a shell's background jobs ignore SIGINT
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if options.fuzz is not None or options.replay is not None:
            from ..fuzz.command import main as fuzz

            return fuzz(options)
        return _run(options, *consoles())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(options: argparse.Namespace, out: Console, notes: Console) -> int:
    runs: list[CheckResults] = []
    began, clock, partial = datetime.now().astimezone().isoformat(timespec="seconds"), time.monotonic(), ""
    try:
        with notes.status("", spinner="line") as status:
            for flag in _flags(options):
                label = "server" if options.base_url else f"{envs.FLAG}={flag}"
                runs.append(
                    CheckResults(label, cases_of_a_server() if options.base_url else cases_of_engines(options.preset))
                )
                _fill(runs[-1], flag, options, lambda now, label=label: status.update(escape(f"{label}: {now}")))
                if runs[-1].failed:
                    complain(notes, "check", f"{label}: {runs[-1].failed}")
    except NoTestError as error:
        complain(notes, "check", str(error))
        return Status.NO_TEST
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second signal must not lose the report
            signal.signal(number, signal.SIG_IGN)
        partial = f"It was interrupted while {runs[-1].label} was checked." if runs else "It was interrupted."
    target = address(options.base_url) if options.base_url else options.model
    took = time.monotonic() - clock
    report = Report(target, options.preset.name, tuple(options.serve_args), began, took, tuple(runs), partial)
    try:
        written = _write(report, options, out)
    except NoTestError as error:
        complain(notes, "check", str(error))
        return report.status or Status.NO_TEST
    except Exception as error:  # a closed pipe, a plot: a traceback would end with status 1, which means a difference
        complain(notes, "check", f"the report failed: {type(error).__name__}: {one_line(error)}")
        return report.status or Status.NO_TEST
    if partial:
        complain(notes, "check", f"interrupted; {written or 'there are no results yet'}")
    return report.status


def _flags(options: argparse.Namespace) -> tuple[str, ...]:
    """The values of VLLM_BATCH_INVARIANT to check; a server has its own."""
    envs.check_names()
    if options.base_url:
        return ("",)
    return ("0", "1") if options.compare else (str(int(envs.enabled())),)


def _fill(results: CheckResults, flag: str, options: argparse.Namespace, on_progress: Callable[[str], None]) -> None:
    from .engine import check_engine
    from .server import check_server

    try:
        if options.base_url:
            server = options.base_url, options.api_key
            asyncio.run(check_server(*server, options.model, options.preset, options.timeout, results, on_progress))
        else:
            check_engine(options.model, options.serve_args, flag, options.preset, results, on_progress)
    except NoTestError as error:
        results.failed = str(error)
    except KeyboardInterrupt:
        results.failed = "interrupted"
        raise
    except Exception as error:  # a traceback would end with status 1, which means that something breaks
        results.failed = f"the check failed: {type(error).__name__}: {one_line(error)}"


def _write(report: Report, options: argparse.Namespace, out: Console) -> str:
    """Print and write the results; returns where they are, in words, or nothing if there are none."""
    if not any(run.samples or run.certificates for run in report.runs):
        return ""
    try:  # the files first, because stdout may be closed
        if options.json:
            write_json(options.json, report)
        if options.html:
            from ..report.html import write_html
            from .page import page_of

            write_html(options.html, page_of(report))
    finally:
        print_report(out, report)
    files = " and ".join(str(path) for path in (options.json, options.html) if path)
    return f"the results so far are {f'in {files}, marked partial' if files else 'above'}"
