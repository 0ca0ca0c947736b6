"""``check MODEL --fuzz MINUTES``: random requests in engines of random settings, each compared with the request alone;
``check --replay FILE``: runs a finding again.
"""

import argparse
import os
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...envs import FLAG, starts_untried
from ...serve import serve_command
from ..harness.engine import context_of, kv_cache_space, model_config
from ..harness.worker import Engine, EngineFailed
from ..outcome import Status
from ..printing import consoles, count, printable, waiting
from .compare import difference
from .finding import BROKE, CONCURRENT, SETTINGS, Finding, Row, append_rows
from .options import Place, attention_of_pooling, pools_whole
from .plan import FuzzPlan
from .report import SEEN, print_fuzz
from .schedule import (
    CONTEXTS,
    Schedule,
    Settings,
    Target,
    alone,
    as_item,
    draw_schedule,
    draw_settings,
    draw_targets,
)
from .trial import Trial

if TYPE_CHECKING:
    from rich.console import Console

TARGETS = 46
"""Number of target requests: two or more of every kind."""
BISECT_SECONDS = 600
LEAST_SCHEDULES = 5
_ON_A_GPU = ("--kv-cache-memory-bytes", str(4 << 30), "--gpu-memory-utilization", "0.2")
"""Several engines may share a GPU, of whose memory vLLM would take its share for each."""

OnProgress = Callable[[str], None]


def _quiet(_: object) -> None:
    pass


