"""The inputs of the fuzzer, drawn from a seed: settings of engines, target requests, and schedules of requests.

The same seed draws the same on any machine, and everything turns into JSON and back.
"""

import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...envs import ARITHMETIC, TP_TREE, is_exact
from ...integration import coverage
from ..harness import adapters, drafters, images, pooling
from ..harness.engine import pages_of_states, pages_of_windows
from ..harness.requests import BUDGET, EVERY_KIND, NGRAMS, OUTPUT_KINDS, Accepts, draw, draw_concurrent
from .options import DRAFTERS, FIELDS, NONE, OPTIONS, TEXT_ONLY, Option, Place, starts

BORDERS = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
"""Prompt lengths around pages, small chunks and splits of attention."""
CONTEXTS = {"cpu": 1024, "cuda": 2560}
"""Longest request: on a GPU longer than the context at which splits of attention grow."""
PAGES = {"cpu": (32, 64, 128), "cuda": (16, 32, 64, 128)}
WHOLE_IMAGE = 300
"""Tokens of a step that must have an image whole: Gemma 3's has 256, Gemma 4's 280, and some around them."""
SEE_ALL = ("gemma3",)
"""Types of models whose tokens see all of their image, whatever else their configuration says."""
_IMAGES_ALONE = '{"video": 0, "audio": 0}'
"""What a request may have of such a model (Gemma 4's), of whose videos vLLM wants the longest to fit into a step."""
_MANY = range(97, 105)
"""Numbers of requests around a CUDA graph size that is no multiple of the others."""
_MORE_OF = (BUDGET, BUDGET)
"""Kinds of which there are more targets: a budget goes wrong in few places of an answer."""
_TO_THE_END = ("greedy", "seed", "top_k", "top_p", "penalties", "greedy penalties", "allowed_token_ids", "bad_words")
"""Kinds of which a request has as many tokens as it may have."""
_LONG = (16, 24, 48)
"""Tokens of an answer with a budget: time to think, to be told to end, and to go on."""
_SOON = 8
"""Steps in which a model that pools has answered most requests."""
_DECIDED = 0.3
"""Part of the targets that are of kinds which an option decides."""


