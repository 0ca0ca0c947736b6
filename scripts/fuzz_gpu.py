"""The fuzzer in many engines at a time, within a hard limit: ``python -m scripts.fuzz_gpu OUT [MODEL ...]``.

``check --fuzz`` runs one model's engines on what it finds. This runs several models' engines on several GPUs at once:
those of one GPU have a GPU each, in ``--jobs`` lanes, and those that so many GPUs share have a lane beside them. The
settings are those of ``check --fuzz`` with the same seed; of the first draws it takes those that add most to what the
others have. A row of each engine goes to ``OUT/rows.csv`` as soon as the engine has ended, and what happens to
``OUT/log.txt``; findings lie in the same folder. Without a model it makes a dense one and one with experts, both with a
tokenizer, which budgets and structured outputs need. On a CPU, with ``--small``, it runs the same way with tiny models.
"""

import argparse
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.fuzz.command import Fuzzer, FuzzPlan
from vllm_batch_invariant.verify.fuzz.finding import Row, append_rows
from vllm_batch_invariant.verify.fuzz.schedule import Settings
from vllm_batch_invariant.verify.harness.engine import context_of
from vllm_batch_invariant.verify.outcome import Status

FULL = {
    "dense": Shape(hidden=1024, intermediate=3072, layers=8, heads=16, kv_heads=8, head_size=128, max_length=8192),
    "experts": Shape(
        hidden=1024, experts=32, expert_intermediate=512, layers=4, heads=16, kv_heads=4, head_size=128, max_length=8192
    ),
}
SMALL = {
    "dense": Shape(layers=2, intermediate=512, max_length=1024),
    "experts": Shape(layers=2, intermediate=512, experts=4, top_k=2, max_length=1024),
}
"""Models that are made where none is given."""
DRAWN = 200
"""Settings of a model among which some are chosen."""
GRACE = 25.0
"""Seconds between the end of schedules and the end of engines that still run."""
SHRINKING = 5.0


@dataclass(frozen=True)
class Job:
    """One engine: number ``number`` of a fuzzer's settings."""

    fuzzer: Fuzzer
    number: int
    name: str

    @property
    def settings(self) -> Settings:
        """Of the engine."""
        return self.fuzzer.settings(self.number)

    @property
    def gpus(self) -> int:
        """How many share the engine's model."""
        return self.settings.workers * self.settings.stages

    @property
    def sleeps(self) -> bool:
        """Whether the engine gives memory back while it runs."""
        return "sleep" in self.settings.options