class Fuzzer:
    """One run of a plan, with its results so far in ``rows``, ``findings`` and ``refused``.

    Args:
        plan: its plan.
        on_progress: is called with what happens now.
        on_row: is called with the row of each engine that has ended.
    """

    def __init__(
        self, plan: FuzzPlan, on_progress: OnProgress = _quiet, on_row: Callable[[Row], None] = _quiet
    ) -> None:
        self._plan, self._on_progress, self._on_row = plan, on_progress, on_row
        self._device = "cuda" if _on_gpu() else "cpu"
        self._place = place_of(plan.model, plan.serve_args, self._device)
        self._context = min(CONTEXTS[self._device], plan.context or CONTEXTS[self._device])
        self._began = time.monotonic()
        self._lock, self._running, self._stopped = threading.Lock(), set[Engine](), False
        self._alone: dict[tuple[str, int], tuple[Settings, dict[str, Any]]] = {}
        self.rows: list[Row] = []
        self.findings: list[tuple[Path, Finding]] = []
        self.refused: Counter[str] = Counter()
        self.flags: dict[str, str] = {}
        """How each engine is started by hand, by the label of its settings."""

    def run(self) -> None:
        """Start one engine after the other, ``jobs`` at a time."""
        numbers = iter(range(10**6 if self._plan.engines is None else self._plan.engines))

        def work() -> None:
            while not self._stopped and (not self.rows or not self._late):
                with self._lock:
                    number = next(numbers, None)
                if number is None:
                    return
                self.run_engine(number)

        with ThreadPoolExecutor(self._plan.jobs) as pool:
            workers = [pool.submit(work) for _ in range(self._plan.jobs)]
            try:
                for worker in wait(workers, return_when=FIRST_EXCEPTION).done:
                    worker.result()
            except BaseException:
                self.stop()
                while wait(workers, 0.3).not_done:
                    self.stop()
                raise

    def stop(self) -> None:
        """Kill the engines that run; what they did so far stays in their rows."""
        self._stopped = True
        for engine in list(self._running):
            engine.kill()

    @property
    def partial(self) -> str:
        """Why there is less than was planned; empty if there is not."""
        return "It was interrupted." if self._stopped else ""

    @property
    def status(self) -> Status:
        """1 if anything differs or an engine broke; 2 if no target ran with others, or an engine did not start."""
        if any(row.differences or row.broke for row in self.rows):
            return Status.DIVERGED
        tested = any(row.concurrent for row in self.rows) and not any(row.not_run for row in self.rows)
        return Status.REPRODUCIBLE if tested else Status.NO_TEST

    @property
    def _late(self) -> bool:
        return self._stopped or time.monotonic() > self._began + self._plan.seconds

    def settings(self, number: int) -> Settings:
        """What is drawn for an engine."""
        return draw_settings(self._plan.seed, number, self._context, self._place)

    def run_engine(self, number: int, environment: Mapping[str, str] | None = None) -> None:
        """Run one engine until its schedules are done or the time is over.

        Args:
            number: of its settings.
            environment: more variables for its process.
        """
        plan, settings = self._plan, self.settings(number)
        row = Row(Path(plan.model).name, plan.mode, settings.label, plan.seed)
        row.date = datetime.now(UTC).date().isoformat()
        with self._lock:
            self.rows.append(row)
            self.flags[row.settings] = flags_of(plan.model, plan.serve_args, plan.mode, settings)
        began = time.monotonic()
        label = f"engine {number} ({settings.label})"
        running = Schedule(())
        try:
            self._on_progress(f"{label}: starting")
            with started(plan.model, plan.serve_args, plan.mode, settings, self._running, environment) as engine:
                trial = Trial(engine, row, dict.fromkeys(plan.without, "left out by --without"))
                took = time.monotonic() - began
                targets: dict[int, Target] = {}
                self._on_progress(f"{label}: every target alone")
                for place, target in enumerate(draw_targets(plan.seed, TARGETS, trial.accepts, self._context)):
                    if targets and self._late:
                        break
                    running = alone(as_item(target, "target"))
                    answer = trial.take(target)
                    if answer is not None:
                        targets[place] = target
                        # engines that are served as text draw other targets than those that encode images
                        of = f"{trial.runner} {settings.decides(target.kind)} {target}"
                        self._compare_engines(trial, settings, (of, place), running, answer, number)
                until = time.monotonic() + took
                while row.schedules < (plan.schedules or LEAST_SCHEDULES) or (
                    plan.schedules is None and time.monotonic() < until
                ):
                    if row.schedules and self._late:
                        break
                    self._on_progress(f"{label}: schedule {row.schedules}, {row.differences} differ")
                    drawn = f"{plan.seed} {number} {row.schedules}"
                    running = draw_schedule(drawn, settings, targets, trial.accepts)
                    name, where = trial.fuzz(running)
                    if name and row.differences == 1:
                        self._shrink(trial, settings, running, name, where, number)
                with self._lock:
                    self.refused += trial.refused
        except EngineFailed as error:
            if self._stopped:
                return
            if row.device:
                row.broke = 1
                self._keep(BROKE, str(error), self._seen(number, row), settings, running, number)
            else:
                row.not_run = str(error)
        finally:
            row.seconds = round(time.monotonic() - began, 1)
            self._on_row(row)

    def _compare_engines(
        self,
        trial: Trial,
        settings: Settings,
        asked: tuple[str, int],
        schedule: Schedule,
        answer: dict[str, Any],
        number: int,
    ) -> None:
        """Compare a request alone with the same request in the other engines of which nothing decides other bits.

        Args:
            asked: what decides them, and the number of the target.
        """
        with self._lock:
            other, expected = self._alone.setdefault(asked, (settings, answer))
        where = difference(expected, answer)
        if where:
            trial.row.differences += 1
            if not any(one.kind == SETTINGS and one.settings == settings for _, one in self.findings):
                answers = {"other_settings": other, "expected": expected, "got": answer, "versions": trial.versions}
                self._keep(
                    "settings", where, self._seen(number, trial.row), settings, schedule, number, "target", **answers
                )

    def _shrink(self, trial: Trial, settings: Settings, schedule: Schedule, name: str, where: str, number: int) -> None:
        """Shrink a schedule in which a target differs, and keep it."""
        self._on_progress(f"engine {number} ({settings.label}): shrinking a difference: {where}")
        seen = self._seen(number, trial.row)
        small = trial.shrunk(schedule, name, self._plan.shrinking)
        found, expected, got = trial.look(small, name)
        if not found:  # it does not repeat: keep the whole schedule
            small, found = schedule, f"{where} (does not repeat)"
            _, expected, got = trial.look(small, name)
        answers = {"expected": expected, "got": got, "versions": trial.versions}
        self._keep(CONCURRENT, found, seen, settings, small, number, name, **answers)

    def _seen(self, number: int, row: Row) -> str:
        seconds = time.monotonic() - self._began
        return f"in engine {number} in its schedule {row.schedules}, {seconds:.0f} s after the run began"

    def _keep(
        self,
        kind: str,
        text: str,
        seen: str,
        settings: Settings,
        schedule: Schedule,
        number: int,
        target: str = "",
        **more: Any,
    ) -> None:
        plan = self._plan
        finding = Finding(kind, text, seen, plan.model, plan.serve_args, plan.mode, settings, schedule, target, **more)
        path = plan.folder / f"fuzz-{Path(plan.model).name}-{plan.seed}-{number}-{kind}.json"
        finding.write(path)
        with self._lock:
            self.findings.append((path, finding))