@dataclass(frozen=True)
class Settings:
    """One engine, apart from its model.

    Attributes:
        requests: --max-num-seqs.
        step_tokens: --max-num-batched-tokens.
        page: --block-size.
        eager: no CUDA graphs.
        asynchronous: async scheduling.
        prefix_cache: prefix caching.
        small_cache: a KV cache that holds little more than one request of the longest length.
        runner: VLLM_USE_V2_MODEL_RUNNER; empty for vLLM's choice.
        context: --max-model-len.
        text: the arguments by which a multimodal model is served as text: a key of ``TEXT_ONLY``; empty for none.
        drafts: tokens that are proposed in a step; 0 without speculative decoding.
        drafter: what proposes them: "ngram", "ngram_gpu", the model "itself", its layers for more tokens, "mtp", or a
            model of random weights, "dflash" or, of Gemma 4, "mtp".
        workers: --tensor-parallel-size, with as many equal parts of a CPU's cores.
        tree: VLLM_BATCH_INVARIANT_TP_TREE; the parts of the cores are those of so many workers.
        stages: --pipeline-parallel-size, with as many equal parts of a CPU's cores.
        exact: exact arithmetic.
        options: the values of ``OPTIONS`` by name, without those that are ``NONE``.
        pooler: of a model that pools, how: a type of vLLM's, or its "own"; empty for one that generates.
        whole: prompts come whole.
        state_pages: pages of a small cache for the states of a request, beside those for its keys.
        window_pages: those for keys of layers with a sliding window, beside layers without.
        whole_images: a step must have an image whole.
    """

    requests: int
    step_tokens: int
    page: int
    eager: bool
    asynchronous: bool
    prefix_cache: bool
    small_cache: bool
    runner: str
    context: int
    text: str = ""
    drafts: int = 0
    workers: int = 1
    tree: int = 1
    stages: int = 1
    exact: bool = False
    drafter: str = "ngram"
    options: Mapping[str, str] = field(default_factory=dict)
    pooler: str = ""
    whole: bool = False
    state_pages: int = 0
    window_pages: int = 0
    whole_images: bool = False

    def arguments(self, model: str) -> list[str]:
        """For ``vllm serve MODEL``."""
        steps = max(self.step_tokens, self.requests)  # vLLM requires a token a request
        steps = max(steps, self.context) if self.whole else steps
        steps = max(steps, WHOLE_IMAGE) if self.whole_images else steps
        made = ["--max-num-seqs", str(self.requests), "--max-num-batched-tokens", str(steps)]
        made += ["--block-size", str(self.page), "--max-model-len", str(self.context), "--max-logprobs", "-1"]
        made += [f"--{'no-' if self.whole else ''}enable-chunked-prefill"]
        made += ["--pooler-config", json.dumps({"pooling_type": self.pooler})] if self.pooler not in ("", "own") else []
        # vLLM knows which drafters can be beside async scheduling, and which model runner has them.
        made += [] if self.drafts else [f"--{'' if self.asynchronous else 'no-'}async-scheduling"]
        made += [f"--{'' if self.prefix_cache else 'no-'}enable-prefix-caching"]
        made += ["--enforce-eager"] if self.eager else []
        made += TEXT_ONLY[self.text] if self.text else []
        made += ["--limit-mm-per-prompt", _IMAGES_ALONE] if self.whole_images else []
        if self.workers > 1:
            made += [coverage.TENSOR, str(self.workers)]
        if self.stages > 1:
            made += [coverage.PIPELINE, str(self.stages)]
        if self.drafts:
            drafter = {"itself": {"method": "", "model": model}, "mtp": {}, "dflash": {}}.get(self.drafter, NGRAMS)
            drafter = drafter | drafters.beside(model, self.drafter)
            drafter = drafter | {"method": DRAFTERS[self.drafter], "num_speculative_tokens": self.drafts}
            made += [coverage.SPECULATION, json.dumps(drafter)]
        for option in OPTIONS:
            made += option.arguments.get(self.options.get(option.name, NONE), ())
        return made + (["--num-gpu-blocks-override", str(self._pages)] if self.small_cache else [])

    @property
    def _pages(self) -> int:
        """Of a small cache: one is vLLM's own, and CUDA graphs have a state for each of the most requests."""
        least = -(-self.context // self.page) + 2 + self.state_pages + self.window_pages
        return max(least, self.requests + 1) if self.state_pages and not self.eager else least

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the engine's process."""
        made = {}
        if self.runner == "0" or (self.runner and not self.drafts):
            made[coverage.RUNNER] = self.runner
        if (most := max(self.workers, self.tree) * self.stages) > 1:
            each = (os.cpu_count() or most) // most
            parts = [f"{worker * each}-{(worker + 1) * each - 1}" for worker in range(self.workers * self.stages)]
            made["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(parts)
        if self.tree > 1:
            made[TP_TREE.name] = str(self.tree)
        if self.exact:
            made[ARITHMETIC.name] = "exact"
        return made

    def decides(self, kind: str) -> str:
        """What of the options decides the tokens of a kind of requests."""
        chosen = [self.options.get(option.name, NONE) for option in OPTIONS if kind in option.decides]
        return " ".join([*chosen, self.pooler] if self.pooler else chosen)

    @property
    def label(self) -> str:
        """The settings in a few words, for tables."""
        words = [f"seqs={self.requests}", f"step={self.step_tokens}", f"page={self.page}"]
        words += ["eager" if self.eager else "graphs"]
        words += [] if self.drafts else ["async" if self.asynchronous else "sync"]
        words += ["prefix" if self.prefix_cache else "no-prefix", "small-kv" if self.small_cache else "ample-kv"]
        words += [f"text={self.text}"] if self.text else []
        words += [f"drafts={self.drafts}"] if self.drafts else []
        words += [f"drafter={self.drafter}"] if self.drafts and self.drafter != "ngram" else []
        words += [f"workers={self.workers}"] if self.workers > 1 else []
        words += [f"tree={self.tree}"] if self.tree > 1 else []
        words += [f"stages={self.stages}"] if self.stages > 1 else []
        words += ["exact"] if self.exact else []
        words += [f"pooler={self.pooler}"] if self.pooler else []
        words += ["whole"] if self.whole else []
        words += [f"{name}={value}" for name, value in self.options.items()]
        runner = self.environment.get(coverage.RUNNER, "")
        return " ".join([*words, {"": "", "0": "runner=v1", "1": "runner=v2"}[runner]]).rstrip()


def draw_settings(seed: int, number: int, context: int, place: Place) -> Settings:
    """Settings ``number`` of a run, such as the gate lets pass. Consecutive numbers soon have every value of all.

    Args:
        context: longest request in tokens.
        place: where the engine runs, and what.
    """
    gpu = place.device == "cuda"

    def take(option: str, values: Sequence[Any]) -> Any:
        cycle, position = divmod(number, len(values))
        order = random.Random(f"{seed} {option} {cycle}").sample(values, len(values))
        # the first engine must run requests concurrently
        return (order[::-1] if option == "requests" and order[0] == 1 and cycle == 0 else order)[position]

    many = random.Random(f"{seed} many {number}").choice(_MANY)
    settings = Settings(
        requests=take("requests", (1, 2, 5, 64, many)),
        step_tokens=take("step", (64, 300, 2048, 8192)),
        page=take("page", PAGES[place.device]),
        eager=True,
        asynchronous=take("async", (True, False)) if gpu else False,
        prefix_cache=take("prefix", (True, True, False)),
        small_cache=take("cache", (True, False)),
        runner="",
        context=context,
        text=take("text", [*TEXT_ONLY] * place.is_served_as_text + [NONE] * 3 * place.encodes or [NONE])
        if place.is_multimodal
        else "",
        exact=is_exact(),
        state_pages=pages_of_states(place.text),
    )
    windows = pages_of_windows(place.text, settings.page, settings.step_tokens)
    settings = replace(settings, window_pages=windows)
    if place.is_multimodal and not settings.text:
        settings = replace(settings, whole_images=sees_all(place.model))
    if place.pools:
        pooler = take("pooler", place.poolers)
        whole = place.pools_whole or place.pools != "decoder" or pooler != "own"
        settings = replace(settings, pooler=pooler, whole=whole, prefix_cache=settings.prefix_cache and not whole)

    def choose(option: Option) -> Settings:
        if not option.is_in(place) or (option.beside is not None and not option.beside(settings, place)):
            return settings
        value = take(option.name, option.values)
        tried = replace(settings, options={**settings.options, option.name: value})
        return tried if value != NONE and starts(tried, place, *option.names) else settings

    for option in OPTIONS:
        settings = choose(option) if option.is_first else settings
    for row in FIELDS:
        if place.pools and not row.of_pooling:
            continue
        if row.fits(place, settings):
            tried = replace(settings, **{row.name: take(row.drawn_as or row.name, row.values(place))})
            if row.name == "drafts" and place.mtp and not starts(tried, place, row.argument):
                tried = replace(tried, drafter="mtp")  # beside images some have no other
            settings = tried if starts(tried, place, row.argument) else settings
    for option in OPTIONS:
        settings = settings if option.is_first else choose(option)
    if place.has_experts and settings.tree > 1 and settings.workers > 1:  # a tree has no parts of experts
        is_open = place.is_open(coverage.WHOLE_EXPERTS, f"--no-{coverage.WHOLE_EXPERTS.removeprefix('--')}")
        if not is_open or not place.shares_experts(whole=True):
            return replace(settings, tree=1)
        settings = replace(settings, options={**settings.options, "experts": "whole"})
    return settings


def sees_all(config: Mapping[str, Any]) -> bool:
    """Whether tokens of a model see all of their image.

    Args:
        config: a checkpoint's.
    """
    of_text = config.get("text_config") or {}
    return config.get("model_type") in SEE_ALL or of_text.get("use_bidirectional_attention") == "vision"


@dataclass(frozen=True)
class Target:
    """A target request; its parameters repeat its tokens."""

    kind: str
    prompt: tuple[int, ...]
    params: Mapping[str, Any]
    images: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Item:
    """A request of a schedule.

    Attributes:
        name: unique in the schedule.
        at: the engine step before which it arrives.
        prompt: token ids.
        params: of vLLM's ``SamplingParams``, as plain data.
        target: whether its answer is compared with the answer to the request alone.
        leaves: the engine step before which it is aborted; None if it is not.
        embeds: the prompt is sent as the embeddings of its tokens.
        priority: where the engine schedules by it, the lowest number first.
        adapter: the number of its LoRA adapter, see :func:`..harness.engine.adapter_request`.
        images: each with the place in the prompt before which it stands, see :data:`..harness.images.Item`.
    """

    name: str
    at: int
    prompt: tuple[int, ...]
    params: Mapping[str, Any]
    target: bool = False
    leaves: int | None = None
    embeds: bool = False
    priority: int = 0
    adapter: int = 0
    images: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Reset:
    """The prefix cache is reset before an engine step; if ``running``, running requests are preempted for it."""

    at: int
    running: bool

    def __str__(self) -> str:
        return f"reset of the prefix cache at step {self.at}{', of all that runs' * self.running}"


@dataclass(frozen=True)
class Sleep:
    """The engine sleeps before an engine step and wakes up; requests that run go on afterwards.

    Attributes:
        level: 1 keeps the weights; 2 lets them go, and they are read again.
    """

    at: int
    level: int

    def __str__(self) -> str:
        return f"sleep of level {self.level} at step {self.at}"


UPDATES = ("running", "paused", "others before")
"""The same weights are read again while requests run, or while the engine is paused; or before the first request the
engine has other weights, answers the same prompts with them, and gets its own again.
"""


@dataclass(frozen=True)
class Update:
    """Weights are replaced before an engine step, in one of the ways of ``UPDATES``."""

    at: int
    how: str

    def __str__(self) -> str:
        return f"update of the weights at step {self.at}, {self.how}"


EVENTS: dict[str, type] = {"resets": Reset, "sleeps": Sleep, "updates": Update}
"""What happens to an engine beside requests, by the attribute of a schedule that lists it."""


@dataclass(frozen=True)
class Schedule:
    """Requests and events by the engine steps before which they come. The prefix cache is empty at the start."""

    items: tuple[Item, ...]
    resets: tuple[Reset, ...] = ()
    sleeps: tuple[Sleep, ...] = ()
    updates: tuple[Update, ...] = ()

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Schedule":
        """The inverse of :meth:`plain`, also through JSON."""
        tuples = ("prompt", "images")
        items = [Item(**item | {name: tuple(item.get(name, ())) for name in tuples}) for item in plain["items"]]
        events = {name: tuple(kind(**one) for one in plain.get(name, ())) for name, kind in EVENTS.items()}
        return cls(tuple(items), **events)

    def plain(self) -> dict[str, Any]:
        """The schedule as plain data."""
        return {name: [asdict(one) for one in getattr(self, name)] for name in ("items", *EVENTS)}

    @property
    def events(self) -> list[Any]:
        """Resets, sleeps and updates."""
        return [event for name in EVENTS for event in getattr(self, name)]


def alone(item: Item) -> Schedule:
    """The request of an item alone, with its answer in one piece."""
    params = {name: value for name, value in item.params.items() if name != "output_kind"}
    return Schedule((replace(item, at=0, target=True, leaves=None, priority=0, params=params),))


def as_item(target: Target, name: str) -> Item:
    """The target as the first item of a schedule."""
    return Item(name, 0, target.prompt, target.params, target=True, images=target.images)


def draw_targets(seed: int, count: int, accepts: Accepts, context: int) -> list[Target]:
    """Target requests of every kind and of many lengths, half of them with a common prefix."""
    chance = random.Random(f"{seed} targets")
    kinds: list[str] = []
    every = pooling.KINDS if accepts.pooling else (*EVERY_KIND, *_MORE_OF)
    while len(kinds) < count:
        kinds += chance.sample(every, len(every))
    shared = [_tokens(chance, accepts, context) for _ in range(2)]
    targets = []
    for number, kind in enumerate(kinds[:count]):
        max_tokens = chance.choice(_LONG if kind == BUDGET else (1, 2, 4, 8, 8, 16, 24, 48))
        # of every eight, one nearly fills the context, and one has so few rows that kernels may treat it as decode
        long, tiny = number % 8 == 7, number % 8 == 3
        room = context if accepts.pooling else context - max_tokens
        length = chance.randint(1, 10) if tiny else _length(chance, room, long)
        length = room if long and accepts.pooling and chance.random() < 0.5 else length
        prompt = _tokens(chance, accepts, length)
        if chance.random() < 0.5:
            prompt = chance.choice(shared)[: length - min(length, chance.choice((0, 1, 5)))] + prompt
        prompt = prompt[:length]
        if kind == BUDGET:
            prompt = _thinking(chance, accepts, prompt)
        if accepts.pooling:
            params = pooling.draw_of_engine(chance, accepts.pooling, kind)
        else:
            params = draw(chance, accepts, kind, max_tokens, length, (0, 1, 5, 5, 5, 20, -1, None))
        seen = _images(chance, accepts, len(prompt), room)
        targets.append(Target(kind, prompt, params, seen))
    return targets


def draw_schedule(
    seed: str, settings: Settings, targets: Mapping[int, Target], accepts: Accepts, most: int = 16
) -> Schedule:
    """A schedule for an engine of these settings.

    Args:
        seed: what it is drawn from.
        targets: those that the engine accepts, by number.
        accepts: what concurrent requests may have.
        most: requests of a schedule that does not fill the engine.
    """
    chance = random.Random(seed)
    # as many as the engine runs at once; all within a step or two; a few at a time; more than a small cache holds
    weights = (2, 2, 3, 3) if settings.small_cache else (1, 2, 3, 0)
    style = chance.choices(("full", "bursts", "trickle", "crowd"), weights)[0]
    count = settings.requests if style == "full" else chance.randint(4, most)
    count = 2 * most if style == "crowd" else count
    target_count = max(1, min(6, count // 2))
    numbers = [number for number in targets if style != "full" or targets[number].params.get("n", 1) == 1]
    # what a setting of this engine decides is asked for more often
    decided = [number for number in numbers if settings.decides(targets[number].kind).strip()] or numbers
    chosen = [chance.choice(decided if chance.random() < _DECIDED else numbers) for _ in range(target_count)]
    span = {"full": 1, "bursts": chance.choice((1, 12)), "trickle": 40, "crowd": 2}[style]
    instants = [0, chance.randrange(span)] if style == "bursts" else range(span)
    items = []
    for place, number in enumerate(chosen):
        params = _sent(chance, targets[number].params)
        target = targets[number]
        item = Item(f"t{place}", chance.choice(instants), target.prompt, params, target=True, images=target.images)
        items.append(_as_drawn(chance, settings, item))
    for place in range(count - target_count):
        items.append(
            _concurrent_item(chance, accepts, settings, targets, f"n{place}", chance.choice(instants), style, most)
        )
    chance.shuffle(items)
    after = _SOON if accepts.pooling else 30
    last = max(item.at for item in items) + after
    drawn: dict[str, list[Any]] = {
        "resets": [
            Reset(chance.randrange(1, after), chance.random() < 0.5) for _ in range(chance.choice((0, 0, 1, 2)))
        ],
        "sleeps": [Sleep(chance.randrange(1, last), chance.choice((1, 2))) for _ in range(chance.choice((0, 0, 1)))],
        "updates": [_update(chance, last) for _ in range(chance.choice((0, 0, 1, 1, 2)))],
    }
    happen = {"resets": settings.prefix_cache, "sleeps": "sleep" in settings.options}
    happen |= {"updates": "updates" in settings.options}
    return Schedule(tuple(items), **{name: tuple(events) if happen[name] else () for name, events in drawn.items()})


def _sent(chance: random.Random, params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters with the way in which a client gets the answer; a pooling model has one."""
    return {**params} if "task" in params else {**params, "output_kind": chance.choice(OUTPUT_KINDS)}


def _update(chance: random.Random, last: int) -> Update:
    how = chance.choice(UPDATES)
    return Update(0 if how == "others before" else chance.randrange(1, last), how)


def _as_drawn(chance: random.Random, settings: Settings, item: Item) -> Item:
    """A request in one of the ways in which an engine of these settings takes it."""
    embeds, priority = chance.random() < 0.3, chance.choice((0, 0, 1, 5))
    adapter = chance.randint(0, len(adapters.DRAWN)) if "adapters" in settings.options else 0
    # vLLM has no tokens of which it could list logprobs
    embeds = embeds and "embeds" in settings.options and "prompt_logprobs" not in item.params and not item.images
    priority = priority if "policy" in settings.options else 0
    return replace(item, embeds=embeds, priority=priority, adapter=adapter)


def _concurrent_item(
    chance: random.Random,
    accepts: Accepts,
    settings: Settings,
    targets: Mapping[int, Target],
    name: str,
    at: int,
    style: str,
    most: int,
) -> Item:
    full, crowd = style == "full", style == "crowd"
    max_tokens = chance.choice((1, 2, 4, 8) if full else (60,) if crowd else (1, 2, 4, 8, 16, 32, 60))
    room = settings.context - max_tokens
    length = chance.randint(1, 24) if full else _length(chance, room, chance.random() < 0.04)
    if crowd:  # prompts that a small cache just holds together, so that it does not hold what they grow to
        each = settings.context // min(settings.requests, most)
        length = min(room, max(1, each - chance.randint(8, 40)))
    prompt = _tokens(chance, accepts, length)
    if chance.random() < 0.3:
        begin = targets[chance.choice(list(targets))].prompt
        prompt = (begin[: chance.randint(1, len(begin))] + prompt[:40])[: 40 if full else room]
    if crowd and not accepts.pooling:
        accepts = replace(accepts, kinds=tuple(kind for kind in accepts.kinds if kind in _TO_THE_END))
    if accepts.pooling:
        params = pooling.draw_of_engine(chance, accepts.pooling)
    else:
        params = draw_concurrent(chance, accepts, max_tokens, len(prompt))
    if full:
        params.pop("n", None)
    params = _sent(chance, params)
    if BUDGET in params:
        prompt = _thinking(chance, accepts, prompt)
    soonest, latest = (0, 2) if accepts.pooling else (1, 12)
    leaves = at + chance.randint(soonest, latest) if chance.random() < 0.2 and not crowd else None
    seen = () if crowd else _images(chance, accepts, len(prompt), room)
    return _as_drawn(chance, settings, Item(name, at, prompt, params, leaves=leaves, images=seen))


def _images(chance: random.Random, accepts: Accepts, length: int, room: int) -> tuple[Mapping[str, Any], ...]:
    """Images of half of the requests, where they fit behind so many tokens."""
    if not accepts.images or chance.random() < 0.5:
        return ()
    return tuple(images.draw(chance, accepts.images, length, room - length))


def _thinking(chance: random.Random, accepts: Accepts, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """A prompt of the same length that begins a thought shortly before its end, or does not."""
    begins, after = accepts.thought[0], chance.randint(0, 4)
    if chance.random() < 0.4 or len(prompt) < len(begins) + after:
        return prompt
    end = len(prompt) - after
    return (*prompt[: end - len(begins)], *begins, *prompt[end:])


def _length(chance: random.Random, room: int, long: bool) -> int:
    """Tokens of a prompt: often very few, and up to ``room``."""
    if long:
        return room - chance.randint(0, 40)
    kind = chance.choices(("short", "border", "middle"), (5, 2, 2))[0]
    length = {"short": chance.randint(1, 40), "border": chance.choice(BORDERS), "middle": chance.randint(40, 300)}[kind]
    return min(length, room)


def _tokens(chance: random.Random, accepts: Accepts, length: int) -> tuple[int, ...]:
    return tuple(chance.choices(accepts.vocabulary, k=length))
