"""Requests for an engine: prompts in token ids, and sampling parameters of every kind, both drawn from a seed.

They are plain data, as in JSON; :func:`.engine.sampling_params` makes vLLM's ``SamplingParams`` of parameters.
"""

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

SEEDED_KINDS = ("seed", "top_k", "top_p", "min_p", "filters", "penalties", "samples")
KINDS = (
    "greedy",
    *SEEDED_KINDS,
    "greedy penalties",
    "logit_bias",
    "allowed_token_ids",
    "min_tokens",
    "stop_token_ids",
    "repetition_detection",
    "logprob_token_ids",
    "bad_words",
    "stop",
    "json",
    "regex",
    "choice",
)
"""Ways to choose tokens that choose the same tokens again, of every engine."""
BUDGET = "thinking_token_budget"
EVERY_KIND = (*KINDS, BUDGET)
"""Also those for which an engine needs a setting: a budget needs ``--reasoning-config``."""
OF_TEXT = frozenset(("bad_words", "stop", "json", "regex", "choice"))
"""Kinds for which the engine needs a tokenizer."""
NOT_BESIDE_DRAFTS = ("min_p", "filters", "logit_bias")
"""Kinds that vLLM refuses where it decodes speculatively."""
NGRAMS = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
"""A drafter that every device and model has: vLLM's --speculative-config but for the number of drafts."""
LISTED = (None, 0, 1, 5, 20, -1)
"""Values of ``logprobs``: none, the token's own, so many candidates, the whole vocabulary."""
MOST_LISTED = 160_000
"""Most logprobs that one request may list: a list of the whole vocabulary is as long as 8000 lists of 20."""
BUDGETS = (0, 0, 1, 3, 8, 20)
"""Tokens that a thought may have: used up at once, soon, and often not before the request ends."""
OUTPUT_KINDS = ("CUMULATIVE", "DELTA", "FINAL_ONLY")
"""Members of vLLM's ``RequestOutputKind``; a server streams with DELTA."""
_JSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["sum", "tile", "warp"]}, "rows": {"type": "integer"}},
    "required": ["name", "rows"],
    "additionalProperties": False,
}
_STRUCTURED = {
    "json": {"json": _JSON_SCHEMA},
    "regex": {"regex": "[a-f]{3,9}-[0-9]{2,6}"},
    "choice": {"choice": ["batch", "batches", "row"]},
}
_WORDS = ("e", "self", "in", "re", "(", "def", "=", "x")
_OF_SERVER = {
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "allowed_token_ids", "bad_words"),
    *("ignore_eos", "include_stop_str_in_output", "prompt_logprobs", "structured_outputs"),
    *("repetition_detection", BUDGET),
}
"""Parameters that vLLM adds to OpenAI's."""
_NOT_OVER_HTTP = {"output_kind", "logprob_token_ids"}


@dataclass(frozen=True)
class Accepts:
    """The requests that an engine accepts.

    Attributes:
        vocabulary: token ids that prompts and lists of ids are drawn from.
        size: number of all token ids.
        most_listed: the largest number of logprobs a token; -1 for the whole vocabulary.
        kinds: the members of ``EVERY_KIND`` that it accepts.
        thought: the tokens that begin a thought and those that end it; empty without ``--reasoning-config``.
        pooling: what :func:`.pooling.about` says of it; empty if it generates.
        images: what :func:`.images.about` says of it; empty if it takes text alone.
    """

    vocabulary: range
    size: int
    most_listed: int = 20
    kinds: tuple[str, ...] = tuple(kind for kind in KINDS if kind not in OF_TEXT)
    thought: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    pooling: Mapping[str, Any] = field(default_factory=dict)
    images: Mapping[str, Any] = field(default_factory=dict)

    def listed(self, positions: int) -> list[int | None]:
        """The members of ``LISTED`` that are allowed for a request with this number of listed positions."""
        whole = self.most_listed == -1 and positions * self.size <= MOST_LISTED
        top = self.size if self.most_listed == -1 else self.most_listed
        return [number for number in LISTED if number is None or (whole if number == -1 else number <= top)]


ANY_SERVER = Accepts(range(16, 1000), 4096, kinds=tuple(kind for kind in KINDS if kind != "logprob_token_ids"))
"""What every vLLM server accepts, whatever its model."""