@contextmanager
def started(
    model: str,
    serve_args: Sequence[str],
    mode: str,
    settings: Settings,
    running: set[Engine] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Engine]:
    """An engine of these settings, which is in ``running`` while it runs, with more variables for its process."""
    variables = settings.environment | dict(environment or {})
    engine = Engine(model, _arguments(model, serve_args, settings), mode, variables)
    running = set() if running is None else running
    running.add(engine)
    try:
        with engine:
            yield engine
    finally:
        running.discard(engine)


def flags_of(model: str, serve_args: Sequence[str], mode: str, settings: Settings) -> str:
    """The line for a shell that serves a model as an engine of these settings does."""
    arguments = _arguments(model, serve_args, settings)
    variables = {FLAG: mode} | ({} if _on_gpu() else kv_cache_space(model, arguments)) | settings.environment
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*words, shlex.join([*serve_command(model), *arguments])])


def _arguments(model: str, serve_args: Sequence[str], settings: Settings) -> list[str]:
    ours = settings.arguments(model)
    if _on_gpu() and not {"--kv-cache-memory-bytes", "--gpu-memory-utilization"} & set(serve_args):
        ours += _ON_A_GPU
    return [*ours, *serve_args]


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def place_of(model: str, serve_args: Sequence[str], device: str) -> Place:
    """What settings depend on, of this machine, its vLLM, a model and the arguments."""
    import torch

    from ...integration.reviews import patch_points

    folder = Path(model).expanduser()
    tokenizer = not folder.is_dir() or any(folder.glob("tokenizer*")) or any(folder.glob("*.tiktoken"))
    return Place(
        device,
        cores=os.cpu_count() or 1,
        gpus=torch.cuda.device_count() if device == "cuda" else 0,
        model=model_config(model),
        has_tokenizer=tokenizer and "--skip-tokenizer-init" not in serve_args,
        # vLLM 0.30 breaks off on a CPU where a draft model runs
        has_draft_models=device == "cuda" or not patch_points.installed_version().startswith("0.30."),
        given=frozenset(argument.partition("=")[0] for argument in serve_args),
        pools=attention_of_pooling(model, serve_args),
        pools_whole=pools_whole(model, serve_args),
        encodes=_encodes(model, device),
    )


def _encodes(model: str, device: str) -> bool:
    """Whether the images of a model are encoded on a device, by what has run there."""
    from ...integration import coverage

    config = model_config(model)
    architecture = (config.get("architectures") or [""])[0]
    ran = coverage.RAN.encoding.get(device)
    here = ran is not None and coverage.patch_points.installed_version().startswith(ran)
    on_cpus = "image" in coverage.RAN.encoded_on_cpus_alone.get(architecture, ())
    on_cpus |= architecture in coverage.RAN.two_head_sizes and device not in coverage.RAN.large_heads
    untried = on_cpus and device != "cpu" and not starts_untried()
    return here and architecture in coverage.RAN.encoded and not untried


def replay(finding: Finding, on_progress: OnProgress = _quiet) -> tuple[Status, str]:
    """Run a finding again.

    Returns:
        1 if it differs or breaks again and 0 if not, and the result in words.

    Raises:
        EngineFailed: an engine did not start.
    """
    name = finding.target
    on_progress(f"starting an engine ({finding.settings.label})")
    with started(finding.model, finding.serve_args, finding.mode, finding.settings) as engine:
        trial = Trial(engine, Row(finding.model, finding.mode, finding.settings.label, 0))
        on_progress("running the schedule")
        if finding.kind == BROKE:
            try:
                trial.run(finding.schedule)
            except EngineFailed as error:
                return Status.DIVERGED, f"the engine breaks again: {error}"
            return Status.REPRODUCIBLE, "the engine does not break"
        where, expected, got = trial.look(finding.schedule, name)
    if finding.other_settings is not None:
        on_progress(f"starting the other engine ({finding.other_settings.label})")
        with started(finding.model, finding.serve_args, finding.mode, finding.other_settings) as engine:
            trial = Trial(engine, Row(finding.model, finding.mode, finding.other_settings.label, 0))
            expected = trial.look(finding.schedule, name)[1]
        where = difference(expected, got) if expected and got else "no answer"
    same = " (the same answers as in the file)" if (expected, got) == (finding.expected, finding.got) else ""
    if where:
        return Status.DIVERGED, f"it differs again: {where}{same}"
    return Status.REPRODUCIBLE, "the answers are equal in every bit"


