"""What the engine benchmark has an engine do, and how it is timed."""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.record import case_text
from vllm_batch_invariant.verify.harness import images
from vllm_batch_invariant.verify.harness.adapters import folder_of

if TYPE_CHECKING:
    from vllm import LLM

SPECIAL = 16
"""Token ids below are special in the project's checkpoints."""
_SIDE = 112
"""Pixels of the side of an image whose bits are looked at."""


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


def _seconds(llm: "LLM", prompts: list[dict], tokens: list[int], adapters: int = 0) -> float:
    from vllm import SamplingParams

    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in tokens]
    used = _adapters(llm, len(prompts), adapters)
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, lora_request=used)
    return time.perf_counter() - started


def _adapters(llm: "LLM", requests: int, adapters: int) -> list[Any] | None:
    """So many adapters in turn, for requests of an engine that has as much room, of the largest rank that it takes."""
    if not adapters:
        return None
    from vllm.lora.request import LoRARequest

    config = llm.llm_engine.vllm_config
    said, rank = Path(config.model_config.model, "config.json").read_text(), config.lora_config.max_lora_rank
    known = [LoRARequest(str(one), 1 + one, folder_of(said, rank, one)) for one in range(adapters)]
    return [known[one % adapters] for one in range(requests)]


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
    adapters: int = 0
    """Of LoRA, which the requests have in turn."""
    metric = "tpot"
    unit = "ms"

    @property
    def case(self) -> str:
        more = {name: value for name in ("run", "adapters") if (value := getattr(self, name))}
        return case_text(workload="tpot", batch=self.batch, context=self.context, **more)

    def sample(self, llm: "LLM") -> float:
        prompts = _prompts(llm, self.batch, self.context, self.context, self.run)
        # The prompts are in the prefix cache from the first run on, and what is left of prefill is in both times. A
        # machine that stalls during a run of one token would make the others look shorter, or negative: hence two.
        of_first, adapters = [1] * self.batch, self.adapters
        _seconds(llm, prompts, of_first, adapters)
        first = min(_seconds(llm, prompts, of_first, adapters) for _ in range(2))
        return 1e3 * (_seconds(llm, prompts, [1 + self.tokens] * self.batch, adapters) - first) / self.tokens


@dataclass(frozen=True)
class Prefill:
    """Long prompts and one token each: prompt tokens a second."""

    prompts: int
    tokens: int
    adapters: int = 0
    metric = "throughput"
    unit = "tokens/s"

    @property
    def case(self) -> str:
        more = {"adapters": self.adapters} if self.adapters else {}
        return case_text(workload="prefill", prompts=self.prompts, input=self.tokens, **more)

    def sample(self, llm: "LLM") -> float:
        prompts = _prompts(llm, self.prompts, self.tokens, seed=2)
        llm.reset_prefix_cache()
        return self.prompts * self.tokens / _seconds(llm, prompts, [1] * self.prompts, self.adapters)


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


@dataclass(frozen=True)
class FirstToken:
    """Squares of pixels and a short question: milliseconds to the first token, what a processor takes among them."""

    images: int
    side: int
    metric = "ttft"
    unit = "ms"

    @property
    def case(self) -> str:
        return case_text(workload="images", images=self.images, side=self.side)

    def sample(self, llm: "LLM") -> float:
        [text] = _prompts(llm, 1, 32, seed=self.side)
        prompt = with_images(llm, text, self.images, self.side)
        llm.reset_prefix_cache()
        images.forget(llm)
        return 1e3 * _seconds(llm, [prompt], [1])