def draw(
    chance: random.Random,
    accepts: Accepts,
    kind: str,
    max_tokens: int,
    prompt_tokens: int,
    listed: Iterable[int | None] = LISTED,
) -> dict[str, Any]:
    """Parameters of one kind, with any number of logprobs.

    Args:
        chance: the source of every choice.
        kind: one of ``EVERY_KIND``.
        max_tokens: tokens to generate at most.
        prompt_tokens: length of the prompt, whose logprobs may be asked for as well.
        listed: the numbers of logprobs to choose from.
    """
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    params |= _of_kind(chance, accepts, kind)
    if "min_tokens" in params:
        params["min_tokens"] = min(params["min_tokens"], max_tokens)
    positions = params["max_tokens"] * params.get("n", 1)
    can = accepts.listed(positions)
    params["logprobs"] = chance.choice([number for number in listed if number in can] or [None])
    if kind == "logprob_token_ids":
        params["logprobs"] = len(params["logprob_token_ids"])
    if chance.random() < 0.2:
        of_prompt = [number for number in accepts.listed(prompt_tokens) if number is not None]
        params["prompt_logprobs"] = chance.choice(of_prompt)
    return params


def _of_kind(chance: random.Random, accepts: Accepts, kind: str) -> dict[str, Any]:
    ids = accepts.vocabulary
    seed = {"temperature": chance.choice((0.5, 0.8, 1.0, 1.3)), "seed": chance.randrange(1 << 31)}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": chance.choice((1.2, 1.4))}
    top_k = {"top_k": chance.choice((1, 3, 20, 50, 1000))}
    top_p = {"top_p": chance.choice((0.1, 0.5, 0.8, 0.95))}
    min_p = {"min_p": chance.choice((0.02, 0.05, 0.2))}
    # few enough tokens that one of the stop tokens is soon drawn
    few = sorted(chance.sample(ids, 24))
    makers: dict[str, dict[str, Any]] = {
        "greedy": {},
        "seed": seed,
        "top_k": seed | top_k,
        "top_p": seed | top_p,
        "min_p": seed | min_p,
        "filters": seed | top_k | top_p | min_p,
        "penalties": seed | penalties,
        "samples": seed | top_p | {"n": chance.choice((2, 3))},
        "greedy penalties": penalties,
        "logit_bias": {"logit_bias": {str(token): chance.choice((-100.0, -5.0, 2.5, 5.0)) for token in few}},
        "allowed_token_ids": {"allowed_token_ids": few},
        "min_tokens": seed | {"allowed_token_ids": few, "stop_token_ids": few[::4], "min_tokens": chance.randint(1, 6)},
        "stop_token_ids": seed | {"allowed_token_ids": few, "stop_token_ids": few[::8]},
        # so few tokens that a pattern is soon repeated
        "repetition_detection": seed
        | {
            "allowed_token_ids": few[:3],
            "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2},
        },
        "logprob_token_ids": {"logprob_token_ids": few[::3]},
        "bad_words": {"bad_words": chance.sample(_WORDS, 5)},
        "stop": seed | {"stop": chance.sample(_WORDS, 3), "include_stop_str_in_output": chance.random() < 0.5},
    }
    if kind == BUDGET:
        # so few tokens that the model soon begins a thought, and now and then ends one
        spoken = sorted({*few[::6], *accepts.thought[0], *accepts.thought[1]})
        budget = {BUDGET: chance.choice(BUDGETS)}
        return budget | (seed | {"allowed_token_ids": spoken} if chance.random() < 0.6 else {})
    if kind in _STRUCTURED:
        # the grammar ends the text
        return {"structured_outputs": _STRUCTURED[kind], "ignore_eos": False} | (seed if chance.random() < 0.5 else {})
    return makers[kind]


def draw_concurrent(
    chance: random.Random, accepts: Accepts, max_tokens: int, prompt_tokens: int, unseeded: bool = True
) -> dict[str, Any]:
    """Parameters of a concurrent request: of any kind; one in three of those that sample has no seed."""
    params = draw(chance, accepts, chance.choice(accepts.kinds), max_tokens, prompt_tokens)
    if unseeded and "stop_token_ids" not in params and "stop" not in params and chance.random() < 0.35:
        params.pop("seed", None)
    return params


def over_http(params: Mapping[str, Any], chat: bool) -> dict[str, Any]:
    """The parameters as arguments of the OpenAI client's ``create``, without those that the API does not have."""
    body = {name: value for name, value in params.items() if name not in _OF_SERVER | _NOT_OVER_HTTP}
    body["extra_body"] = {name: value for name, value in params.items() if name in _OF_SERVER}
    listed = body.pop("logprobs", None)
    if chat and listed is not None:
        body |= {"logprobs": True, "top_logprobs": listed}
    elif listed is not None:
        body["logprobs"] = listed
    return body