class Log:
    """What happens, with the seconds since the beginning, in a file and on stdout."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._began, self._lock = file, time.monotonic(), threading.Lock()

    def line(self, text: str) -> None:
        """Write a line."""
        with self._lock:
            line = f"{time.monotonic() - self._began:6.1f} s  {text}"
            print(line, flush=True)
            print(line, file=self._file, flush=True)


def words_of(settings: Settings) -> set[str]:
    """What of the settings another setting may add to: each word of the label but the common ones."""
    return set(settings.label.split()) | {f"{settings.workers * settings.stages} GPUs"}


def preempts(settings: Settings) -> bool:
    """Whether an engine takes more requests than its cache holds once they grow."""
    return settings.small_cache and settings.requests > 4 and settings.step_tokens > 64 and not settings.drafts


def chosen(fuzzer: Fuzzer, count: int, words: Sequence[str] = ()) -> list[int]:
    """Numbers of settings that have these words: each adds as much as any draw does to the values that those before it
    have. Every second one preempts, if there are so many; at most one in three sleeps, because those wait for each
    other.
    """
    drawn = {number: words_of(fuzzer.settings(number)) for number in range(DRAWN)}
    drawn = {number: found for number, found in drawn.items() if found.issuperset(words)}
    seen: Counter[str] = Counter()
    numbers: list[int] = []
    for place in range(min(count, len(drawn))):
        awake = sum("sleep" in fuzzer.settings(number).options for number in numbers) >= count / 3
        left = [number for number in drawn if number not in numbers]
        left = [number for number in left if not (awake and "sleep" in fuzzer.settings(number).options)] or left
        preempting = [number for number in left if place % 2 == 0 and preempts(fuzzer.settings(number))]
        # of values that all have been seen, the rarest
        best = max(preempting or left, key=lambda one: _added(drawn[one], seen))
        numbers.append(best)
        seen.update(drawn[best])
    return numbers


def _added(words: Iterable[str], seen: Counter[str]) -> float:
    return sum(1 / (1 + 8 * seen[word]) for word in words)


def control_of(fuzzer: Fuzzer) -> int:
    """Number of the settings of plain vLLM: without what only the mode has, of one GPU and if possible without CUDA
    graphs, which start in half of the time.
    """

    def fits(number: int) -> tuple[int, ...]:
        one = fuzzer.settings(number)
        shared = one.workers * one.stages * one.tree > 1
        # plain vLLM ends with an error on a GPU where prompts are embeddings
        strange = shared or one.exact or not {"embeds", "sleep"}.isdisjoint(one.options)
        return not strange, one.requests > 2, not one.drafts, one.eager, -number

    return max(range(DRAWN), key=fits)


class Lanes:
    """Jobs that run at a time: in lanes of one GPU each, and in lanes for engines that several share. Of those that
    sleep a GPU has one at a time: vLLM ends an engine that finds less memory after it fell asleep.

    Args:
        jobs: in the order in which they begin.
        gpus: of this machine.
        each: lanes of a GPU.
        shared: lanes of each number of GPUs that share an engine.
        until: time after which no job begins.
        log: takes a line for each.
    """

    def __init__(self, jobs: Sequence[Job], gpus: int, each: int, shared: int, until: float, log: Log) -> None:
        self._until, self._log, self._lock = until, log, threading.Lock()
        self._asleep: Counter[int] = Counter()
        one = [job for job in jobs if job.gpus == 1 or not gpus]  # on a CPU all are in one lane
        several = [job for job in jobs if job not in one]
        lanes = [(one, (number % gpus,) if gpus else ()) for number in range(max(gpus, 1) * each)]
        for size in sorted({job.gpus for job in several if job.gpus <= gpus}):
            of_size = [job for job in several if job.gpus == size]
            groups = [tuple((size * lane + gpu) % gpus for gpu in range(size)) for lane in range(shared)]
            lanes = [(of_size, group) for group in groups] + lanes
        self.threads = [threading.Thread(target=self._run, args=lane, daemon=True) for lane in lanes]

    def _take(self, jobs: list[Job], gpus: Sequence[int]) -> Job | None:
        """The first that may run on these GPUs now; None if none may."""
        with self._lock:
            for job in jobs:
                if job.sleeps and any(self._asleep[gpu] for gpu in gpus):
                    continue
                jobs.remove(job)
                self._asleep.update(gpus if job.sleeps else ())
                return job
            return None

    def _run(self, jobs: list[Job], gpus: Sequence[int]) -> None:
        named = ",".join(map(str, gpus))
        while jobs:
            job = self._take(jobs, gpus)
            if job is None:
                time.sleep(0.5)
                continue
            try:
                self._begin(job, named)
            finally:
                with self._lock:
                    self._asleep.subtract(gpus if job.sleeps else ())

    def _begin(self, job: Job, gpus: str) -> None:
        if time.monotonic() > self._until:
            self._log.line(f"{job.name} {job.number} was not begun: {job.settings.label}")
            return
        self._log.line(f"{job.name} {job.number} on {f'GPU {gpus}' if gpus else 'the CPU'}: {job.settings.label}")
        try:
            job.fuzzer.run_engine(job.number, {"CUDA_VISIBLE_DEVICES": gpus} if gpus else None)
        except Exception as error:  # the other lanes go on; the row says that nothing was tested
            self._log.line(f"{job.name} {job.number} failed: {type(error).__name__}: {error}")


def totals(rows: Sequence[Row]) -> dict[str, int]:
    """The sums of the summary."""
    ran = [row for row in rows if row.schedules]
    names = ("schedules", "concurrent", "compared", "steps", "preemptions", "resets", "sleeps", "updates", "aborts")
    return {
        "settings": len({(row.model, row.settings) for row in ran}),
        **{name: sum(getattr(row, name) for row in rows) for name in (*names, "differences", "broke")},
        "not started": sum(bool(row.not_run) for row in rows),
    }


def wanting(found: dict[str, int], least: argparse.Namespace) -> list[str]:
    """What fell short of the numbers that were asked for, in words."""
    needed = {"settings": least.settings, "schedules": least.least_schedules, "preemptions": least.least_preemptions}
    needed |= {"sleeps": 1, "updates": 1} if least.settings > 3 else {}
    return [f"{found[name]} {name} of at least {number}" for name, number in needed.items() if found[name] < number]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.fuzz_gpu", description=__doc__)
    parser.add_argument("out", type=Path, help="folder for rows.csv, log.txt and findings")
    parser.add_argument("models", nargs="*", help="folders of models (default: two that are made)")
    parser.add_argument("--made", action="store_true", help="also the two models that are made")
    parser.add_argument("--small", action="store_true", help="make tiny models, for a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", type=int, default=14, help="engines in all (default: 14)")
    parser.add_argument("--with", dest="words", action="append", default=[], help="a word of labels, as adapters=on")
    parser.add_argument("--schedules", type=int, default=22, help="most schedules of an engine (default: 22)")
    parser.add_argument("--seconds", type=float, default=390, help="after which no schedule starts (default: 390)")
    parser.add_argument("--jobs", type=int, default=4, help="engines at a time on one GPU (default: 4)")
    parser.add_argument("--shared-jobs", type=int, default=1, help="and of each number that shares one (default: 1)")
    parser.add_argument("--least-schedules", type=int, default=250, help="fewer are too few (default: 250)")
    parser.add_argument("--least-preemptions", type=int, default=100, help="fewer are too few (default: 100)")
    parser.add_argument("--control", type=int, default=6, help="schedules of plain vLLM; 0 for none (default: 6)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 nothing differs but in the control, 1 something does or the control does not, 2 too little ran."""
    options = _parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    models = list(options.models)
    if options.made or not models:
        shapes = SMALL if options.small else FULL
        models += [str(make_checkpoint(options.out / name, shape)) for name, shape in shapes.items()]
    with (options.out / "log.txt").open("a") as file:
        return _run(options, models, Log(file))


