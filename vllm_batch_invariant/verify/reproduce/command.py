"""``vllm-batch-invariant reproduce``: send one request many times under a load that varies the batch, and compare the
answers bit for bit.
"""

import argparse
import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from ...envs import FLAG
from ..addresses import address
from ..answers import GENERATE, OF_POOLING, OF_TEXT, PROMPT, Counts, RequestSpec
from ..arguments import (
    OneLineParser,
    add_adapter,
    add_base_url,
    add_html,
    add_items,
    add_json,
    add_model,
    add_pooling,
    add_task,
    at_least,
    check_adapter,
    check_base_url,
    check_items,
    check_model,
    check_reports,
    check_task,
    choose_mode,
    not_negative,
    seed_of_a_request,
)
from ..harness import pooling
from ..printing import consoles, waiting

if TYPE_CHECKING:
    from .progress import Progress
    from .report import ReproduceResult


_EVERY = {False: 0.25, True: 0.05}
"""Seconds between two readings of a server's metrics, by whether its model pools, which answers sooner."""


def add_arguments(parser: OneLineParser) -> None:
    """Add the command's arguments."""
    parser.set_defaults(run=run)
    parser.description = (
        "Send one request many times, with concurrent requests that vary the batch, and compare the answers bit for "
        "bit. Exit status: 0 all are identical, 1 they differ, 2 the run was no test, 128 + N it was ended by the "
        "signal N."
    )
    target = parser.add_argument_group("server or engine")
    add_model(target)
    add_base_url(target)
    add_adapter(target, "the request has, with --offline; repeatable: concurrent requests have each in turn, and none")
    target.add_argument("--compare", action="store_true", help=f"serve with {FLAG}=0, then with 1")
    target.add_argument("--offline", action="store_true", help="run the model through vllm.LLM, without a server")
    request = parser.add_argument_group("request")
    add_task(request, pooling.TASKS)
    request.add_argument("--prompt", default=PROMPT, help="the prompt (default: one of 120 words)")
    add_items(request, "it is sent as a chat")
    kind = request.add_mutually_exclusive_group()
    kind.add_argument("--chat", action="store_true", default=False, help="send it to /v1/chat/completions")
    kind.add_argument(
        "--completions", dest="chat", action="store_false", help="send it to /v1/completions, as by default"
    )
    request.add_argument("--max-tokens", type=at_least(1), default=64, metavar="N", help="tokens to generate")
    request.add_argument("--temperature", type=not_negative, default=0.0, metavar="T", help="0 is greedy")
    request.add_argument(
        "--seed", type=seed_of_a_request, default=0, metavar="N", help="seed of the request and of the load"
    )
    request.add_argument(
        "--logprobs", type=at_least(1), default=5, metavar="N", help="candidates to compare at each position"
    )
    request.add_argument("--ignore-eos", action="store_true", help="always generate --max-tokens")
    pools = parser.add_argument_group("request to a model that pools")
    add_pooling(pools)
    pools.add_argument("--truncate", type=at_least(1), metavar="N", help="tokens of the prompt at most (default: all)")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--samples", type=at_least(2), default=1000, metavar="N", help="number of times the request is sent"
    )
    load.add_argument(
        "--concurrency",
        type=at_least(2),
        default=128,
        metavar="N",
        help="most requests in flight, samples and others",
    )
    load.add_argument(
        "--timeout",
        type=not_negative,
        default=3600,
        metavar="SECONDS",
        help="after these a run is given up, and no test",
    )
    reports = parser.add_argument_group("reports")
    add_json(reports)
    add_html(reports)
    reports.add_argument("--verbose", action="store_true", help="print everything that the page and the JSON have")


def _check(parser: OneLineParser, options: argparse.Namespace) -> None:
    check_model(parser, options)
    if not options.base_url and not options.model:
        parser.error("nothing to test: give --base-url of a server, or a model to serve")
    if options.base_url and (options.offline or options.compare or options.serve_args):
        parser.error("--base-url is a server that already runs: leave out --offline, --compare and --serve-args")
    check_base_url(parser, options)
    _check_task(parser, options)
    if options.adapter and not options.offline and not options.base_url:
        parser.error("--adapter goes with --offline: ask a server with --lora-modules by --base-url and --model NAME")
    check_adapter(parser, options)
    if options.compare and options.offline:
        parser.error("--compare starts two servers: leave out --offline, or run --offline once with each setting")
    check_reports(parser, options)


