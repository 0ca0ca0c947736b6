"""Engines of a model under every schedule, compared bit for bit: `python -m scripts.prove MODEL [MODEL ...]`.

More than `vllm-batch-invariant check --thorough` tries, in less time, because models are put through it beside each
other. Meant for a GPU of 80 GB and more; the options make it fit a CPU and a tiny model.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.verify.check.engine import answer_of, generated_tokens
from vllm_batch_invariant.verify.check.cases import AGAIN, CONCURRENT, CONCURRENT_LENGTHS, PREEMPTED, PROMPT_LOGPROBS, SEEDED, WARM
from vllm_batch_invariant.verify.check.guarantees import Outcome
from vllm_batch_invariant.verify.check.report import Report, as_json, print_report
from vllm_batch_invariant.verify.check.results import CheckResults
from vllm_batch_invariant.verify.divergence import Answer
from vllm_batch_invariant.verify.harness.requests import SAMPLING, concurrent_requests, sampling_requests, request, tokens
from vllm_batch_invariant.verify.harness.worker import Engine, StepResult
from vllm_batch_invariant.verify.outcome import NoTestError, Status

COUNTS = (1, 2, 7, 8, 15, 16, 17, 43, 44, 45, 46, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 1000)
LONG_COUNTS = (64, 100, 127)
LENGTHS = (1, 5, 9, 10, 11, 64, 700, 3000, 8000, 16000)
LONG_COMPANY = ("batch", "among long prompts")
EVICTED = ("schedule", "after its pages were evicted")
LOGPROBS = 20
MANY = 12
PAGE = 64


@dataclass(frozen=True)
class Plan:
    """What a model is put through.

    Attributes:
        lengths: tokens of the prompts that are looked at, ascending.
        generated: tokens of their answers.
        most_others: larger companies and longer neighbours are left out.
        longest: tokens a request may have.
    """

    lengths: tuple[int, ...]
    generated: int
    most_others: int
    longest: int

    @property
    def small_pages(self) -> int:
        """Pages of the small cache: little more than the longest prompt needs."""
        return (self.lengths[-1] + self.generated) // PAGE + 8

    @property
    def settings(self) -> dict[str, list[str]]:
        """Arguments of the engines whose answers have to be those of the first."""
        small = self.lengths[-1] + self.generated + PAGE
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

    def looked_at(self) -> dict[str, dict[str, Any]]:
        """The greedy requests whose bits are looked at, by name."""
        return {
            f"{length} tokens": request(tokens(length, 1), max_tokens=self.generated, logprobs=LOGPROBS)
            for length in self.lengths
        }

    def sampled(self) -> dict[str, dict[str, Any]]:
        """Requests that sample with a seed, by the way they do."""
        return {
            way: request(tokens(45, 1), max_tokens=self.generated, logprobs=LOGPROBS, **options)
            for way, options in SAMPLING.items()
        }

    def many(self) -> list[dict[str, Any]]:
        """Requests that outgrow the small cache together."""
        begun, each = self.lengths[0], 3 * self.small_pages * PAGE // (2 * MANY)
        return [request(tokens(begun, 100 + i), max_tokens=each - begun) for i in range(MANY)]


FULL = Plan((45, 300, 3000), 64, 1000, 20_000)
SMALL = Plan((45, 300), 16, 46, 2000)


class _Answers:
    """One engine's answers, put beside those of the first."""

    def __init__(self, engine: Engine, plan: Plan, results: CheckResults) -> None:
        self._engine, self._plan, self._results = engine, plan, results
        looked_at = self._plan.looked_at() | self._plan.sampled()
        self.alone = {name: answer_of(self._first(self._step(name, [one]))) for name, one in looked_at.items()}
        many = self._step("many", self._plan.many())
        self.many = [answer_of(one["completions"][0]) for one in many.requests]
        self._preemptions = many.preemptions

    def _step(self, name: str, requests: list[dict[str, Any]], reset: bool = True) -> StepResult:
        return self._engine.step(name, requests, reset and self._engine.info["prefix_caching"])

    @staticmethod
    def _first(step: StepResult) -> dict[str, Any]:
        return step.requests[0]["completions"][0]

    def _in_company(self, case: tuple[str, str], label: str, batch: list[dict[str, Any]]) -> StepResult:
        """A step of several requests, without which a fact about company is none."""
        step = self._step(label, batch)
        if step.largest_batch < 2:
            self._results.gaps[case] = "the engine ran one request at a time"
        return step

    def _beside(self, case: tuple[str, str], label: str, others: Sequence[dict[str, Any]]) -> None:
        """The requests that are looked at, among others: the first, the last and in the middle."""
        looked_at, batch = self._plan.looked_at(), list(others)
        for number, one in enumerate(looked_at.values()):
            batch.insert(number * len(batch) // (len(looked_at) - 1), one)
        step = self._in_company(case, label, batch)
        for name, one in looked_at.items():
            place = next(place for place, other in enumerate(batch) if other is one)
            answer = answer_of(step.requests[place]["completions"][0])
            self._results.add(*case, f"{name} {label}", self.alone[name], answer)

    def with_concurrent_requests(self) -> None:
        """Everything that has to do with others."""
        for count in (count for count in COUNTS if count <= self._plan.most_others):
            self._beside(CONCURRENT, f"with {count} others", concurrent_requests(count, count))
        for count in (count for count in LONG_COUNTS if count <= self._plan.most_others):
            others = [request(tokens(500 + 20 * i, 900 + i), max_tokens=4, logprobs=None) for i in range(count)]
            self._beside(LONG_COMPANY, f"with {count} of 500 tokens and more", others)
        for length in (length for length in LENGTHS if length < self._plan.longest - 100):
            concurrent = request(tokens(length, 77), max_tokens=16, logprobs=None)
            self._beside(CONCURRENT_LENGTHS, f"beside {length} tokens", [concurrent])
        for way, mine in self._plan.sampled().items():
            others = sampling_requests()
            step = self._in_company(SEEDED, f"{way} in company", [*others[:9], mine, *others[9:]])
            answer = answer_of(step.requests[9]["completions"][0])
            self._results.add(*SEEDED, way, self.alone[way], answer)

    def prompt_logprobs(self) -> None:
        ids = tokens(300, 1)
        mine = request(ids, max_tokens=1, prompt_logprobs=5)
        alone = self._step("prompt", [mine])
        beside = self._in_company(PROMPT_LOGPROBS, "prompt in company", [mine, *concurrent_requests(20, 6)])
        found = (generated_tokens(ids[1:], step.requests[0]["prompt_logprobs"][1:]) for step in (alone, beside))
        self._results.add(*PROMPT_LOGPROBS, "with 20 others", *(Answer.of("", steps) for steps in found))

    def warm(self) -> None:
        """The same again, from what the prefix cache kept."""
        for name, one in list(self._plan.looked_at().items())[1:]:
            self._step(f"{name}, cold", [one])
            warm = self._step(f"{name}, warm", [one], reset=False)
            if not warm.requests[0]["cached"]:
                self._results.gaps[WARM] = "nothing was found in it"
            self._results.add(*WARM, name, self.alone[name], answer_of(self._first(warm)))

    def evicted(self) -> None:
        """A prompt whose pages were taken by others before it came again."""
        [name, one] = list(self._plan.looked_at().items())[1]
        self._step(f"{name}, before", [one])
        self._step("others that fill the cache", self._plan.many(), reset=False)
        again = self._step(f"{name}, evicted", [one], reset=False)
        if again.requests[0]["cached"]:
            self._results.gaps[EVICTED] = f"{again.requests[0]['cached']} tokens were still there"
        self._results.add(*EVICTED, name, self.alone[name], answer_of(self._first(again)))

    def compare(self, case: tuple[str, str], first: "_Answers") -> None:
        """Everything that was asked alone, with the first engine's answers."""
        for name, answer in self.alone.items():
            self._results.add(*case, name, first.alone[name], answer)
        self._compare_many(case, first)

    def preempted(self, first: "_Answers") -> None:
        """Requests that outgrew the cache together."""
        if not self._preemptions:
            self._results.gaps[PREEMPTED] = "the engine did not preempt"
        self._compare_many(PREEMPTED, first)

    def _compare_many(self, case: tuple[str, str], first: "_Answers") -> None:
        for number, (answer, expected) in enumerate(zip(self.many, first.many, strict=True)):
            self._results.add(*case, f"request {number} of {MANY}", expected, answer)


def prove(model: str, plan: Plan, arguments: Sequence[str], flag: str, on_progress: Callable[[str], None]) -> CheckResults:
    """Put a model's engines through the plan, one after the other.

    Args:
        model: its folder or name.
        plan: what to try.
        arguments: more arguments of ``vllm serve`` for every engine.
        flag: of the mode; plain vLLM is asked by one engine alone, because one that differs is enough.
        say: is told what happens now.

    Raises:
        NoTestError: an engine did not start, or broke.
    """
    results = CheckResults(f"{Path(model).name}, {FLAG}={flag}", [])

    @contextmanager
    def started(name: str, more: Sequence[str]) -> Iterator[Engine]:
        on_progress(name)
        longest = [] if "--max-model-len" in more else ["--max-model-len", str(plan.longest)]
        with Engine(model, [*arguments, *longest, "--max-logprobs", str(LOGPROBS), *more], flag) as engine:
            results.info = results.info or engine.info
            yield engine

    (name, more), *others = plan.settings.items()
    with started(name, more) as engine:
        first = _Answers(engine, plan, results)
        _Answers(engine, plan, results).compare(AGAIN, first)
        first.with_concurrent_requests()
        first.prompt_logprobs()
        first.warm()
    for name, more in others if flag == "1" else []:
        with started(name, more) as engine:
            later = _Answers(engine, plan, results)
            later.compare(("schedule", name), first)
            if "--num-gpu-blocks-override" in more:
                later.preempted(first)
                later.evicted()
    return results


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.prove", description=__doc__)
    parser.add_argument("models", nargs="+", help="folders or names of models")
    parser.add_argument("--control", action="store_true", help="also plain vLLM on the first model, which must differ")
    parser.add_argument("--small", action="store_true", help="a plan for a tiny model on a CPU")
    parser.add_argument("--jobs", type=int, default=1, help="models beside each other (default: 1)")
    parser.add_argument("--kv-cache-gib", type=int, default=8, help="KV cache of an engine (default: 8)")
    parser.add_argument("--json", type=Path, help="also write what was found to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 everything holds and the control differs, 1 something else, 2 something could not be tried."""
    options, out = _parse(argv), Console(width=160)
    plan = SMALL if options.small else FULL
    # Given and not measured, because engines beside each other would measure each other.
    arguments = ["--kv-cache-memory-bytes", str(options.kv_cache_gib << 30), "--gpu-memory-utilization", "0.05"]
    runs = [(model, "1") for model in options.models] + [(options.models[0], "0")] * options.control

    def run(model: str, flag: str) -> Report:
        began, clock = datetime.now().astimezone().isoformat(timespec="seconds"), time.monotonic()
        found = prove(model, plan, arguments, flag, lambda now: out.log(f"{Path(model).name}, {flag}: {now}"))
        took = time.monotonic() - clock
        report = Report(Path(model).name, "proof", tuple(arguments), began, took, (found,))
        print_report(out, report)
        return report

    status, reports = Status.REPRODUCIBLE, []
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {pool.submit(run, model, flag): (model, flag) for model, flag in runs}
        for future in as_completed(waiting):
            model, flag = waiting[future]
            try:
                reports.append(future.result())
            except NoTestError as error:
                out.print(f"{Path(model).name}, {flag}: {error}", style="red", highlight=False, markup=False)
                status = status or Status.NO_TEST
                continue
            outcome = reports[-1].outcome
            if (outcome is Outcome.BREAKS) != (flag == "0"):
                status = Status.DIVERGED
            elif outcome is Outcome.NOT_TESTED:
                status = status or Status.NO_TEST
            if options.json:
                options.json.write_text(json.dumps([as_json(report) for report in reports], indent=1))
    return status


if __name__ == "__main__":
    sys.exit(main())
