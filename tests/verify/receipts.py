"""A receipt to take apart, and what a file says after a change to it."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm_batch_invariant.verify.receipt import Completion, EngineInfo, Environment, Receipt, Sampling
from vllm_batch_invariant.verify.receipt.model_files import model_at
from vllm_batch_invariant.verify.receipt.record import sha256_of

CPU = Environment(
    mode=True,
    versions={"vllm": "0.32.0", "torch": "2.13.0", "triton": "3.9.0", "vllm-batch-invariant": "0.1.0 (0123456789ab)"},
    device={"type": "cpu", "name": "a CPU", "capability": "AVX512", "threads": 2},
    engine={"dtype": "bfloat16", "kv_cache_dtype": "auto", "logprobs_mode": "raw_logprobs"},
    reductions={"attention": {"implementation": "numba", "split_size": 256}},
)
INFO = EngineInfo(model_at(None, "organisation/model", "nobody has them"), CPU)
PROMPT = (11, 12, 13)
LOGPROBS = (-0.5, -1.25, -0.75)


def completion(tokens: tuple[int, ...] = (5, 6, 7), logprobs: tuple[float, ...] = LOGPROBS) -> Completion:
    """Each position lists the chosen token and 99, which is always at -3."""
    positions = [(token, value, [(99, -3.0), (token, value)]) for token, value in zip(tokens, logprobs, strict=True)]
    return Completion.of(positions, "length")


def receipt(**other: Any) -> Receipt:
    """A receipt of three tokens, with other fields where named."""
    made = Receipt.of(INFO, PROMPT, Sampling(max_tokens=3, logprobs=2), completion(), private=False)
    return replace(made, **other)


def rewritten(made: Receipt, change: Callable[[dict[str, Any]], Any], rehash: bool = True) -> str:
    """The file's text after a change to what it holds."""
    data = json.loads(made.to_json())
    change(data)
    if rehash:
        data.pop("sha256")
        data["sha256"] = sha256_of(data)
    return json.dumps(data)