def _run(options: argparse.Namespace, models: Sequence[str], log: Log) -> int:
    gpus = torch.cuda.device_count()
    table, writing = options.out / "rows.csv", threading.Lock()

    def on_row(row: Row) -> None:
        with writing:
            append_rows(table, [row])
        log.line(
            f"{row.model}, mode {row.mode}, {row.settings}: {row.schedules} schedules, {row.compared} compared, "
            f"{row.preemptions} preemptions, {row.sleeps} sleeps, {row.updates} updates, {row.differences} differ"
            f"{', it broke' * row.broke}{f', not run: {row.not_run}' * bool(row.not_run)}"
        )

    def fuzzer(model: str, mode: str, schedules: int) -> Fuzzer:
        plan = FuzzPlan(
            model=model,
            serve_args=(),
            mode=mode,
            seed=options.seed,
            seconds=options.seconds,
            schedules=schedules,
            folder=options.out,
            context=context_of(model, ()),
            shrinking=SHRINKING,
        )
        return Fuzzer(plan, on_row=on_row)

    fuzzers = {model: fuzzer(model, "1", options.schedules) for model in models}
    jobs: list[Job] = []
    for place, (model, one) in enumerate(fuzzers.items()):
        count = options.settings // len(fuzzers) + (place < options.settings % len(fuzzers))
        numbers = chosen(one, count, options.words)
        jobs += [Job(one, number, Path(model).name) for number in numbers]
        if len(numbers) < count:
            log.line(f"{Path(model).name}: {len(numbers)} of {count} settings have the words {options.words}")
    ours = list(fuzzers.values())
    control = fuzzer(models[0], "0", options.control)
    if options.control:
        jobs.insert(0, Job(control, control_of(control), f"plain vLLM, {Path(models[0]).name}"))
    until = time.monotonic() + options.seconds
    lanes = Lanes(jobs, gpus, options.jobs, options.shared_jobs, until, log)
    _finish(lanes, [*ours, control], until + GRACE, log)

    rows = [row for one in ours for row in one.rows]
    found = totals(rows)
    log.line("the mode: " + ", ".join(f"{number} {name}" for name, number in found.items()))
    differs = sum(row.differences for row in control.rows)
    if options.control:
        done = sum(row.schedules for row in control.rows)
        log.line(f"the control, plain vLLM: {differs} of {done} schedules differ, or targets between engines")
    for path, finding in (finding for one in ours for finding in one.findings):
        log.line(f"{path}: {finding.text}")
    status = Status.DIVERGED if found["differences"] or found["broke"] else Status.REPRODUCIBLE
    if options.control and not differs:
        log.line("the control shows no difference, so equal bits of the others prove nothing")
        status = Status.DIVERGED
    for text in wanting(found, options):
        log.line(f"too little: {text}")
        status = status or Status.NO_TEST
    return status


def _finish(lanes: Lanes, fuzzers: Sequence[Fuzzer], deadline: float, log: Log) -> None:
    """Run the lanes; when the time is over, end what still runs, so that every engine leaves its row."""
    for thread in lanes.threads:
        thread.start()
    for thread in lanes.threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in lanes.threads):
        log.line("the time is over: ending the engines that still run")
        while any(thread.is_alive() for thread in lanes.threads) and time.monotonic() < deadline + GRACE:
            for one in fuzzers:
                one.stop()
            time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
