"""What a real engine is put through: one request alone and in every company, and under other schedules."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..divergence import Answer, GeneratedToken
from ..harness.metrics import Trace
from ..harness.requests import SAMPLING, varied_requests, ordinary, request, tokens
from ..harness.worker import Engine, StepResult
from ..outcome import NoTestError
from ..request_parameters import KINDS, OF_TEXT, Accepts, draw_concurrent, varied
from .certificates import OPERATIONS, Certificate
from .cases import (
    AGAIN,
    CHUNKS,
    CONCURRENT,
    CONCURRENT_LENGTHS,
    OTHER_CHUNKS,
    PLACE,
    PREEMPTED,
    PROMPT_LOGPROBS,
    RESTARTED,
    SAME_BATCH,
    SEEDED,
    WARM,
)
from .presets import Preset
from .results import CheckResults, Latency

NEEDLE = 300
"""Tokens of the prompt that is looked at: more than a page of the KV cache and a split of attention have."""
SHORT = 45
"""Tokens of a prompt that is no longer than a small chunk."""
CHUNK = 64
"""Most tokens in a step of the engine with small chunks."""
MANY, MANY_PROMPT, MANY_TOKENS = 12, 100, 60
"""Requests that start in the small KV cache together and outgrow it."""
LEAST_CONTEXT = 2 * NEEDLE
CERTIFY = "vllm_batch_invariant.verify.check.operations:certificates"

OnProgress = Callable[[str], None]


def _with(others: int) -> str:
    return f"with {others} other{'s' * (others > 1)}"


def answer_of(completion: dict[str, Any]) -> Answer:
    """The answer that the driver describes.

    Raises:
        NoTestError: it has no logprobs.
    """
    if not completion["logprobs"]:
        raise NoTestError("the engine returned no logprobs, so bits cannot be compared; use a model that gives them")
    return Answer.of(completion["text"], generated_tokens(completion["tokens"], completion["logprobs"]))


def generated_tokens(ids: Sequence[int], logprobs: Sequence[list[tuple[int, str, int]]]) -> list[GeneratedToken]:
    """The driver's tokens with their logprobs: (id, hexadecimal number, rank) of every candidate, as listed."""
    found = []
    for token, listed in zip(ids, logprobs, strict=True):
        values = {str(other): float.fromhex(text) for other, text, _ in listed}
        ranks = tuple(rank for *_, rank in listed)
        found.append(GeneratedToken(str(token), values[str(token)], tuple(values.items()), ranks))
    return found


