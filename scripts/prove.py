"""Engines of a model under every schedule, compared bit for bit: ``python -m scripts.prove MODEL [MODEL ...]``.

It tries more than ``vllm-batch-invariant check --thorough`` in less time, because several engines run at a time. It is
meant for a GPU of 80 GB and more; with ``--small`` it fits a CPU and a tiny model.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.verify.check.engine import LEAST_CONTEXT, EngineRun, answer_of
from vllm_batch_invariant.verify.check.guarantees import (
    AGAIN,
    CONCURRENT,
    CONCURRENT_LENGTHS,
    PREEMPTED,
    WARM,
    CheckCase,
)
from vllm_batch_invariant.verify.check.presets import Preset
from vllm_batch_invariant.verify.check.report import Report, as_json, print_report
from vllm_batch_invariant.verify.check.results import CheckResults
from vllm_batch_invariant.verify.harness.requests import SAMPLING, concurrent_requests, request, tokens
from vllm_batch_invariant.verify.harness.worker import Engine
from vllm_batch_invariant.verify.outcome import NoTestError, Outcome, Status

COUNTS = (1, 2, 7, 8, 15, 16, 17, 43, 44, 45, 46, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 1000)
LONG_COUNTS = (64, 100, 127)
LENGTHS = (1, 5, 9, 10, 11, 64, 700, 3000, 8000, 16000)
LONG_PROMPTS: CheckCase = ("batch", "with concurrent long prompts")
EVICTED: CheckCase = ("schedule", "after its pages were evicted")
LOGPROBS = 20
MANY = 12
PAGE = 64


@dataclass(frozen=True)
class ProofPlan:
    """The requests and engines of a model.

    Attributes:
        lengths: prompt lengths of the target requests, ascending.
        generated: output tokens of a target.
        most_others: larger numbers of concurrent requests are left out.
        longest: tokens that a request may have.
    """

    lengths: tuple[int, ...]
    generated: int
    most_others: int
    longest: int

    @property
    def preset(self) -> Preset:
        """What every engine shares with a check."""
        return Preset("proof", self.generated, COUNTS, LENGTHS, tuple(SAMPLING), (1, 1), (2,), 1)

    @property
    def small_pages(self) -> int:
        """Pages of the small cache: little more than the longest prompt needs."""
        return (self.lengths[-1] + self.generated) // PAGE + 8

    @property
    def settings(self) -> dict[str, list[str]]:
        """Arguments of the engines, whose answers have to equal those of the first engine."""
        small = max(LEAST_CONTEXT, self.lengths[-1] + self.generated + PAGE)
        return {
            "as served": [],
            "restarted": [],
            "eager, sync, steps of 512": [
                *("--enforce-eager", "--no-async-scheduling", "--no-enable-prefix-caching"),
                *("--max-num-batched-tokens", "512"),
            ],
            "steps of 2048, pages of 32": ["--max-num-batched-tokens", "2048", "--block-size", "32"],
            "a small cache": [
                *("--max-model-len", str(small), "--block-size", str(PAGE)),
                *("--num-gpu-blocks-override", str(self.small_pages)),
            ],
        }

    def targets(self) -> dict[str, dict[str, Any]]:
        """The greedy target requests, by name."""
        return {
            f"{length} tokens": request(tokens(length, 1), max_tokens=self.generated, logprobs=LOGPROBS)
            for length in self.lengths
        }

    def sampled(self) -> dict[str, dict[str, Any]]:
        """Target requests that sample with a seed, by the way they sample."""
        return {
            way: request(tokens(45, 1), max_tokens=self.generated, logprobs=LOGPROBS, **options)
            for way, options in SAMPLING.items()
        }


FULL = ProofPlan((45, 300, 3000), 64, 1000, 20_000)
SMALL = ProofPlan((45, 300), 16, 46, 2000)


class ProofRun(EngineRun):
    """One engine: its answers to the targets alone, and the cases of a proof, on top of those of a check."""

    def __init__(
        self, engine: Engine, name: str, plan: ProofPlan, results: CheckResults, on_progress: Callable[[str], None]
    ) -> None:
        super().__init__(engine, name, plan.preset, results, on_progress)
        self._plan, self._targets = plan, plan.targets()
        self.answer_alone()

    def answer_alone(self) -> None:
        """Answer the targets alone, and the requests that outgrow a small cache."""
        for name, one in (self._targets | self._plan.sampled()).items():
            self.alone[name] = self.answer(name, one)
        many = self.step("many", self.many(), reset_prefix_cache=True)
        self.many_answers = [answer_of(one["completions"][0]) for one in many.requests]
        self._preemptions = many.preemptions

    def many(self) -> list[dict[str, Any]]:
        """Requests that outgrow the small cache together."""
        begun, each = self._plan.lengths[0], 3 * self._plan.small_pages * PAGE // (2 * MANY)
        return [request(tokens(begun, 100 + i), max_tokens=each - begun) for i in range(MANY)]

    def concurrent(self) -> None:
        """All targets in one batch with every number and every length of concurrent requests; seeded requests."""
        for count in (count for count in COUNTS if count <= self._plan.most_others):
            self._compare_with(CONCURRENT, f"with {count} others", concurrent_requests(count, count))
        for count in (count for count in LONG_COUNTS if count <= self._plan.most_others):
            others = [request(tokens(500 + 20 * i, 900 + i), max_tokens=4, logprobs=None) for i in range(count)]
            self._compare_with(LONG_PROMPTS, f"with {count} of 500 tokens and more", others)
        for length in (length for length in LENGTHS if length < self._plan.longest - 100):
            other = request(tokens(length, 77), max_tokens=16, logprobs=None)
            self._compare_with(CONCURRENT_LENGTHS, f"with a prompt of {length}", [other])
        self.sampling()
        self.prompt_logprobs()

    def _compare_with(self, case: CheckCase, label: str, others: Sequence[dict[str, Any]]) -> None:
        """Run the targets among others: one first, one last and the rest between."""
        batch = list(others)
        for number, one in enumerate(self._targets.values()):
            batch.insert(number * len(batch) // (len(self._targets) - 1), one)
        step = self.step(label, batch, reset_prefix_cache=True)
        for name, one in self._targets.items():
            place = next(place for place, other in enumerate(batch) if other is one)
            answer = answer_of(step.requests[place]["completions"][0])
            self.results.add(*case, f"{name} {label}", self.alone[name], answer)
        self.note_batch(case, step.largest_batch, others)

    def warm(self) -> None:
        """Answer the longer targets again from a warm prefix cache."""
        for name, one in list(self._targets.items())[1:]:
            self.step(f"{name}, cold", [one], reset_prefix_cache=True)
            [warm] = self.step(f"{name}, warm", [one]).requests
            if not warm["cached"]:
                self.results.gaps[WARM] = "nothing was found in the prefix cache"
            self.results.add(*WARM, name, self.alone[name], answer_of(warm["completions"][0]))

    def evicted(self) -> None:
        """Answer a target again after other requests took its pages."""
        name, one = list(self._targets.items())[1]
        self.step(f"{name}, before", [one], reset_prefix_cache=True)
        self.step("others that fill the cache", self.many())
        [again] = self.step(f"{name}, evicted", [one]).requests
        if again["cached"]:
            self.results.gaps[EVICTED] = f"{again['cached']} tokens were still in the prefix cache"
        self.results.add(*EVICTED, name, self.alone[name], answer_of(again["completions"][0]))

    def compare(self, case: CheckCase, first: "ProofRun") -> None:
        """Compare all answers to requests alone with those of the first engine."""
        for name, answer in self.alone.items():
            self.results.add(*case, name, first.alone[name], answer)
        self.compare_many(case, self.many_answers, first)

    def preempted(self, first: "ProofRun") -> None:
        """Compare the answers to requests that outgrew the cache together."""
        if not self._preemptions:
            self.results.gaps[PREEMPTED] = "the engine did not preempt"
        self.compare_many(PREEMPTED, self.many_answers, first)


class Proof:
    """A plan, run in a model's engines.

    Args:
        model: its folder or name.
        plan: the requests and engines.
        arguments: more arguments of ``vllm serve`` for every engine.
        flag: the value of VLLM_BATCH_INVARIANT; of plain vLLM only the first engine runs, because one that differs is
            enough.
        on_progress: is called with the name of the engine that starts.
    """

    def __init__(
        self, model: str, plan: ProofPlan, arguments: Sequence[str], flag: str, on_progress: Callable[[str], None]
    ) -> None:
        self.name, self.flag = Path(model).name, flag
        self.results = CheckResults(f"{self.name}, {FLAG}={flag}", [])
        self._model, self._plan, self._arguments, self._on_progress = model, plan, tuple(arguments), on_progress
        self._first: Future[ProofRun] = Future()
        self._began, self._clock = datetime.now().astimezone().isoformat(timespec="seconds"), time.monotonic()
        self._waiting: list[Future[None]] = []

    def start(self, pool: ThreadPoolExecutor) -> None:
        """Have the engines run in the pool, the first one first: the others wait for its answers."""
        (name, more), *others = self._plan.settings.items()
        self._waiting = [pool.submit(self._run_first, name, more)]
        if self.flag == "1":
            self._waiting += [pool.submit(self._run_other, *setting) for setting in others]

    def report(self) -> Report:
        """What they found, when all have ended.

        Raises:
            NoTestError: an engine did not start, or broke.
        """
        wait(self._waiting)
        for one in self._waiting:
            one.result()
        took = time.monotonic() - self._clock
        return Report(self.name, "proof", self._arguments, self._began, took, (self.results,))

    @contextmanager
    def _started(self, name: str, more: Sequence[str]) -> Iterator[Engine]:
        self._on_progress(f"{self.name}, {self.flag}: {name}")
        longest = [] if "--max-model-len" in more else ["--max-model-len", str(self._plan.longest)]
        arguments = [*self._arguments, *longest, "--max-logprobs", str(LOGPROBS), *more]
        with Engine(self._model, arguments, self.flag) as engine:
            yield engine

    def _answers(self, engine: Engine, name: str) -> ProofRun:
        return ProofRun(engine, name, self._plan, self.results, lambda _: None)

    def _run_first(self, name: str, more: Sequence[str]) -> None:
        try:
            with self._started(name, more) as engine:
                self.results.info = engine.info
                first = self._answers(engine, name)
                self._first.set_result(first)
                self._answers(engine, name).compare(AGAIN, first)
                first.concurrent()
                first.warm()
        except BaseException as error:
            if not self._first.done():
                self._first.set_exception(error)
            raise

    def _run_other(self, name: str, more: Sequence[str]) -> None:
        with self._started(name, more) as engine:
            later = self._answers(engine, name)
            first = self._first.result()
            later.compare(("schedule", name), first)
            if "--num-gpu-blocks-override" in more:
                later.preempted(first)
                later.evicted()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.prove", description=__doc__)
    parser.add_argument("models", nargs="+", help="folders or names of models")
    parser.add_argument("--control", action="store_true", help="also plain vLLM on the first model, which must differ")
    parser.add_argument("--small", action="store_true", help="a plan for a tiny model on a CPU")
    parser.add_argument("--jobs", type=int, default=1, help="engines that run at a time (default: 1)")
    parser.add_argument("--kv-cache-gib", type=int, default=8, help="KV cache of an engine (default: 8)")
    serve_args = "more arguments of vllm serve, in one string, such as '--tensor-parallel-size 2'"
    parser.add_argument("--serve-args", type=shlex.split, default=[], metavar="ARGS", help=serve_args)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 everything holds and the control differs, 1 otherwise, 2 something could not be tested."""
    options, out = _parse(argv), Console(width=160)
    plan = SMALL if options.small else FULL
    # given and not measured, because engines that run at a time would measure each other
    arguments = ["--kv-cache-memory-bytes", str(options.kv_cache_gib << 30), "--gpu-memory-utilization", "0.05"]
    arguments += options.serve_args
    runs = [(model, "1") for model in options.models] + [(options.models[0], "0")] * options.control

    status, reports = Status.REPRODUCIBLE, []
    proofs = [Proof(model, plan, arguments, flag, out.log) for model, flag in runs]
    with ThreadPoolExecutor(options.jobs) as pool:
        for proof in proofs:
            proof.start(pool)
        for proof in proofs:
            try:
                report = proof.report()
            except NoTestError as error:
                out.print(f"{proof.name}, {proof.flag}: {error}", style="red", highlight=False, markup=False)
                status = status or Status.NO_TEST
                continue
            reports.append(report)
            print_report(out, report)
            if (report.outcome is Outcome.BREAKS) != (proof.flag == "0"):
                status = Status.DIVERGED
            elif report.outcome is Outcome.NOT_TESTED:
                status = status or Status.NO_TEST
            if options.json:
                options.json.write_text(json.dumps([as_json(report) for report in reports], indent=1))
    return status


if __name__ == "__main__":
    sys.exit(main())
