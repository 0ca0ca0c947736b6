"""The task of ``examples.grpo.runs``: to count by steps, which a program verifies; and a small model that half can.

A model of random weights gets no reward, and so nothing to learn from. The warm-up shows it demonstrations with errors.
"""

import random
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F

from vllm_batch_invariant.verify.demo_model import EOS, Shape, make_checkpoint

DIGITS = 12
"""Of an answer."""
SHAPES = {
    "small": Shape(hidden=128, intermediate=2048, layers=3, heads=2, kv_heads=1, max_length=512, head_gain=1.0),
    "small-128": Shape(
        hidden=128, intermediate=2048, layers=3, heads=2, kv_heads=1, head_size=128, max_length=512, head_gain=1.0,
    ),
    "small-delta": Shape(
        hidden=128, intermediate=2048, layers=2, heads=2, kv_heads=1, max_length=512, head_gain=1.0, hybrid="delta",
    ),
    "0.6b": Shape(
        hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8, head_size=128, vocab=151_936, max_length=512,
        residual_gain=0.1, head_gain=1.0,
    ),
}  # fmt: skip
"""The small one has a large intermediate size: with a smaller one plain vLLM's bits do not follow the batch on every
CPU, since sums are too short. The next has heads of whole blocks of FP8; then a Qwen3.5 with one gated delta net and
one layer of attention. The last is Qwen3's of 0.6 billion parameters, for a GPU.
"""
_RULES = (
    "Write the last digits of the numbers that one counts, as many of them as there are months in a year, with one "
    "space before each of them, and nothing else after the last of them. "
)
"""More than a page of keys, which all prompts share: so rollouts find it in the prefix cache."""
_TASKS = list(product(range(10), range(1, 10)))
"""(start, step) of every question."""
_BATCH = 32
_LEARNING_RATES = {"0.6b": 3e-4}
_LEARNING_RATE = 2e-3
"""Of the other sizes."""
_WARM_STEPS = 20
_ERRORS = 0.3
"""Share of a demonstration's digits that are random."""


def questions() -> list[dict[str, str]]:
    """Every ``prompt`` with the ``expected`` answer."""
    return [
        {"prompt": f"{_RULES}Count up by {step} from {start}:", "expected": _written(_counted(start, step))}
        for start, step in _TASKS
    ]


def reward(completions: list[str], expected: list[str], **_: object) -> list[float]:
    """The share of digits that are right, each in its place; what comes after them counts as wrong."""
    return [_share(answer.split(), right.split()) for answer, right in zip(completions, expected, strict=True)]


def _share(answer: list[str], right: list[str]) -> float:
    found = sum(one == other for one, other in zip(answer, right, strict=False))
    return found / max(len(answer), len(right))


def _written(digits: list[int]) -> str:
    return "".join(f" {digit}" for digit in digits)


def _counted(start: int, step: int, chance: random.Random | None = None) -> list[int]:
    """Right digits; with ``chance`` some are random, and the next ones count on from them."""
    digits, digit = [], start
    for _ in range(DIGITS):
        if chance is not None and chance.random() < _ERRORS:
            digit = chance.randrange(10)
        digits.append(digit)
        digit = (digit + step) % 10
    return digits


def warmed_up(folder: Path, steps: int, seed: int = 0, size: str = "small") -> Path:
    """Write a model in bf16 and its tokenizer into ``folder``, trained in fp32 on demonstrations, on a GPU if there is
    one.

    Args:
        folder: is made.
        steps: of AdamW, with 32 demonstrations each.
        seed: of weights and demonstrations.
        size: of :data:`SHAPES`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    make_checkpoint(folder, SHAPES[size], seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATES.get(size, _LEARNING_RATE), weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / _WARM_STEPS) * (1 - step / steps)
    )
    chance, asked = random.Random(seed), [question["prompt"] for question in questions()]
    for _ in range(steps):
        chosen = [chance.randrange(len(_TASKS)) for _ in range(_BATCH)]
        prompts = tokenizer([asked[number] for number in chosen]).input_ids
        shown = tokenizer([_written(_counted(*_TASKS[number], chance)) + EOS for number in chosen]).input_ids
        rows, answers = (
            torch.tensor([one + other for one, other in zip(prompts, shown, strict=True)], device=device),
            torch.tensor(shown, device=device),
        )
        logits = model(rows, logits_to_keep=answers.shape[1] + 1).logits[:, :-1]
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
        optimizer.step()
        rate.step()
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
