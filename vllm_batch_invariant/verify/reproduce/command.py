"""``vllm-batch-invariant reproduce``: send one request many times under a load that varies the batch, and compare the
answers bit for bit.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...envs import FLAG
from ..arguments import address, parse_arguments, spec_from
from ..harness import mode
from ..harness.client import connect
from ..harness.load import Load, Run, plan_load
from ..harness.metrics import BatchLog, watch
from ..harness.server import serve
from ..outcome import NoTestError, Status
from ..printing import complain, consoles, one_line
from .report import ReproduceResult, print_report, write_json


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse_arguments(argv)
    out, notes = consoles()
    before = signal.signal(signal.SIGTERM, _end_in_order)
    results: list[ReproduceResult] = []
    try:
        try:
            for result in _results(options, notes):
                results.append(result)
            _write(options, results)
        finally:
            if results:
                print_report(out, results)
    except NoTestError as error:
        complain(notes, "reproduce", str(error))
        return Status.NO_TEST
    except KeyboardInterrupt:
        complain(notes, "reproduce", "interrupted; nothing was decided")
        return 128 + signal.SIGINT
    except Exception as error:  # a traceback would end with status 1, which means that answers differ
        complain(notes, "reproduce", f"the run failed: {type(error).__name__}: {one_line(error)}")
        return Status.NO_TEST
    finally:
        signal.signal(signal.SIGTERM, before)
    return results[-1].status


def _write(options: argparse.Namespace, results: Sequence[ReproduceResult]) -> None:
    if options.json:
        write_json(options.json, spec_from(options), results)
    if options.html:
        from ..report.html import write_html
        from .page import page_of

        write_html(options.html, page_of(_target(options), spec_from(options), results))


def _target(options: argparse.Namespace) -> str:
    return address(options.base_url) if options.base_url else options.model


def _end_in_order(number: int, _frame: FrameType | None) -> None:
    # an exception stops a server that was started here
    sys.exit(128 + number)


def _results(options: argparse.Namespace, notes: Console) -> Iterator[ReproduceResult]:
    if options.offline:
        yield _offline(options, notes)
    elif options.base_url:
        yield asyncio.run(_against(options.base_url, options.api_key, options.model, options, notes, "server", None))
    else:
        flags = ("0", "1") if options.compare else (os.environ.get(FLAG, "0"),)
        for flag in flags:
            label = f"{FLAG}={flag}"
            notes.print(f"starting a server with {label} ...", style="dim", highlight=False, markup=False)
            with serve(options.model, options.serve_args, {FLAG: flag}) as server:
                notes.print(f"the server answers after {server.startup_seconds:.0f} s", style="dim", highlight=False)
                started = mode.of_started({**os.environ, FLAG: flag})
                yield asyncio.run(_against(server.base_url, None, None, options, notes, label, started))


async def _against(
    base_url: str,
    api_key: str | None,
    model: str | None,
    options: argparse.Namespace,
    notes: Console,
    label: str,
    started: str | None,
) -> ReproduceResult:
    """``started`` is the mode of a server that was started here; a server that already ran reports its mode."""
    spec, log = spec_from(options), BatchLog()
    async with connect(base_url, api_key) as server:
        served = await server.served_model(model)
        plan = plan_load(options.samples, options.concurrency, spec.max_tokens, served.context, options.seed)
        with _progress(options.samples, log, notes) as on_sample:
            try:
                async with asyncio.timeout(options.timeout), watch(server.http, server.metrics, log):
                    run = await Load(server.api, served.name, spec, on_sample).run(plan)
            except TimeoutError:
                raise NoTestError(f"the run was not done within --timeout {options.timeout:.0f} s") from None
            except httpx.HTTPError as error:
                raise NoTestError(f"{server}/metrics does not answer: {one_line(error)}") from error
        answered = started or await mode.of_server(server)
    return ReproduceResult.of(label, run, log, answered)


def _offline(options: argparse.Namespace, notes: Console) -> ReproduceResult:
    from ..harness.engine import run_offline, start_quiet_engine

    spec, log = spec_from(options), BatchLog()
    notes.print("starting an engine ...", style="dim")
    llm = start_quiet_engine(options.model, options.serve_args)
    context = llm.llm_engine.model_config.max_model_len
    plan = plan_load(options.samples, options.concurrency, spec.max_tokens, context, options.seed)
    with _progress(options.samples, log, notes) as on_sample:
        run: Run = run_offline(llm, spec, plan, log, on_sample)
    return ReproduceResult.of(f"offline, {FLAG}={os.environ.get(FLAG, '0')}", run, log, mode.of_engine())


@contextmanager
def _progress(samples: int, log: BatchLog, notes: Console) -> Iterator:
    columns = (
        TextColumn("samples"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("batch of {task.fields[batch]}"),
    )
    with Progress(*columns, console=notes, transient=True, refresh_per_second=4) as progress:
        task = progress.add_task("", total=samples, batch=0)
        yield lambda: progress.update(task, advance=1, batch=log.running_now)