@dataclass(frozen=True)
class Embeddings:
    """Texts of several lengths at once: how many tokens of them are read a second."""

    texts: int
    fewest: int
    most: int
    metric = "throughput"
    unit = "tokens/s"

    @property
    def case(self) -> str:
        return case_text(workload="embeddings", texts=self.texts, input=f"{self.fewest}-{self.most}")

    def sample(self, llm: "LLM") -> float:
        lengths = random.Random(0).choices(range(self.fewest, self.most + 1), k=self.texts)
        prompts = [_prompts(llm, 1, length, seed=number)[0] for number, length in enumerate(lengths)]
        llm.reset_prefix_cache()
        started = time.perf_counter()
        llm.embed(prompts, use_tqdm=False)
        return sum(lengths) / (time.perf_counter() - started)


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
        *(TokenTime(batch, 64, 128) for batch in (1, 8, 64, 256)),
        Prefill(16, 4096),
        Throughput(1000, 32, 90, 110),
    ),
    "steps": (*(TokenTime(batch, 64, 128) for batch in (1, 8, 64, 256)), Prefill(16, 4096)),
    "speculation": tuple(TokenTime(batch, 64, 256) for batch in (1, 8, 32)),
    "speculation-repeats": tuple(TokenTime(batch, 64, 256, run=8) for batch in (1, 8, 32)),
    "prefill": (Prefill(16, 4096),),
    "adapters": (
        *(TokenTime(batch, 64, 128, adapters=used) for used in (0, 1, 8) for batch in (1, 8, 64)),
        *(Prefill(16, 4096, adapters=used) for used in (0, 1)),
    ),
    "adapters-prefill": tuple(Prefill(16, 4096, adapters=used) for used in (0, 1)),
    "adapters-small": (*(TokenTime(3, 32, 4, adapters=used) for used in (0, 2)), Prefill(2, 128, adapters=1)),
    "speculation-small": (TokenTime(1, 32, 8), TokenTime(3, 32, 8)),
    "speculation-small-repeats": (TokenTime(1, 32, 8, run=4), TokenTime(3, 32, 8, run=4)),
    "images": (
        *(FirstToken(count, side) for count, side in ((1, 1024), (8, 1024), (64, 448))),
        *(TokenTime(batch, 64, 128) for batch in (1, 8, 64)),
    ),
    "images-small": (FirstToken(1, 56), FirstToken(3, 28), TokenTime(1, 32, 4)),
    "embeddings": (Embeddings(4096, 20, 500),),
    "embeddings-small": (Embeddings(8, 2, 20),),
    "none": (),
    "small": (Throughput(8, 16, 4, 6), TokenTime(1, 32, 4), TokenTime(4, 64, 4), Prefill(2, 128), Turn(256, 16)),
}
"""By name: for a model of 8 B weights on a large GPU, and, small, to try the benchmark anywhere."""


def most_adapters(workloads: str) -> int:
    """Of the requests of workloads, by their name."""
    return max((getattr(one, "adapters", 0) for one in WORKLOADS[workloads]), default=0)


def of_engine(workloads: str) -> dict[str, Any]:
    """Arguments of vLLM.LLM that workloads ask for, by their name."""
    chosen = WORKLOADS[workloads]
    most = max((one.images for one in chosen if isinstance(one, FirstToken)), default=0)
    if most:
        return {"limit_mm_per_prompt": {"image": most}, "skip_tokenizer_init": False}
    pools = any(isinstance(one, Embeddings) for one in chosen)
    return {"runner": "pooling", "skip_tokenizer_init": False} if pools else {}


def with_images(llm: "LLM", prompt: dict, count: int, side: int) -> dict:
    """A prompt with so many squares of pixels before its last tokens."""
    text = prompt["prompt_token_ids"]
    drawn = [{"kind": "image", "size": [side, side], "seed": seed, "at": len(text) - 8} for seed in range(count)]
    return images.prompt_of(llm, text, drawn)


def _embedded(llm: "LLM", concurrent: int) -> list[str]:
    [target] = _prompts(llm, 1, 45, seed=3)
    found = []
    for others in (0, concurrent):
        llm.reset_prefix_cache()
        given = llm.embed([target, *_prompts(llm, others, 30, seed=4)], use_tqdm=False)
        found.append(" ".join(value.hex() for value in given[0].outputs.embedding))
    return found


def target_bits(llm: "LLM", concurrent: int, adapters: int = 0) -> list[str]:
    """Exact tokens and logprobs of a target request, alone and with so many others: two equal texts if invariant. The
    requests of an engine that encodes images have one each; of a pooling one these are embeddings.
    """
    from vllm import SamplingParams

    if llm.llm_engine.model_config.runner_type == "pooling":
        return _embedded(llm, concurrent)
    [target] = _prompts(llm, 1, 45, seed=3)
    side = _SIDE if images.placeholders(llm) else 0
    if side:
        target = with_images(llm, target, 1, side)
    found = []
    for others in (0, concurrent):
        llm.reset_prefix_cache()
        prompts = [target, *_prompts(llm, others, 30, seed=4)]
        if side:
            images.forget(llm)
            prompts[1:] = [with_images(llm, one, 1, side * (1 + at % 3)) for at, one in enumerate(prompts[1:])]
        params = SamplingParams(temperature=0, max_tokens=24, logprobs=5)
        used = _adapters(llm, len(prompts), adapters)
        [completion] = llm.generate(prompts, params, use_tqdm=False, lora_request=used)[0].outputs
        numbers = [
            [(token, entry[token].logprob.hex()) for token in sorted(entry)] for entry in completion.logprobs or []
        ]
        found.append(f"{list(completion.token_ids)} {numbers}")
    return found