class EngineRun:
    """The steps of one engine, with the answers that others have to equal.

    Raises:
        NoTestError: the engine's context is too short for the requests.
    """

    def __init__(self, engine: Engine, name: str, size: Preset, results: CheckResults, on_progress: OnProgress) -> None:
        self._engine, self._size, self.results, self._on_progress = engine, size, results, on_progress
        self._trace: list[tuple[float, int]] = []
        context = engine.info["context"]
        if context < LEAST_CONTEXT:
            raise NoTestError(f"the engine's context of {context} tokens is too short: a check needs {LEAST_CONTEXT}")
        self.small_context = min(context, 768)
        self._ids = ordinary(engine.info["vocabulary"])
        kinds = tuple(kind for kind in KINDS if engine.info["tokenizer"] or kind not in OF_TEXT)
        self._accepts = Accepts(self._ids, engine.info["vocabulary"], engine.info["most_logprobs"], kinds)
        self._beside: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._refused: Counter[str] = Counter()
        self._name, self._clock = name, 0.0
        self._needle = request(tokens(NEEDLE, 1, self._ids), max_tokens=size.tokens)
        self._short = request(tokens(SHORT, 1, self._ids), max_tokens=size.tokens)
        self._seeded = request(self._needle["prompt"], max_tokens=size.tokens, **SAMPLING["top_p"])
        self.alone: dict[str, Answer] = {}

    def certify(self) -> None:
        """Certificates of every operation."""
        for operation in OPERATIONS:
            self._on_progress(f"certificates of {operation}")
            for certificate in self._engine.call(CERTIFY, operation, self._size.rows):
                certificate["rows"] = tuple(certificate["rows"])
                self.results.certificates.append(Certificate(**certificate))

    def as_served(self) -> None:
        """Everything that the engine can be put through with the settings it has."""
        self.again()
        self.with_concurrent_requests()
        self._beside_neighbours()
        self._sampling()
        self._prompt_logprobs()
        self._prefix_cache()
        self.alone["short"] = self._answer("short", [self._short])
        self.alone["seeded"] = self._answer("seeded", [self._seeded])
        self.many = [answer_of(one["completions"][0]) for one in self._step("many", self._many()).requests]
        self._load()

    def again(self) -> None:
        """One request alone, which others have to equal, and once more."""
        self.alone["needle"] = self._answer("alone", [self._needle])
        self.results.show("alone", self.alone["needle"])
        self._compare(AGAIN, "again", [self._needle])

    def with_concurrent_requests(self) -> None:
        """The request in every company and at every place, and one batch twice."""
        counts = [count for count in self._size.company if count < self._engine.info["requests_in_a_step"]]
        # an engine of one request a step is tried all the same, so that the report says what it did
        counts = counts or list(self._size.company[:1])
        for count in counts:
            others = self._company(count, count)
            self._compare(CONCURRENT, _with(count), [self._needle, *others])
        most = counts[-1]
        others = self._company(most, 1000)
        for place in sorted({0, most // 2, most}):
            batch = [*others[:place], self._needle, *others[place:]]
            self._compare(PLACE, f"at place {place} of {most + 1}", batch, which=place)
        looked_at = [request(tokens(SHORT, 300 + i, self._ids), max_tokens=self._size.tokens) for i in range(4)]
        others = [one for one in self._company(16, 5) if "seed" in one["params"] or not one["params"]["temperature"]]
        mixed = [self._needle, *others, *looked_at]
        first, second = (self._step("mixed", mixed, reset_prefix_cache=True) for _ in range(2))
        for number, (one, other) in enumerate(zip(first.requests, second.requests, strict=True)):
            if "refused" not in one and one["completions"][0]["logprobs"]:
                answers = (answer_of(side["completions"][0]) for side in (one, other))
                self.results.add(*SAME_BATCH, f"request {number} of {len(mixed)}", *answers)
        self._in_company(SAME_BATCH, min(first.largest_batch, second.largest_batch), others)

    def with_small_limits(self, main: "EngineRun") -> None:
        """The same requests as the main engine's, in chunks and with a KV cache too small for all."""
        self.results.add(*RESTARTED, "restarted", main.alone["short"], self._answer("short", [self._short]))
        chunk = self._engine.info["tokens_in_a_step"]
        if not self._engine.info["chunked_prefill"]:
            self.results.not_applicable[CHUNKS] = "chunked prefill is off in this engine"
        elif chunk < NEEDLE:
            self._compare(CHUNKS, f"in chunks of {chunk}", [self._needle], main.alone["needle"])
            answer = self._answer("seeded", [self._seeded])
            self.results.add(*CHUNKS, f"with a seed, in chunks of {chunk}", main.alone["seeded"], answer)
        else:
            self.results.gaps[CHUNKS] = f"the engine has steps of {chunk} tokens, although {CHUNK} were asked for"
        step = self._step("many", self._many())
        if not step.preemptions:
            self.results.gaps[PREEMPTED] = "the engine did not preempt, although its KV cache was too small for all"
            return
        self._compare_many(PREEMPTED, step, main)
        self.results.proof[PREEMPTED] = f"{step.preemptions} preemptions"

    def with_other_pages(self, main: "EngineRun") -> None:
        """The same requests as the main engine's, in other chunks and pages."""
        info = self._engine.info
        label = f"in chunks of {info['tokens_in_a_step']} and pages of {info['page']}"
        self._compare(OTHER_CHUNKS, label, [self._needle], main.alone["needle"])
        self.results.add(*OTHER_CHUNKS, "short", main.alone["short"], self._answer("short", [self._short]))
        self._compare_many(OTHER_CHUNKS, self._step("many", self._many()), main)

    def _compare_many(self, case: tuple[str, str], step: StepResult, main: "EngineRun") -> None:
        for number, (one, expected) in enumerate(zip(step.requests, main.many, strict=True)):
            self.results.add(*case, f"request {number} of {MANY}", expected, answer_of(one["completions"][0]))

    def _many(self) -> list[dict[str, Any]]:
        return [request(tokens(MANY_PROMPT, 100 + i, self._ids), max_tokens=MANY_TOKENS) for i in range(MANY)]

    def _beside_neighbours(self) -> None:
        context = self._engine.info["context"]
        for length in (length for length in self._size.concurrent_lengths if length + 8 < context):
            most = min(self._size.tokens, context - length - 1)
            params = draw_concurrent(random.Random(length), self._accepts, most, length)
            neighbour = {"prompt": tokens(length, 77, self._ids), "params": params, "may_be_refused": True}
            label = f"beside a prompt of {length}"
            self._compare(CONCURRENT_LENGTHS, label, [neighbour, self._needle], which=1)

    def _sampling(self) -> None:
        others = self._company(24, 24)
        for kind in self._size.sampling:
            mine = request(tokens(SHORT, 1, self._ids), max_tokens=self._size.tokens, **SAMPLING[kind])
            expected = self._answer(f"{kind} alone", [mine])
            beside = self._step(f"{kind} in company", [*others[:9], mine, *others[9:]], reset_prefix_cache=True)
            self.results.add(*SEEDED, kind, expected, answer_of(beside.requests[9]["completions"][0]))
            self._in_company(SEEDED, beside.largest_batch, others)

    def _prompt_logprobs(self) -> None:
        mine = request(self._needle["prompt"], max_tokens=1, prompt_logprobs=5)
        alone = self._step("prompt logprobs", [mine], reset_prefix_cache=True)
        others = self._company(20, 6)
        beside = self._step("prompt logprobs in company", [*others, mine], reset_prefix_cache=True)
        ids = mine["prompt"][1:]
        answers = [
            Answer.of("", generated_tokens(ids, one["prompt_logprobs"][1:])) for one in (alone.requests[0], beside.requests[-1])
        ]
        self.results.add(*PROMPT_LOGPROBS, "with 20 others", *answers)
        self._in_company(PROMPT_LOGPROBS, beside.largest_batch, others)

    def _prefix_cache(self) -> None:
        if not self._engine.info["prefix_caching"]:
            self.results.not_applicable[WARM] = "prefix caching is off in this engine"
            return
        cold = self._step("cold", [self._needle], reset_prefix_cache=True).requests[0]
        warm = self._step("warm", [self._needle]).requests[0]
        if cold["cached"] or not warm["cached"]:
            found = f"{cold['cached']} tokens when it was cold and {warm['cached']} when it was warm"
            self.results.gaps[WARM] = f"the prefix cache had {found}"
            return
        expected = self.alone["needle"]
        for label, one in (("cold", cold), ("warm", warm)):
            answer = answer_of(one["completions"][0])
            self.results.add(*WARM, f"from a {label} cache", expected, answer)
            self.results.show(f"from a {label} cache", answer)
        half = self._needle["prompt"][: warm["cached"] - 1] + tokens(NEEDLE - warm["cached"] + 1, 4, self._ids)
        partly = request(half, max_tokens=self._size.tokens)
        got = self._step("partly warm", [partly]).requests[0]
        expected = self._answer("partly warm, cold", [partly])
        self.results.add(*WARM, "another end of the prompt", expected, answer_of(got["completions"][0]))
        self.results.proof[WARM] = f"{warm['cached']} and {got['cached']} tokens were found in the cache"

    def _load(self) -> None:
        count, length = self._size.load
        requests = [request(tokens(SHORT, 200 + i, self._ids), max_tokens=length, logprobs=None) for i in range(count)]
        self._step("load, first", requests, reset_prefix_cache=True)
        step = self._step("load", requests, reset_prefix_cache=True)
        self.results.latency = Latency.of([one["token_seconds"] for one in step.requests])

    def _compare(
        self,
        case: tuple[str, str],
        label: str,
        requests: list[dict[str, Any]],
        expected: Answer | None = None,
        which: int = 0,
    ) -> None:
        """Keep what the needle, request ``which``, was answered with a cold cache."""
        step = self._step(label, requests, reset_prefix_cache=True)
        answer = answer_of(step.requests[which]["completions"][0])
        self.results.add(*case, label, expected or self.alone["needle"], answer)
        self.results.show(label, answer)
        if len(requests) > 1:
            self._in_company(case, step.largest_batch, [one for place, one in enumerate(requests) if place != which])

    def _answer(self, name: str, requests: list[dict[str, Any]]) -> Answer:
        [one] = self._step(name, requests, reset_prefix_cache=True).requests
        return answer_of(one["completions"][0])

    def _company(self, count: int, seed: int) -> list[dict[str, Any]]:
        return varied_requests(count, seed, self._accepts, self._size.tokens)

    def _in_company(self, case: tuple[str, str], largest: int, others: list[dict[str, Any]]) -> None:
        """Note who ran beside the request of a fact."""
        why = "the engine never ran two requests at a time; raise --max-num-seqs"
        beside = self._beside.setdefault(case, [])
        beside += [one["params"] for one in others]
        refused = "; ".join(f"{times} of them refused: {reason}" for reason, times in self._refused.items())
        self.results.with_concurrent_requests(case, largest, why, varied(beside) + (f" ({refused})" if refused else ""))

    def _step(self, name: str, requests: list[dict[str, Any]], reset_prefix_cache: bool = False) -> StepResult:
        self._on_progress(f"{self._name}: {name}")
        reset = reset_prefix_cache and self._engine.info["prefix_caching"]
        step = self._engine.step(name, requests, reset)
        self._refused.update(one["refused"] for one in step.requests if "refused" in one)
        self._trace += [(self._clock + seconds, size) for seconds, size in step.batches]
        self._clock = self._trace[-1][0] if self._trace else 0.0
        seconds, sizes = zip(*self._trace, strict=True)
        traces = self.results.traces
        traces[:] = [trace for trace in traces if trace.engine != self._name] + [Trace(self._name, seconds, sizes)]
        return step
