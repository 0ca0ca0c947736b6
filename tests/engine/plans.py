"""The requests of the main engine test: one needle in every company, and what else may move its bits."""

from tests.engine.engines import company, request, tokens

NEEDLES = {length: tokens(length, 1) for length in (1, 45, 300)}
COMPANY = (1, 2, 7, 8, 15, 16, 17, 43, 44, 45, 46, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300)
NEIGHBOURS = (0, 1, 5, 9, 10, 11, 64, 700, 3000)
CHUNK_ENDS = (127, 128, 129, 255, 256, 257)
"""Prompt lengths around the page (128) and the attention split (256)."""

SAMPLING = {
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
OTHER_SAMPLING = [
    request(tokens(20 + i, 50 + i), max_tokens=6, **params)
    for i, params in enumerate(
        [
            {"temperature": 1.0},
            {"temperature": 0.5, "top_k": 3},
            {"temperature": 1.5, "top_p": 0.3, "seed": 5},
            {"min_p": 0.2},
        ]
        * 6
    )
]

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
)
"""Steps that other engines run as well."""


def plan() -> list[dict]:
    """Every step of the main engine. The needle is the first request of a step unless the name says otherwise."""
    steps = [{"name": f"alone {length}", "requests": [request(needle)]} for length, needle in NEEDLES.items()]
    for count in COMPANY:
        steps.append({"name": f"with {count}", "requests": [request(NEEDLES[45]), *company(count, count)]})
    for place in (0, 50, 100):
        others = company(100, 1000 + place)
        others.insert(place, request(NEEDLES[45]))
        steps.append({"name": f"at place {place}", "requests": others})
    for length in NEIGHBOURS:
        neighbour = [request(tokens(length, 77), max_tokens=2)] if length else []
        steps.append(
            {"name": f"neighbour {length}", "reset_prefix_cache": True, "requests": [request(NEEDLES[300]), *neighbour]}
        )
    long = tokens(700, 3)
    steps += [
        {"name": "cold", "reset_prefix_cache": True, "requests": [request(long)]},
        {"name": "warm", "requests": [request(long)]},
        {"name": "half warm", "requests": [request(long[:500] + tokens(200, 4))]},
        {"name": "half warm, cold", "reset_prefix_cache": True, "requests": [request(long[:500] + tokens(200, 4))]},
        {"name": "prompt logprobs, cold", "reset_prefix_cache": True, "requests": [request(long, prompt_logprobs=5)]},
        {"name": "prompt logprobs, warm", "requests": [request(long, prompt_logprobs=5), *company(20, 5)]},
        {"name": "after prompt logprobs", "requests": [request(long)]},
    ]
    for name, params in SAMPLING.items():
        needle = request(NEEDLES[45], **params)
        steps.append({"name": f"{name} alone", "requests": [needle]})
        steps.append({"name": f"{name} in company", "requests": [*OTHER_SAMPLING[:9], needle, *OTHER_SAMPLING[9:]]})
    several = request(NEEDLES[45], n=4, temperature=1.0, seed=3)
    steps.append({"name": "four samples", "requests": [several]})
    steps.append({"name": "four samples in company", "requests": [*OTHER_SAMPLING, several]})
    steps.append({"name": "four without a seed", "requests": [request(NEEDLES[45], n=4, temperature=1.0)]})
    steps.append({"name": "borders", "requests": [request(tokens(length, 6), max_tokens=4) for length in CHUNK_ENDS]})
    steps.append({"name": "many", "requests": [request(tokens(250, 100 + i), max_tokens=40) for i in range(12)]})
    return steps


def again(*names: str) -> list[dict]:
    """Some of the plan's steps, for another engine."""
    return [step for step in plan() if step["name"] in names]
