"""The requests of the main engine test: one target with concurrent requests, and what else may move its bits."""

from collections.abc import Sequence
from typing import Any

from tests.engine.engines import Result, differing_answers
from vllm_batch_invariant.seeds import SAMPLE_ID
from vllm_batch_invariant.verify.harness.requests import (
    SAMPLING,
    concurrent_requests,
    request,
    sampling_requests,
    tokens,
)

TARGETS = {length: tokens(length, 1) for length in (1, 45, 300)}
CONCURRENT = (1, 2, 7, 8, 15, 16, 17, 43, 44, 45, 46, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300)
FEWER_CONCURRENT = tuple(count for count in CONCURRENT if count <= 65 or count in (128, 257))
"""Those for which make test has time: every border of a small tile, and one number beyond each of the large ones."""
CONCURRENT_LENGTHS = (0, 1, 5, 9, 10, 11, 64, 700, 3000)
CHUNK_ENDS = (127, 128, 129, 255, 256, 257)
"""Prompt lengths around the page (128) and the attention split (256)."""

OTHER_SAMPLING = sampling_requests()

SAMPLES = ("samples", "samples with others")
UNSEEDED = ("unseeded", "unseeded again", "unseeded with others", "four without a seed")
"""Steps of one request that samples without a seed, the same in all of them but for how many samples it wants."""

RESTARTED = (
    "alone 1",
    "alone 45",
    "alone 300",
    "cold",
    "borders",
    "many",
    "plain alone",
    "with 17",
    "prompt logprobs, cold",
    "seeded 300",
)
"""Steps that other engines run as well."""


def plan(concurrent: Sequence[int] = CONCURRENT) -> list[dict]:
    """Every step of the main engine, with such numbers of concurrent requests. The target is a step's first request
    unless the name says otherwise.
    """
    steps = [{"name": f"alone {length}", "requests": [request(target)]} for length, target in TARGETS.items()]
    for count in concurrent:
        steps.append({"name": f"with {count}", "requests": [request(TARGETS[45]), *concurrent_requests(count, count)]})
    for place in (0, 50, 100):
        others = concurrent_requests(100, 1000 + place)
        others.insert(place, request(TARGETS[45]))
        steps.append({"name": f"at place {place}", "requests": others})
    for length in CONCURRENT_LENGTHS:
        beside = [request(tokens(length, 77), max_tokens=2)] if length else []
        steps.append(
            {
                "name": f"with a prompt of {length}",
                "reset_prefix_cache": True,
                "requests": [request(TARGETS[300]), *beside],
            }
        )
    long = tokens(700, 3)
    steps += [
        {"name": "cold", "reset_prefix_cache": True, "requests": [request(long)]},
        {"name": "warm", "requests": [request(long)]},
        {"name": "half warm", "requests": [request(long[:500] + tokens(200, 4))]},
        {"name": "half warm, cold", "reset_prefix_cache": True, "requests": [request(long[:500] + tokens(200, 4))]},
        {"name": "prompt logprobs, cold", "reset_prefix_cache": True, "requests": [request(long, prompt_logprobs=5)]},
        {"name": "prompt logprobs, warm", "requests": [request(long, prompt_logprobs=5), *concurrent_requests(20, 5)]},
        {"name": "after prompt logprobs", "requests": [request(long)]},
    ]
    for name, params in SAMPLING.items():
        target = request(TARGETS[45], **params)
        steps.append({"name": f"{name} alone", "requests": [target]})
        steps.append({"name": f"{name} with others", "requests": [*OTHER_SAMPLING[:9], target, *OTHER_SAMPLING[9:]]})
    seeded = request(TARGETS[300], temperature=1.0, seed=7)
    steps.append({"name": "seeded 300", "reset_prefix_cache": True, "requests": [seeded, *concurrent_requests(5, 9)]})
    several = request(TARGETS[45], n=4, temperature=1.0, seed=3)
    steps.append({"name": "four samples", "requests": [several]})
    steps.append({"name": "four samples with others", "requests": [*OTHER_SAMPLING, several]})
    steps.append({"name": SAMPLES[0], "requests": samples_of(seed=3)})
    steps.append({"name": SAMPLES[1], "requests": [*OTHER_SAMPLING[:9], *reversed(samples_of(seed=3))]})
    unseeded = request(TARGETS[45], temperature=1.0)
    steps += [{"name": name, "requests": [unseeded]} for name in UNSEEDED[:2]]
    steps.append({"name": UNSEEDED[2], "requests": [*OTHER_SAMPLING[:9], unseeded]})
    steps.append({"name": UNSEEDED[3], "requests": [request(TARGETS[45], n=4, temperature=1.0)]})
    steps.append({"name": "borders", "requests": [request(tokens(length, 6), max_tokens=4) for length in CHUNK_ENDS]})
    steps.append({"name": "many", "requests": [request(tokens(250, 100 + i), max_tokens=40) for i in range(12)]})
    return steps


def samples_of(**seed: int) -> list[dict[str, Any]]:
    """Four samples of one prompt, which differ in nothing but their names."""
    return [request(TARGETS[45], temperature=1.0, extra_args={SAMPLE_ID: number}, **seed) for number in range(4)]


def again(*names: str) -> list[dict]:
    """Some of the plan's steps, for another engine."""
    return [step for step in plan() if step["name"] in names]


GREEDY = [request(tokens(length, length), max_tokens=12) for length in TARGETS]
SEEDED = request(tokens(60, 9), temperature=1.0, seed=7, max_tokens=12, logprobs=3, prompt_logprobs=2)


def alone_and_among(targets: Sequence[dict[str, Any]] = (*GREEDY, SEEDED)) -> list[dict[str, Any]]:
    """Each target alone, all of them among others, and from a warm prefix cache."""
    requests = {f"alone {number}": [one] for number, one in enumerate(targets)}
    requests |= {f"among {count}": [*targets, *concurrent_requests(count, count)] for count in (1, 3, 17, 40)}
    steps = [{"name": name, "reset_prefix_cache": True, "requests": asked} for name, asked in requests.items()]
    return [*steps, {"name": "warm", "requests": targets}]


def targets(done: Result) -> list[dict[str, Any]]:
    """What the targets of all steps of such a plan were answered."""
    return [answer for answers in done.steps.values() for answer in answers[: len(GREEDY) + 1]]


def moved(done: Result) -> list[str]:
    """Steps of such a plan in which a target has other tokens, logprobs, candidates or prompt logprobs than alone."""
    alone = [answers[0] for name, answers in done.steps.items() if name.startswith("alone")]
    return [
        f"{name}: target {number}"
        for name, answers in done.steps.items()
        if not name.startswith("alone")
        for number in differing_answers(answers[: len(alone)], alone)
    ]
