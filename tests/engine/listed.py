"""What an engine lists with tokens, in the order in which it does: run by the driver."""

from typing import Any

Answers = list[dict[str, Any]]

CONCURRENT: dict[str, list[dict[str, Any]]] = {
    "no logprobs": [{"logprobs": None}],
    "0": [{"logprobs": 0}],
    "1": [{"logprobs": 1}],
    "20": [{"logprobs": 20}],
    "all": [{"logprobs": -1}],
    "prompt logprobs": [{"logprobs": 8, "prompt_logprobs": 12}, {"prompt_logprobs": 0, "logprobs": None}],
    "tokens by id": [{"logprobs": None, "logprob_token_ids": list(range(30, 60))}],
    "mixed": [{"logprobs": number} for number in (None, 0, 1, 20, -1)],
}
"""Parameters of concurrent requests, by a name."""
TARGETS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 5, "prompt_logprobs": 3},
    {"temperature": 0, "logprobs": 0},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9, "logprobs": 5},
    {"temperature": 0.8, "seed": 4, "top_k": 5, "logprobs": 17, "prompt_logprobs": 0},
]


def listed(llm: Any, prompts: list[list[int]], others: list[list[int]]) -> dict[str, Answers]:
    """What the targets get when each is alone, and with concurrent requests of each kind."""
    from vllm import SamplingParams

    def params(asked: dict[str, Any], max_tokens: int) -> Any:
        return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **asked)

    def answers(requests: list[tuple[list[int], Any]]) -> Answers:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests], [asked for _, asked in requests], use_tqdm=False
        )
        return [describe(output) for output in outputs]

    targets = [(prompt, params(asked, 12)) for prompt in prompts for asked in TARGETS]
    found = {"alone": [answers([target])[0] for target in targets]}
    for name, kinds in CONCURRENT.items():
        concurrent = [(prompt, params(kinds[i % len(kinds)], 8)) for i, prompt in enumerate(others)]
        half = len(concurrent) // 2
        found[name] = answers([*concurrent[:half], *targets, *concurrent[half:]])[half : half + len(targets)]
    return found


def describe(output: Any) -> dict[str, Any]:
    """Tokens of a request, and for each, and for each of its prompt, (token, rank, exact value) as they are listed."""
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [entries(position) for position in completion.logprobs or []],
        "prompt_logprobs": [entries(position) for position in output.prompt_logprobs or [] if position is not None],
    }


def entries(position: dict[int, Any]) -> list[tuple[int, int, str]]:
    return [(token, entry.rank, entry.logprob.hex()) for token, entry in position.items()]
