"""Requests for an engine, in token ids: one whose bits are looked at, and the company that may move them."""

import random
from typing import Any

from ..request_parameters import Accepts, draw_concurrent

VOCABULARY = range(16, 4000)
"""Token ids that a prompt may hold: ordinary ones in every common vocabulary."""

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
"""Ways to sample that repeat."""


def ordinary(size: int) -> range:
    """The token ids of a vocabulary of that size that a prompt may hold."""
    return range(VOCABULARY.start, min(VOCABULARY.stop, size))


def tokens(length: int, seed: int, vocabulary: range = VOCABULARY) -> list[int]:
    """A prompt of random tokens."""
    return random.Random(f"{length} {seed}").choices(vocabulary, k=length)


def request(prompt: list[int], **params: Any) -> dict[str, Any]:
    """One greedy request with logprobs, unless told otherwise; `params` are those of vLLM's SamplingParams."""
    return {
        "prompt": prompt,
        "params": {"temperature": 0, "max_tokens": 16, "logprobs": 5, "ignore_eos": True} | params,
    }


def concurrent_requests(
    count: int, seed: int, max_tokens: int = 4, longest: int = 30, vocabulary: range = VOCABULARY
) -> list[dict[str, Any]]:
    """Other people's requests: `count` prompts of up to `longest` tokens."""
    chance = random.Random(seed)
    lengths = [chance.randint(1, longest) for _ in range(count)]
    return [
        request(tokens(length, seed * 1000 + i, vocabulary), max_tokens=max_tokens, logprobs=None)
        for i, length in enumerate(lengths)
    ]


def varied_requests(
    count: int, seed: int, accepts: Accepts, max_tokens: int = 4, longest: int = 30
) -> list[dict[str, Any]]:
    """Other people's requests, whose parameters vary as much as their prompts; an engine may refuse some of them."""
    chance = random.Random(f"company {seed}")
    others = []
    for _ in range(count):
        prompt = chance.choices(accepts.vocabulary, k=chance.randint(1, longest))
        params = draw_concurrent(chance, accepts, max_tokens, len(prompt))
        others.append({"prompt": prompt, "params": params, "may_be_refused": True})
    return others


def sampling_requests(vocabulary: range = VOCABULARY) -> list[dict[str, Any]]:
    """24 requests that sample in other ways, most of them without a seed."""
    ways = (
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 3},
        {"temperature": 1.5, "top_p": 0.3, "seed": 5},
        {"min_p": 0.2},
    )
    return [request(tokens(20 + i, 50 + i, vocabulary), max_tokens=6, **params) for i, params in enumerate(ways * 6)]