def without_values(refusal: str) -> str:
    """Why vLLM refused a request, without the values at which requests of one kind differ."""
    return re.sub(r"\s*\(parameter=(\w+), value=.*\)", r" (\1)", refusal)


def varied(requests: Iterable[Mapping[str, Any]], refused: Mapping[str, int] | None = None) -> str:
    """A summary of the parameters of several requests, in words, and how many were refused for which reasons."""
    asked = [dict(params) for params in requests]
    listed = {params.get("logprobs") for params in asked}
    words = {None: "none", -1: "all"}
    numbers = "/".join(words.get(number, str(number)) for number in LISTED if number in listed)
    others = listed - set(LISTED)
    plain = {"temperature", "max_tokens", "ignore_eos", "logprobs", "output_kind", "include_stop_str_in_output"}
    names = sorted({name for params in asked for name in params} - plain)
    why = "; ".join(f"{times} of them refused: {reason}" for reason, times in (refused or {}).items())
    return ", ".join([f"logprobs {numbers}{'/...' * bool(others)}", *names]) + (f" ({why})" if why else "")


def in_words(params: Mapping[str, Any]) -> str:
    """The parameters of one request in a line; of a list of tokens only the length."""
    parts = []
    for name, value in params.items():
        if name in ("ignore_eos", "include_stop_str_in_output") or value is None:
            continue
        text = f"{len(value)} ids" if isinstance(value, list | dict) and name != "structured_outputs" else value
        text = next(iter(value)) if name == "structured_outputs" else text
        parts.append(name if name == "repetition_detection" else f"{name}={text}")
    return " ".join(parts)


VOCABULARY = range(16, 4000)
"""Token ids for prompts: ordinary ones in every common vocabulary."""

SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "seed": 7},
    "top_k": {"temperature": 0.8, "seed": 8, "top_k": 20},
    "top_p": {"temperature": 1.2, "seed": 9, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "seed": 10, "min_p": 0.05},
    "penalties": {
        "temperature": 0.7,
        "seed": 11,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
    "greedy penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.3},
}
"""Ways to sample that give the same tokens again, by name."""


def ordinary(size: int) -> range:
    """The token ids for prompts in a vocabulary of that size."""
    return range(VOCABULARY.start, min(VOCABULARY.stop, size))


def tokens(length: int, seed: int, vocabulary: range = VOCABULARY) -> list[int]:
    """A prompt of random tokens."""
    return random.Random(f"{length} {seed}").choices(vocabulary, k=length)


def request(prompt: list[int], **params: Any) -> dict[str, Any]:
    """A request, greedy and with logprobs unless ``params``, which are those of ``SamplingParams``, say otherwise."""
    return {
        "prompt": prompt,
        "params": {"temperature": 0, "max_tokens": 16, "logprobs": 5, "ignore_eos": True} | params,
    }


def concurrent_requests(
    count: int, seed: int, max_tokens: int = 4, longest: int = 30, vocabulary: range = VOCABULARY
) -> list[dict[str, Any]]:
    """``count`` greedy requests with prompts of up to ``longest`` tokens."""
    chance = random.Random(seed)
    lengths = [chance.randint(1, longest) for _ in range(count)]
    return [
        request(tokens(length, seed * 1000 + i, vocabulary), max_tokens=max_tokens, logprobs=None)
        for i, length in enumerate(lengths)
    ]


def varied_requests(
    count: int, seed: int, accepts: Accepts, max_tokens: int = 4, longest: int = 30
) -> list[dict[str, Any]]:
    """``count`` requests whose prompts and parameters vary; an engine may refuse some of them."""
    chance = random.Random(f"concurrent {seed}")
    others = []
    for _ in range(count):
        prompt = chance.choices(accepts.vocabulary, k=chance.randint(1, longest))
        params = draw_concurrent(chance, accepts, max_tokens, len(prompt))
        others.append({"prompt": prompt, "params": params, "may_be_refused": True})
    return others


def sampling_requests(vocabulary: range = VOCABULARY) -> list[dict[str, Any]]:
    """24 requests that sample in different ways, most of them without a seed."""
    ways = (
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 3},
        {"temperature": 1.5, "top_p": 0.3, "seed": 5},
        {"min_p": 0.2},
    )
    return [request(tokens(20 + i, 50 + i, vocabulary), max_tokens=6, **params) for i, params in enumerate(ways * 6)]
