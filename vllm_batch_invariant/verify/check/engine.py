"""A check of engines: a target request alone, with concurrent requests, and under other schedules."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from ..answers import Answer, answer_of, listed_tokens
from ..harness import images, pooling
from ..harness.engine import pages_of_states, pages_of_windows, text_config
from ..harness.metrics import Latency, Trace
from ..harness.requests import (
    KINDS,
    OF_TEXT,
    SAMPLING,
    Accepts,
    draw_concurrent,
    ordinary,
    request,
    tokens,
    varied,
    varied_requests,
    without_values,
)
from ..harness.worker import Engine, StepResult
from ..outcome import NoTestError
from ..printing import count
from .guarantees import (
    ADAPTERS,
    AGAIN,
    APART,
    CHUNKS,
    CONCURRENT,
    CONCURRENT_LENGTHS,
    ENCODED,
    KEPT,
    KNOWN,
    OPERATIONS,
    OTHER_CHUNKS,
    PLACE,
    PREEMPTED,
    PROCESSED,
    PROMPT_LOGPROBS,
    RESTARTED,
    SAME_BATCH,
    SEEDED,
    WANTED,
    WARM,
    Certificate,
    CheckCase,
    cases_of_adapters,
    cases_of_engines,
    cases_of_images,
    cases_of_pooling,
)
from .presets import Preset
from .results import CheckResults, OnProgress

TARGET_TOKENS = 300
"""Length of the target's prompt: longer than a page of the KV cache and than a split of attention."""
SHORT = 45
"""Length of a prompt that fits in a small chunk."""
CHUNK, OTHER_CHUNK = 64, 200
"""Most tokens in a step of the engines with other chunks."""
SMALL_CACHE = 1024
"""Tokens in the KV cache of the engine that has to preempt."""
_WITH_STATES = 3
"""Requests whose states it holds beside these, of a model whose layers have some."""
MANY, MANY_PROMPT, MANY_TOKENS = 12, 100, 60
"""Number, prompt length and output length of requests that start together in the small KV cache and outgrow it."""
PREEMPT_AFTER = 3
"""Steps after which requests that pool are preempted: in chunks of 64 one is between two of them."""
LEAST_CONTEXT = 2 * TARGET_TOKENS
CERTIFY = "vllm_batch_invariant.verify.check.operations:certificates"
MADE = "vllm_batch_invariant.verify.receipt.items:made"
_MAIN, _SMALL, _OTHER = "as served", "with small chunks and a small KV cache", "with other chunks and pages"

Request = dict[str, Any]


