"""Plans of requests, and the process that runs one through a real vLLM on the CPU."""

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VOCABULARY = range(16, 4000)
"""Token ids that a test's prompt may hold: none of the special ones."""


def tokens(length: int, seed: int) -> list[int]:
    """A prompt of random tokens."""
    return random.Random(f"{length} {seed}").choices(VOCABULARY, k=length)


def request(prompt: list[int], **params: Any) -> dict[str, Any]:
    """One greedy request with logprobs, unless told otherwise."""
    return {
        "prompt": prompt,
        "params": {"temperature": 0, "max_tokens": 16, "logprobs": 5, "ignore_eos": True} | params,
    }


def company(count: int, seed: int, max_tokens: int = 4, longest: int = 30) -> list[dict[str, Any]]:
    """Other people's requests: ``count`` prompts of up to ``longest`` tokens."""
    chance = random.Random(seed)
    lengths = [chance.randint(1, longest) for _ in range(count)]
    return [request(tokens(n, seed * 1000 + i), max_tokens=max_tokens, logprobs=None) for i, n in enumerate(lengths)]


@dataclass
class Result:
    """What one engine answered."""

    steps: dict[str, list[dict[str, Any]]]
    preemptions: int
    kernels: dict[str, list[str]]
    compilation: str
    log: str = field(repr=False)

    def completions(self, step: str, which: int = 0) -> list[dict[str, Any]]:
        """Tokens and logprob bits of one request of a step."""
        return self.steps[step][which]["completions"]


class EngineFailed(RuntimeError):
    """The engine did not come up; the message is its log."""


def run(
    folder: Path, engine: dict[str, Any], steps: list[dict[str, Any]], flag: str | None, **environment: str
) -> Result:
    """Run a plan in a fresh process.

    The engine lives in that process, unless ``VLLM_ENABLE_V1_MULTIPROCESSING`` says otherwise: it starts in a third of
    the time.

    Raises:
        EngineFailed: with what the process printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan, result = folder / "plan.json", folder / "result.json"
    plan.write_text(json.dumps({"engine": engine, "steps": steps}))
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    ours = ("VLLM_BATCH_INVARIANT", "VLLM_PLUGINS")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    if flag is not None:
        settings["VLLM_BATCH_INVARIANT"] = flag
    process = subprocess.run(
        [sys.executable, "-m", "tests.engine.driver", plan, result],
        cwd=ROOT,
        env=inherited | settings,
        capture_output=True,
        text=True,
        timeout=400,
    )
    log = process.stdout + process.stderr
    if process.returncode:
        raise EngineFailed(log)
    return Result(**json.loads(result.read_text()), log=log)