def bisect_first(fuzzer: Fuzzer) -> str:
    """The output of ``bisect`` for the first finding that it can run; empty if there is none."""
    for path, finding in fuzzer.findings:
        if finding.for_bisect:
            command = [sys.executable, "-m", "vllm_batch_invariant.cli", *finding.bisect_arguments(path)]
            environment = dict(os.environ) | finding.settings.environment | {FLAG: finding.mode}
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=BISECT_SECONDS, check=False
                )
            except subprocess.TimeoutExpired:
                return f"bisect was not done within {BISECT_SECONDS} s"
            return (done.stdout + done.stderr).strip()
    return ""


def replay_finding(options: argparse.Namespace) -> int:
    """Run ``check --replay``; returns the exit status."""
    out, notes = consoles()
    options.command = "check --replay"
    finding = Finding.read(options.replay)
    finding = replace(finding, model=options.model) if options.model else finding
    with waiting(notes, f"running a difference of {FLAG}={finding.mode} again", told=False) as on_progress:
        status, seen = replay(finding, on_progress)
    if options.json:
        options.json.write(options, status, {"replayed": str(options.replay), "kind": finding.kind, "result": seen})
    if options.html:
        from ..report.parts import write_page
        from .page import page_of_replay

        write_page(options, page_of_replay(finding, status, seen))
    for line in (f"{FLAG}={finding.mode} {finding.settings.label}", *finding.describe(), seen):
        out.print(printable(line), highlight=False, markup=False, soft_wrap=True)
    return status


def fuzz(options: argparse.Namespace, flag: str) -> int:
    """Run ``check --fuzz`` with a value of VLLM_BATCH_INVARIANT; returns the exit status."""
    out, notes = consoles()
    options.command = "check --fuzz"
    with waiting(notes, "drawing", told=False) as on_progress:
        return _fuzz(options, flag, out, on_progress)


def _fuzz(options: argparse.Namespace, flag: str, out: "Console", on_progress: OnProgress) -> int:
    plan = FuzzPlan(
        model=options.model,
        serve_args=tuple(options.serve_args),
        mode=flag,
        seed=options.seed,
        seconds=60 * options.fuzz,
        engines=options.settings,
        schedules=options.schedules,
        jobs=options.jobs,
        folder=options.found,
        without=tuple(options.without),
        context=context_of(options.model, options.serve_args),
    )
    fuzzer = Fuzzer(plan, on_progress)
    try:
        fuzzer.run()
        on_progress("bisecting the first difference")
        bisected = bisect_first(fuzzer)
    finally:  # also after an interrupt
        if fuzzer.rows:
            print_fuzz(out, fuzzer.rows, fuzzer.refused, fuzzer.findings, fuzzer.flags)
            if options.csv:
                append_rows(options.csv, fuzzer.rows)
            if options.json:
                options.json.write(options, fuzzer.status, _as_json(options, flag, fuzzer))
            if options.html:
                from ..report.parts import write_page
                from .page import page_of

                write_page(options, page_of(plan, fuzzer))
    if bisected:
        out.print(f"\n{bisected}", highlight=False, markup=False, soft_wrap=True)
    done = f"{count(sum(row.schedules for row in fuzzer.rows), 'schedule')} in {count(len(fuzzer.rows), 'engine')}"
    out.print(f"seed {plan.seed}: {done}: {SEEN[fuzzer.status]}", markup=False, soft_wrap=True)
    return fuzzer.status


def _as_json(options: argparse.Namespace, flag: str, fuzzer: Fuzzer) -> dict[str, Any]:
    """What ran so far: the engines, what vLLM refused, and the files of what differs."""
    found = [{"file": str(path), "kind": finding.kind, "text": finding.text} for path, finding in fuzzer.findings]
    about = {"target": options.model, "arguments": options.serve_args, "flag": flag, "seed": options.seed}
    return about | {"engines": [vars(row) for row in fuzzer.rows], "refused": fuzzer.refused, "findings": found}
