"""What the engine benchmark has an engine do, and how it is timed."""

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from benchmarks.record import case_text

if TYPE_CHECKING:
    from vllm import LLM

SPECIAL = 16
"""Token ids below are special in the project's checkpoints."""


class Workload(Protocol):
    """Something to time."""

    metric: str
    unit: str

    @property
    def case(self) -> str:
        """How it is written in the data."""

    def sample(self, llm: "LLM") -> float:
        """One measurement, in ``unit``."""


def _prompts(llm: "LLM", count: int, length: int, seed: int, run: int = 0) -> list[dict]:
    """Random tokens; with ``run``, so many of them again and again."""
    chance = random.Random(seed)
    vocabulary = range(SPECIAL, llm.llm_engine.model_config.get_vocab_size())
    runs = [chance.choices(vocabulary, k=run or length) for _ in range(count)]
    return [{"prompt_token_ids": (one * -(-length // len(one)))[:length]} for one in runs]


def _seconds(llm: "LLM", prompts: list[dict], tokens: list[int]) -> float:
    from vllm import SamplingParams

    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in tokens]
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


@dataclass(frozen=True)
class Throughput:
    """Many short prompts at once: seconds for all."""

    prompts: int
    prompt_tokens: int
    fewest: int
    most: int
    metric = "time"
    unit = "s"

    @property
    def case(self) -> str:
        return case_text(
            workload="throughput", prompts=self.prompts, input=self.prompt_tokens, output=f"{self.fewest}-{self.most}"
        )

    def sample(self, llm: "LLM") -> float:
        chance = random.Random(0)
        tokens = [chance.randint(self.fewest, self.most) for _ in range(self.prompts)]
        prompts = _prompts(llm, self.prompts, self.prompt_tokens, seed=1)
        llm.reset_prefix_cache()
        return _seconds(llm, prompts, tokens)


@dataclass(frozen=True)
class TokenTime:
    """Milliseconds in which each of ``batch`` requests gets a token behind ``context`` others: a step, or a part of a
    verify step.
    """

    batch: int
    context: int
    tokens: int
    run: int = 0
    """Tokens that a prompt repeats; 0 if it repeats none."""
    metric = "tpot"
    unit = "ms"

    @property
    def case(self) -> str:
        repeats = {"run": self.run} if self.run else {}
        return case_text(workload="tpot", batch=self.batch, context=self.context, **repeats)

    def sample(self, llm: "LLM") -> float:
        prompts = _prompts(llm, self.batch, self.context, self.context, self.run)
        # The prompts are in the prefix cache from the first run on, and what is left of prefill is in both times. A
        # machine that stalls during a run of one token would make the others look shorter, or negative: hence two.
        _seconds(llm, prompts, [1] * self.batch)
        first = min(_seconds(llm, prompts, [1] * self.batch) for _ in range(2))
        return 1e3 * (_seconds(llm, prompts, [1 + self.tokens] * self.batch) - first) / self.tokens


@dataclass(frozen=True)
class Prefill:
    """Long prompts and one token each: prompt tokens a second."""

    prompts: int
    tokens: int
    metric = "throughput"
    unit = "tokens/s"

    @property
    def case(self) -> str:
        return case_text(workload="prefill", prompts=self.prompts, input=self.tokens)

    def sample(self, llm: "LLM") -> float:
        prompts = _prompts(llm, self.prompts, self.tokens, seed=2)
        llm.reset_prefix_cache()
        return self.prompts * self.tokens / _seconds(llm, prompts, [1] * self.prompts)


@dataclass(frozen=True)
class Turn:
    """The next turn of a long conversation: milliseconds to the first token behind new ones and many cached ones."""

    context: int
    tokens: int
    metric = "ttft"
    unit = "ms"

    @property
    def case(self) -> str:
        return case_text(workload="turn", cached=self.context, input=self.tokens)

    def sample(self, llm: "LLM") -> float:
        [turn] = _prompts(llm, 1, self.context + self.tokens, seed=self.context)
        llm.reset_prefix_cache()
        _seconds(llm, [{"prompt_token_ids": turn["prompt_token_ids"][: self.context]}], [1])
        return 1e3 * _seconds(llm, [turn], [1])


WORKLOADS: dict[str, tuple[Workload, ...]] = {
    "full": (
        Throughput(1000, 32, 90, 110),
        *(TokenTime(batch, 64, 128) for batch in (1, 8, 64, 256)),
        TokenTime(1, 32_000, 64),
        TokenTime(8, 16_000, 64),
        Prefill(16, 4096),
        Turn(32_000, 64),
    ),
    "short": (
        Throughput(1000, 32, 90, 110),
        *(TokenTime(batch, 64, 128) for batch in (1, 8, 64, 256)),
        Prefill(16, 4096),
    ),
    "speculation": tuple(TokenTime(batch, 64, 256) for batch in (1, 8, 32)),
    "speculation-repeats": tuple(TokenTime(batch, 64, 256, run=8) for batch in (1, 8, 32)),
    "prefill": (Prefill(16, 4096),),
    "speculation-small": (TokenTime(1, 32, 8), TokenTime(3, 32, 8)),
    "speculation-small-repeats": (TokenTime(1, 32, 8, run=4), TokenTime(3, 32, 8, run=4)),
    "none": (),
    "small": (Throughput(8, 16, 4, 6), TokenTime(1, 32, 4), TokenTime(4, 64, 4), Prefill(2, 128), Turn(256, 16)),
}
"""By name: for a model of 8 B weights on a large GPU, and, small, to try the benchmark anywhere."""


def target_bits(llm: "LLM", concurrent: int) -> list[str]:
    """Exact tokens and logprobs of a target request, alone and with so many others: two equal texts if invariant."""
    from vllm import SamplingParams

    [target] = _prompts(llm, 1, 45, seed=3)
    found = []
    for others in (0, concurrent):
        llm.reset_prefix_cache()
        prompts = [target, *_prompts(llm, others, 30, seed=4)]
        answer = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, logprobs=5), use_tqdm=False)[0]
        [completion] = answer.outputs
        numbers = [
            [(token, entry[token].logprob.hex()) for token in sorted(entry)] for entry in completion.logprobs or []
        ]
        found.append(f"{list(completion.token_ids)} {numbers}")
    return found