def check_engine(
    model: str,
    arguments: Sequence[str],
    flag: str,
    preset: Preset,
    results: CheckResults,
    on_progress: OnProgress,
    adapters: Sequence[str] = (),
) -> None:
    """Check engines of one setting, one after the other, and keep the results as they come.

    Args:
        model: its folder or name.
        arguments: more arguments of ``vllm serve``.
        flag: the value of VLLM_BATCH_INVARIANT.
        results: is filled.
        on_progress: is called with what happens now.
        adapters: folders of LoRA adapters that the requests have.

    Raises:
        NoTestError: an engine did not start, or broke.
    """
    on_progress("starting the engine")
    with Engine(model, arguments, flag) as engine:
        results.info = engine.info | ({"adapters": [*adapters]} if adapters else {})
        kind = _kind(engine.info, adapters)
        results.planned[:] = kind.cases(preset)
        run = kind(engine, _MAIN, preset, results, on_progress, adapters)
        run.certify()
        run.as_served()
    info = engine.info
    limits = ["--max-model-len", str(run.small_context), "--max-num-seqs", str(CHUNK), "--no-enable-prefix-caching"]
    of_text = text_config(model)
    pages = -(-SMALL_CACHE // info["page"]) + _WITH_STATES * pages_of_states(of_text)
    pages += pages_of_windows(of_text, info["page"], _chunk(CHUNK, info))
    small = [*limits, *_step_limit(_chunk(CHUNK, info), info), "--num-gpu-blocks-override", str(pages)]
    on_progress(f"starting an engine {_SMALL}")
    with Engine(model, [*arguments, *small], flag) as engine:
        kind(engine, _SMALL, preset, results, on_progress, adapters).with_small_limits(run)
    if preset.engines > 1:
        page = str(32 if info["page"] != 32 else 64)
        other = [*limits, *_step_limit(_chunk(OTHER_CHUNK, info), info), *kind.scheduling, "--block-size", page]
        on_progress(f"starting an engine {_OTHER}")
        with Engine(model, [*arguments, *other], flag) as engine:
            kind(engine, _OTHER, preset, results, on_progress, adapters).with_other_pages(run)


def _kind(info: dict[str, Any], adapters: Sequence[str]) -> type["EngineRun"]:
    """How an engine is checked."""
    if adapters:
        return AdaptersRun
    return PoolingRun if info.get("pooling") else ImagesRun if info.get("images") else EngineRun


def _chunk(tokens: int, info: dict[str, Any]) -> int:
    """Most tokens in a step of an engine that must have an image whole."""
    about = info.get("images") or {}
    return max(tokens, images.largest(about) + 1) if about.get("whole") else tokens


def _step_limit(tokens: int, info: dict[str, Any]) -> list[str]:
    """Arguments that limit a step to so many tokens; none for an engine without chunked prefill, which refuses them."""
    return ["--max-num-batched-tokens", str(tokens)] if info["chunked_prefill"] else []


class EngineRun:
    """The requests that one engine answers, and the answers that others have to equal.

    Attributes:
        alone: answers to requests alone, by name.
        many_answers: answers to :meth:`many` requests.

    Raises:
        NoTestError: the engine's context is too short for the requests, or its model takes no text alone.
    """

    least_context = LEAST_CONTEXT
    """Tokens."""
    scheduling: tuple[str, ...] = ("--async-scheduling",)
    """Arguments of the engine with other pages."""
    cases = staticmethod(cases_of_engines)
    """What a check has to test."""
    no_chunks = "chunked prefill is off in this engine"
    """Why prompts come whole."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        preset: Preset,
        results: CheckResults,
        on_progress: OnProgress,
        adapters: Sequence[str] = (),
    ) -> None:
        self._engine, self._preset, self.results, self._on_progress = engine, preset, results, on_progress
        self._adapters = adapters
        self._trace: list[tuple[float, int]] = []
        images.require_text(engine.info)
        context = engine.info["context"]
        if context < (least := self.least_context):
            raise NoTestError(f"the engine's context of {context} tokens is too short: a check needs {least}")
        self.small_context = min(context, 768)
        self._ids = ordinary(engine.info["vocabulary"])
        kinds = tuple(kind for kind in KINDS if engine.info["tokenizer"] or kind not in OF_TEXT)
        self._accepts = Accepts(self._ids, engine.info["vocabulary"], engine.info["most_logprobs"], kinds)
        self._params: dict[CheckCase, list[dict[str, Any]]] = {}
        self._refused: Counter[str] = Counter()
        self._name, self._clock = name, 0.0
        self._target = self._request(tokens(min(TARGET_TOKENS, context), 1, self._ids))
        self._short = self._request(tokens(min(SHORT, context), 1, self._ids))
        self.alone: dict[str, Answer] = {}
        self.many_answers: list[Answer] = []

    def _request(self, prompt: list[int], **params: Any) -> Request:
        """A request of the kind that is compared."""
        return request(prompt, **{"max_tokens": self._preset.tokens} | params)

    @property
    def _seeded(self) -> Request:
        return self._request(self._target["prompt"], **SAMPLING["top_p"])

    def certify(self) -> None:
        """Make the certificates of every operation."""
        for operation in (*OPERATIONS, KNOWN):
            self._on_progress(f"certificates of {operation}")
            for certificate in self._engine.call(CERTIFY, operation, self._preset.rows):
                certificate["rows"] = tuple(certificate["rows"])
                self.results.certificates.append(Certificate(**certificate))

    def as_served(self) -> None:
        """Run every case that needs no other settings of the engine."""
        self.again()
        self.with_concurrent_requests()
        self._concurrent_lengths()
        self.sampling()
        self.prompt_logprobs()
        self._prefix_cache()
        self.alone["short"] = self.answer("short", self._short)
        self.alone["seeded"] = self.answer("seeded", self._seeded)
        self.many_answers = _answers(self.step("many", self.many()))
        self._load()

    def again(self) -> None:
        """Run the target request alone, for the answer that others have to equal, and once more."""
        self.alone["target"] = self.answer("alone", self._target)
        self.results.show("alone", self.alone["target"])
        self._compare(AGAIN, "again", [self._target])

    def with_concurrent_requests(self) -> None:
        """Run the target with every number of concurrent requests and at every place, and one batch twice."""
        counts = [number for number in self._preset.concurrent if number < self._engine.info["requests_in_a_step"]]
        # an engine of one request a step gets them too, so that the report says what it did
        counts = counts or list(self._preset.concurrent[:1])
        for number in counts:
            others = self._concurrent(number, number)
            self._compare(CONCURRENT, f"with {count(number, 'other')}", [self._target, *others])
        most = counts[-1]
        others = self._concurrent(most, 1000)
        for place in sorted({0, most // 2, most}):
            batch = [*others[:place], self._target, *others[place:]]
            self._compare(PLACE, f"at place {place} of {most + 1}", batch, which=place)
        targets = [self._request(tokens(SHORT, 300 + i, self._ids)) for i in range(4)]
        others = [
            one for one in self._concurrent(16, 5) if "seed" in one["params"] or not one["params"].get("temperature")
        ]
        mixed = [self._target, *others, *targets]
        first, second = (self.step("mixed", mixed, reset_prefix_cache=True) for _ in range(2))
        for number, (one, other) in enumerate(zip(first.requests, second.requests, strict=True)):
            if "refused" not in one and any(one["completions"][0].get(bits) for bits in ("logprobs", "raw")):
                answers = (answer_of(side["completions"][0]) for side in (one, other))
                self.results.add(*SAME_BATCH, f"request {number} of {len(mixed)}", *answers)
        self.note_batch(SAME_BATCH, min(first.largest_batch, second.largest_batch), others)

    def with_small_limits(self, main: "EngineRun") -> None:
        """Run requests of the main engine in chunks, and in a KV cache too small for all of them."""
        self.results.add(*RESTARTED, "restarted", main.alone["short"], self.answer("short", self._short))
        self._in_chunks(main)
        step = self.step("many", self.many())
        if not step.preemptions:
            self.results.gaps[PREEMPTED] = "the engine did not preempt, although its KV cache was too small for all"
            return
        self.compare_many(PREEMPTED, _answers(step), main)
        self.results.proof[PREEMPTED] = f"{step.preemptions} preemptions"

    def _in_chunks(self, main: "EngineRun") -> None:
        chunk = self._engine.info["tokens_in_a_step"]
        if not self._engine.info["chunked_prefill"]:
            self.results.not_applicable[CHUNKS] = self.no_chunks
        elif chunk < len(self._target["prompt"]):
            self._compare(CHUNKS, f"in chunks of {chunk}", [self._target], main.alone["target"])
            for name, label, one in self._more_in_chunks():
                self.results.add(*CHUNKS, f"{label}, in chunks of {chunk}", main.alone[name], self.answer(name, one))
        else:
            self.results.gaps[CHUNKS] = f"the engine has steps of {chunk} tokens, although {CHUNK} were requested"

    def _more_in_chunks(self) -> list[tuple[str, str, Request]]:
        """More requests whose answers alone are known by a name, and what they are."""
        return [("seeded", "with a seed", self._seeded)]

    def with_other_pages(self, main: "EngineRun") -> None:
        """Run requests of the main engine in other chunks and pages."""
        info = self._engine.info
        label = f"in chunks of {info['tokens_in_a_step']} and pages of {info['page']}"
        self._compare(OTHER_CHUNKS, label, [self._target], main.alone["target"])
        self.results.add(*OTHER_CHUNKS, "short", main.alone["short"], self.answer("short", self._short))
        self.compare_many(OTHER_CHUNKS, _answers(self.step("many", self.many())), main)

    def compare_many(self, case: CheckCase, answers: Sequence[Answer], main: "EngineRun") -> None:
        """Compare the answers to :meth:`many` requests with those of the main engine."""
        for number, (answer, expected) in enumerate(zip(answers, main.many_answers, strict=True)):
            self.results.add(*case, f"request {number} of {len(answers)}", expected, answer)

    def many(self) -> list[Request]:
        """Requests that outgrow a small KV cache together."""
        return [self._request(tokens(MANY_PROMPT, 100 + i, self._ids), max_tokens=MANY_TOKENS) for i in range(MANY)]

    def _concurrent_lengths(self) -> None:
        context = self._engine.info["context"]
        for length in (length for length in self._preset.concurrent_lengths if length + 8 < context):
            most = min(self._preset.tokens, context - length - 1)
            params = self._draw(random.Random(length), most, length)
            other = {"prompt": tokens(length, 77, self._ids), "params": params, "may_be_refused": True}
            self._compare(CONCURRENT_LENGTHS, f"with a prompt of {length}", [other, self._target], which=1)

    def _draw(self, chance: random.Random, max_tokens: int, prompt_tokens: int) -> dict[str, Any]:
        """Parameters of a concurrent request."""
        return draw_concurrent(chance, self._accepts, max_tokens, prompt_tokens)

    def sampling(self) -> None:
        """Run seeded requests alone and with concurrent requests."""
        others = self._concurrent(24, 24)
        for kind in self._preset.sampling:
            seeded = self._request(tokens(SHORT, 1, self._ids), **SAMPLING[kind])
            expected = self.answer(f"{kind} alone", seeded)
            batch = [*others[:9], seeded, *others[9:]]
            step = self.step(f"{kind} with concurrent requests", batch, reset_prefix_cache=True)
            self.results.add(*SEEDED, kind, expected, answer_of(step.requests[9]["completions"][0]))
            self.note_batch(SEEDED, step.largest_batch, others)

    def prompt_logprobs(self) -> None:
        """Compute the logprobs of a prompt alone and with concurrent requests."""
        target = self._request(self._target["prompt"], max_tokens=1, prompt_logprobs=5)
        alone = self.step("prompt logprobs", [target], reset_prefix_cache=True)
        others = self._concurrent(20, 6)
        step = self.step("prompt logprobs with concurrent requests", [*others, target], reset_prefix_cache=True)
        ids = target["prompt"][1:]
        answers = (
            Answer.of("", listed_tokens(ids, one["prompt_logprobs"][1:]))
            for one in (alone.requests[0], step.requests[-1])
        )
        self.results.add(*PROMPT_LOGPROBS, "with 20 others", *answers)
        self.note_batch(PROMPT_LOGPROBS, step.largest_batch, others)

    def _prefix_cache(self) -> None:
        if not self._engine.info["prefix_caching"]:
            self.results.not_applicable[WARM] = "prefix caching is off in this engine"
            return
        cold = self.step("cold", [self._target], reset_prefix_cache=True).requests[0]
        warm = self.step("warm", [self._target]).requests[0]
        if cold["cached"] or not warm["cached"]:
            found = f"{cold['cached']} tokens when it was cold and {warm['cached']} when it was warm"
            self.results.gaps[WARM] = f"the prefix cache had {found}"
            return
        expected = self.alone["target"]
        for label, one in (("cold", cold), ("warm", warm)):
            answer = answer_of(one["completions"][0])
            self.results.add(*WARM, f"from a {label} cache", expected, answer)
            self.results.show(f"from a {label} cache", answer)
        partly = self._with_another_end(warm["cached"])
        got = self.step("partly warm", [partly]).requests[0]
        expected = self.answer("partly warm, cold", partly)
        self.results.add(*WARM, "another end of the prompt", expected, answer_of(got["completions"][0]))
        self.results.proof[WARM] = f"{warm['cached']} and {got['cached']} tokens were found in the cache"

    def _with_another_end(self, cached: int) -> Request:
        """The target but for its tokens behind those that were in the cache."""
        new = len(self._target["prompt"]) - cached + 1
        return self._request(self._target["prompt"][: cached - 1] + tokens(new, 4, self._ids))

    def _load(self) -> None:
        count, length = self._preset.load
        more = {} if self._engine.info.get("pooling") else {"max_tokens": length, "logprobs": None}
        requests = [self._request(tokens(SHORT, 200 + i, self._ids)) for i in range(count)]
        requests = [one | {"params": one["params"] | more} for one in requests]
        self.step("load, first", requests, reset_prefix_cache=True)
        step = self.step("load", requests, reset_prefix_cache=True)
        self.results.latency = Latency.of([one["token_seconds"] for one in step.requests])

    def _compare(
        self, case: CheckCase, label: str, requests: list[Request], expected: Answer | None = None, which: int = 0
    ) -> None:
        """Keep the answer to the target, request ``which``, from a cold cache."""
        step = self.step(label, requests, reset_prefix_cache=True)
        answer = answer_of(step.requests[which]["completions"][0])
        self.results.add(*case, label, expected or self.alone["target"], answer)
        self.results.show(label, answer)
        if len(requests) > 1:
            self.note_batch(case, step.largest_batch, [one for place, one in enumerate(requests) if place != which])

    def _concurrent(self, count: int, seed: int) -> list[Request]:
        return varied_requests(count, seed, self._accepts, self._preset.tokens)

    def note_batch(self, case: CheckCase, largest: int, others: Sequence[Request]) -> None:
        """Note the largest batch of a case and what its concurrent requests were."""
        why = "the engine never ran two requests at a time; raise --max-num-seqs"
        params = self._params.setdefault(case, [])
        params += [one["params"] for one in others]
        self.results.note_batch(case, largest, why, self._varied(params))

    def _varied(self, params: Sequence[dict[str, Any]]) -> str:
        return varied(params, self._refused)

    def answer(self, name: str, one: Request) -> Answer:
        """The answer to a request alone, from a cold cache."""
        [answered] = self.step(name, [one], reset_prefix_cache=True).requests
        return answer_of(answered["completions"][0])

    def step(
        self,
        name: str,
        requests: list[Request],
        reset_prefix_cache: bool = False,
        preempt_after: int | None = None,
        forget_images: bool = True,
    ) -> StepResult:
        """Send requests together, and keep the batches in which they ran. Where the prefix cache is reset, what was
        encoded is let go of, too, unless it is to stay.
        """
        self._on_progress(f"{self._name}: {name}")
        reset = reset_prefix_cache and self._engine.info["prefix_caching"]
        forget = reset_prefix_cache and forget_images and bool(self._engine.info.get("images"))
        step = self._engine.step(name, requests, reset, preempt_after, forget)
        self._refused.update(without_values(one["refused"]) for one in step.requests if "refused" in one)
        self._trace += [(self._clock + seconds, size) for seconds, size in step.batches]
        self._clock = self._trace[-1][0] if self._trace else 0.0
        seconds, sizes = zip(*self._trace, strict=True)
        traces = self.results.traces
        traces[:] = [trace for trace in traces if trace.engine != self._name] + [Trace(self._name, seconds, sizes)]
        return step


class ImagesRun(EngineRun):
    """The same of a model that sees images: the target has some, as have half of the others."""

    cases = staticmethod(cases_of_images)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._about = self._engine.info["images"]
        self._target = self._seeing(self._target, random.Random("target"), least=2)

    def _seeing(self, one: Request, chance: random.Random, least: int = 1) -> Request:
        """A request with images in its text, as many as a third of the context holds."""
        length = len(one["prompt"])
        return one | {"items": images.draw(chance, self._about, length, self.small_context // 3, least)}

    @property
    def _seeded(self) -> Request:
        return super()._seeded | {"items": self._target["items"]}

    def _concurrent(self, count: int, seed: int) -> list[Request]:
        chance = random.Random(f"images {seed}")
        others = super()._concurrent(count, seed)
        return [self._seeing(one, chance) if place % 2 == 0 else one for place, one in enumerate(others)]

    def many(self) -> list[Request]:
        """Requests that outgrow a small KV cache together, every third with an image."""
        chance = random.Random("many")
        return [self._seeing(one, chance) if place % 3 == 0 else one for place, one in enumerate(super().many())]

    def with_concurrent_requests(self) -> None:
        """Run the target with every number of concurrent requests, and beside images that share a call with its own."""
        super().with_concurrent_requests()
        self.processed()
        self.beside_images()

    def processed(self) -> None:
        """Have an item of each kind and size processed alone, and in one request first, last and between others."""
        self._on_progress(f"{self._name}: what the processor makes")
        kinds, chance = self._about["kinds"], random.Random("processed")
        tried: list[tuple[list[images.Item], int]] = []
        for kind, about in kinds.items():
            fewer = self._about | {"kinds": kinds | {kind: about | {"most": about["most"] - 1}}}
            for size, tokens_of_it in about["sizes"]:
                # a seed that no drawn item has: of twins the processor makes one
                item = {"kind": kind, "size": size, "seed": images.DIFFERENT, "at": 0}
                room = self._engine.info["context"] - tokens_of_it
                for half in range(3):
                    others = images.draw(chance, fewer, 0, room, least=3)
                    at = half * len(others) // 2
                    tried += [([*others[:at], item, *others[at:]], at)] if others else []
        if not tried:
            self.results.not_applicable[PROCESSED] = "a request has one item, and requests are processed one by one"
            return
        alone = self._engine.call(MADE, [[items[at]] for items, at in tried])
        among = self._engine.call(MADE, [items for items, _ in tried])
        for (items, at), [expected], found in zip(tried, alone, among, strict=True):
            label = f"{items[at]['kind']} of {'x'.join(map(str, items[at]['size']))} as {at + 1} of {len(items)}"
            self.results.add(*PROCESSED, label, Answer.of_tensors(expected), Answer.of_tensors(found[at]))
        most = count(max(len(items) for items, _ in tried), "item")
        self.results.proof[PROCESSED] = f"up to {most} in a request ({', '.join(sorted(kinds))})"

    def beside_images(self) -> None:
        """Run the target together with requests that have images alone, and an item of each kind with others of that
        kind: a call has one kind, and the target's items may be alone in theirs.
        """
        chance = random.Random("beside")
        others = [
            self._seeing({"prompt": tokens(2, place, self._ids), "params": {"temperature": 0, "max_tokens": 2}}, chance)
            for place in range(6)
        ]
        steps = [self.step("beside images", [*others, self._target], reset_prefix_cache=True)]
        compared = [("behind 6 requests with images", self.alone["target"], steps[0].requests[-1])]
        shared = []
        for kind, about in self._about["kinds"].items():
            sizes = [size for size, _ in sorted(about["sizes"], key=lambda one: one[1])]
            chosen = [sizes[len(sizes) // 2], *sizes[:1] * 6]  # small ones find room in the call of the first
            drawn = [
                {"kind": kind, "size": size, "seed": images.DIFFERENT + at, "at": 0} for at, size in enumerate(chosen)
            ]
            asked = [
                self._request(tokens(2, at, self._ids), max_tokens=4) | {"items": [one]} for at, one in enumerate(drawn)
            ]
            expected = self.answer(f"one {kind}", asked[0])
            steps.append(self.step(f"beside items of the kind {kind}", asked, reset_prefix_cache=True))
            compared.append((f"{kind} before 6 of its kind", expected, steps[-1].requests[0]))
            if steps[-1].encoded["calls"] < steps[-1].encoded["items"]:
                shared.append(kind)
        calls, items = (sum(step.encoded[what] for step in steps) for what in ("calls", "items"))
        if calls == items:
            self.results.gaps[ENCODED] = f"the engine encoded {items} images in as many calls"
            return
        for label, expected, got in compared:
            self.results.add(*ENCODED, label, expected, answer_of(got["completions"][0]))
        among = f" ({', '.join(sorted(shared))})" if shared else ""
        self.results.proof[ENCODED] = f"{items} were encoded in {calls} calls{among}"

    def _prefix_cache(self) -> None:
        super()._prefix_cache()
        self.from_encoded()

    def from_encoded(self) -> None:
        """Run the target when only its images are kept, and with another image in the place of one."""
        self.step("encode", [self._target], reset_prefix_cache=True)
        step = self.step("from what was encoded", [self._target], reset_prefix_cache=True, forget_images=False)
        if step.encoded["calls"]:
            self.results.gaps[KEPT] = "the engine encoded the same image again"
            return
        answer = answer_of(step.requests[0]["completions"][0])
        self.results.add(*KEPT, "the same request", self.alone["target"], answer)
        *items, last = self._target["items"]
        other = self._target | {"items": [*items, last | {"seed": last["seed"] + images.DIFFERENT}]}
        got = self.step("another image", [other]).requests[0]
        expected = self.answer("another image, cold", other)
        self.results.add(*KEPT, "another image in its place", expected, answer_of(got["completions"][0]))
        if expected == self.alone["target"]:
            self.results.gaps[KEPT] = "the model answers the same about another image"
        self.results.proof[KEPT] = "no image was encoded again"

    def _with_another_end(self, cached: int) -> Request:  # noqa: ARG002 - tokens of images are among them
        return self._target | {"prompt": [*self._target["prompt"][:-8], *tokens(8, 4, self._ids)]}

    def _varied(self, params: Sequence[dict[str, Any]]) -> str:
        return f"{super()._varied(params)}; every second with images"


class AdaptersRun(EngineRun):
    """The same with LoRA adapters: the target has the first, and of the others each has the next, or none."""

    cases = staticmethod(cases_of_adapters)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self._engine.info.get("pooling") or self._engine.info.get("images"):
            raise NoTestError("adapters are checked of models that take text and generate: leave --adapter out")

    def _request(self, prompt: list[int], **params: Any) -> Request:
        return super()._request(prompt, **params) | {"adapter": self._adapters[0]}

    def _in_turn(self, requests: Sequence[Request]) -> list[Request]:
        """The same requests, the first of which has none."""
        return [one | {"adapter": every} for one, every in zip(requests, cycle(self._every()), strict=False)]

    def _every(self) -> list[str | None]:
        return [None, *self._adapters]

    def _concurrent(self, count: int, seed: int) -> list[Request]:
        return self._in_turn(super()._concurrent(count, seed))

    def many(self) -> list[Request]:
        """Requests that outgrow a small KV cache together, with the adapters in turn."""
        return self._in_turn(super().many())

    def with_concurrent_requests(self) -> None:
        """Run the target with every number of concurrent requests, and its prompt with every adapter at once."""
        super().with_concurrent_requests()
        targets = self._in_turn([self._target] * len(self._every()))
        for one in targets:
            name = _adapter_in_words(one)
            self.alone[name] = self.answer(name, one)
        others = self._concurrent(9, 9)
        step = self.step("every adapter", [*others, *targets], reset_prefix_cache=True)
        for one, got in zip(targets, step.requests[len(others) :], strict=True):
            name = _adapter_in_words(one)
            self.results.add(*ADAPTERS, f"{name}, among all", self.alone[name], answer_of(got["completions"][0]))
        self.note_batch(ADAPTERS, step.largest_batch, others)
        if len({self.alone[_adapter_in_words(one)].bits for one in targets}) < len(targets):
            self.results.gaps[ADAPTERS] = "two adapters, or one and none, give the prompt the same answer"

    def _prefix_cache(self) -> None:
        super()._prefix_cache()
        if not self._engine.info["prefix_caching"]:
            self.results.not_applicable[APART] = "prefix caching is off in this engine"
            return
        self.step("cached", [self._target], reset_prefix_cache=True)
        for every in (None, *self._adapters[1:]):
            one = self._target | {"adapter": every}
            name = _adapter_in_words(one)
            got = self.step(f"{name}, behind another", [one]).requests[0]
            self.results.add(*APART, name, self.alone[name], answer_of(got["completions"][0]))
        again = self.step("cached, again", [self._target]).requests[0]
        self.results.add(*APART, "the first again", self.alone["target"], answer_of(again["completions"][0]))
        self.results.proof[APART] = f"{again['cached']} tokens were still found in the cache"

    def _varied(self, params: Sequence[dict[str, Any]]) -> str:
        return f"{super()._varied(params)}; with {count(len(self._adapters), 'adapter')} in turn and none"


def _adapter_in_words(one: Request) -> str:
    return f"adapter {one['adapter']}" if one["adapter"] else "no adapter"


class PoolingRun(EngineRun):
    """The same of a model that pools, which answers in the step that ends a prompt."""

    least_context = SHORT
    scheduling = ()
    cases = staticmethod(cases_of_pooling)
    no_chunks = "prompts come whole in this engine: a token sees those after it, or they are pooled at once"

    def _request(self, prompt: list[int], **params: Any) -> Request:
        return {"prompt": prompt, "params": pooling.wanted(self._engine.info["pooling"])[0] | params}

    def _draw(self, chance: random.Random, max_tokens: int, prompt_tokens: int) -> dict[str, Any]:  # noqa: ARG002
        return pooling.draw_of_engine(chance, self._engine.info["pooling"])

    def _concurrent(self, count: int, seed: int) -> list[Request]:
        chance = random.Random(f"concurrent {seed}")
        prompts = (chance.choices(self._ids, k=chance.randint(1, SHORT)) for _ in range(count))
        return [{"prompt": prompt, "params": self._draw(chance, 0, len(prompt))} for prompt in prompts]

    def _varied(self, params: Sequence[dict[str, Any]]) -> str:
        return pooling.varied(params)

    def as_served(self) -> None:
        """Run every case that needs no other settings of the engine."""
        self.again()
        self.with_concurrent_requests()
        self._concurrent_lengths()
        self._wants()
        self._prefix_cache()
        self.alone["short"] = self.answer("short", self._short)
        self.many_answers = _answers(self.step("many", self.many()))
        self._load()

    def _all_wanted(self) -> list[Request]:
        """The target's prompt with everything that may be asked of it."""
        wants = pooling.wanted(self._engine.info["pooling"])
        return [{"prompt": self._target["prompt"], "params": want} for want in wants]

    def _wants(self) -> None:
        """Ask everything alone, and all together among others, in two orders."""
        wanted = self._all_wanted()
        for one in wanted:
            self.alone[_wanted_as(one)] = self.answer(f"{_wanted_as(one)}, alone", one)
        for before, some in ((0, wanted), (9, wanted[::-1])):
            others = self._concurrent(24, 24 + before)
            batch = [*others[:before], *some, *others[before:]]
            step = self.step(f"all that is asked, behind {before}", batch, reset_prefix_cache=True)
            for one, got in zip(some, step.requests[before:], strict=False):
                label = f"{_wanted_as(one)}, behind {before}"
                self.results.add(*WANTED, label, self.alone[_wanted_as(one)], answer_of(got["completions"][0]))
            self.note_batch(WANTED, step.largest_batch, others)

    def _more_in_chunks(self) -> list[tuple[str, str, Request]]:
        return [(name, name, one) for one in self._all_wanted()[1:] for name in [_wanted_as(one)]]

    def many(self) -> list[Request]:
        """Requests of which some are between two chunks when others are preempted."""
        length = min(MANY_PROMPT, self.small_context)
        wants = pooling.wanted(self._engine.info["pooling"])
        return [{"prompt": tokens(length, 100 + i, self._ids), "params": wants[i % len(wants)]} for i in range(MANY)]

    def with_small_limits(self, main: EngineRun) -> None:
        """Run requests of the main engine in another one, in chunks, and preempted between chunks."""
        self.results.add(*RESTARTED, "restarted", main.alone["short"], self.answer("short", self._short))
        self._in_chunks(main)
        if not self._engine.info["chunked_prefill"]:
            self.compare_many(RESTARTED, _answers(self.step("many", self.many())), main)
            self.results.not_applicable[PREEMPTED] = "a prompt is done in one step, so that no request is preempted"
            return
        step = self.step("many", self.many(), preempt_after=PREEMPT_AFTER)
        if not step.preemptions:
            self.results.gaps[PREEMPTED] = "the engine did not preempt, although it was told to"
            return
        self.compare_many(PREEMPTED, _answers(step), main)
        self.results.proof[PREEMPTED] = f"{step.preemptions} preemptions"

    def with_other_pages(self, main: EngineRun) -> None:
        """Run requests of the main engine in other chunks and pages."""
        if not self._engine.info["chunked_prefill"]:
            self.results.not_applicable[OTHER_CHUNKS] = self.no_chunks
            return
        super().with_other_pages(main)


def _wanted_as(one: Request) -> str:
    """What a request wants of a pooling model, in words."""
    return " ".join(f"{name}={value}" for name, value in one["params"].items())


def _answers(step: StepResult) -> list[Answer]:
    return [answer_of(one["completions"][0]) for one in step.requests]