def _check_task(parser: OneLineParser, options: argparse.Namespace) -> None:
    check_task(parser, options, OF_TEXT, OF_POOLING)
    check_items(parser, options)
    options.chat = options.chat or bool(options.items)
    if options.task != GENERATE and options.offline and not pooling.TASKS[options.task].engine:
        parser.error(f"--task {options.task}: a server makes it of texts: leave out --offline")


def run(options: argparse.Namespace, parser: OneLineParser) -> int:
    """Run the command; returns its exit status."""
    _check(parser, options)
    from .progress import Progress
    from .report import print_report

    flags = choose_mode(parser, options)
    out, notes = consoles()
    progress, results = Progress(notes, options.samples, options.task != GENERATE), []
    try:
        for result in _results(options, flags, progress):
            results.append(result)
        _write(options, results)
    except KeyboardInterrupt as error:
        if seen := progress.so_far:
            error.add_note(seen)
        raise
    finally:
        if results:
            print_report(out, results, options.verbose)
    return results[-1].status


def spec_of(options: argparse.Namespace) -> RequestSpec:
    """The request of the options."""
    return RequestSpec(
        prompt=options.prompt,
        chat=options.chat,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        logprobs=options.logprobs,
        ignore_eos=options.ignore_eos,
        items=tuple(options.items),
        adapters=tuple(map(str, options.adapter)),
        **{name: getattr(options, name) for name in ("task", *OF_POOLING)},
    )


def _write(options: argparse.Namespace, results: Sequence["ReproduceResult"]) -> None:
    from .report import as_json

    target, spec = address(options.base_url) if options.base_url else options.model, spec_of(options)
    if options.json:
        options.json.write(options, results[-1].status, as_json(target, options.serve_args, spec, results))
    if options.html:
        from ..report.parts import write_page
        from .page import page_of

        write_page(options, page_of(target, spec, results))


def _results(options: argparse.Namespace, flags: Sequence[str], progress: "Progress") -> Iterator["ReproduceResult"]:
    if options.offline:
        yield _offline(options, flags[0], progress)
        return
    if options.base_url:
        yield _against(options.base_url, options.api_key, options.model, options, progress, "server", None)
        return
    from ..harness import mode
    from ..harness.server import serve

    for flag in flags:
        label = f"{FLAG}={flag}"
        with ExitStack() as stack:
            with waiting(progress.notes, f"starting a server with {label}"):
                server = stack.enter_context(serve(options.model, options.serve_args, {FLAG: flag}))
            progress.notes.print(
                f"the server answers after {server.startup_seconds:.0f} s", style="dim", highlight=False
            )
            started = mode.of_started({**os.environ, FLAG: flag})
            yield _against(server.base_url, None, None, options, progress, label, started)


def _against(
    base_url: str,
    api_key: str | None,
    model: str | None,
    options: argparse.Namespace,
    progress: "Progress",
    label: str,
    started: str | None,
) -> "ReproduceResult":
    from . import online

    load = options.samples, options.concurrency, options.timeout
    return asyncio.run(
        online.run(
            base_url, api_key, model, spec_of(options), *load, label, started,
            partial(progress.shown, label), _EVERY[options.task != GENERATE],
        )
    )  # fmt: skip


def _offline(options: argparse.Namespace, flag: str, progress: "Progress") -> "ReproduceResult":
    from ..harness.metrics import BatchLog
    from ..harness.worker import Engine
    from . import offline
    from .report import ReproduceResult

    # LLM() as a user starts it, with the engine in another process
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1")}
    request = {name: getattr(options, name) for name in ("samples", "concurrency", "seed")}
    request |= {"spec": vars(spec_of(options))}
    with ExitStack() as stack:
        with waiting(progress.notes, f"starting an engine with {FLAG}={flag}"):
            engine = stack.enter_context(Engine(options.model, options.serve_args, flag, environment))
        label, log = f"offline, {FLAG}={flag}", BatchLog()
        with progress.shown(label, log) as tell:

            def on_progress(now: dict[str, Any]) -> None:
                log.add(offline.reading_of(now["reading"]))
                tell(Counts(**now["counts"]))

            found = engine.call(offline.RUN, request, on_progress=on_progress, patience=options.timeout)
        run, log = offline.run_of(found)
        return ReproduceResult.of(label, run, log, engine.info)
