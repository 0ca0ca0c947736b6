"""token_logprobs has the bits of a real engine under every ``--logprobs-mode``."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.assertions import assert_same_bits
from tests.engine.engines import selected
from tests.hf.models import DEVICE, ON_A_SHARED_GPU, VOCABULARY, model
from vllm_batch_invariant.hf import Sampling, patch, token_logprobs
from vllm_batch_invariant.hf.logprobs import MODES
from vllm_batch_invariant.verify.harness.requests import concurrent_requests, request, tokens
from vllm_batch_invariant.verify.harness.worker import Engine

pytestmark = pytest.mark.engine

WORDS = range(16, VOCABULARY)
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=0.003),
    Sampling(temperature=1.3, top_k=5),
    Sampling(temperature=0.6, top_p=0.8),
    Sampling(temperature=0.9, min_p=0.1),
    Sampling(temperature=1.1, top_k=20, top_p=0.9, min_p=0.02),
    Sampling(temperature=0.0),
)
"""Of requests that run together."""
Answers = list[dict[str, Any]]


def _answer(path: Path, mode: str) -> Answers:
    """Answers to a request of each sampling, with another beside them."""
    arguments = ["--dtype", "bfloat16", "--max-model-len", "128", "--skip-tokenizer-init", "--logprobs-mode", mode]
    arguments += ON_A_SHARED_GPU
    with Engine(str(path), arguments, flag="1", environment={"VLLM_CPU_KVCACHE_SPACE": "1"}) as engine:
        asked = [
            request(tokens(9 + seed, seed, WORDS), seed=seed, logprobs=0, prompt_logprobs=0, max_tokens=12)
            for seed in range(len(SAMPLINGS))
        ]
        for one, sampling in zip(asked, SAMPLINGS, strict=True):
            one["params"] |= asdict(sampling)
        others = concurrent_requests(3, 1, vocabulary=WORDS)
        answers = engine.step("sampled", [*asked, *others]).requests[: len(asked)]
        return [answer | {"prompt": one["prompt"]} for answer, one in zip(answers, asked, strict=True)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    model(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def answered(path: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, Future]]:
    """An engine for each setting, two at a time: most of a start takes one core."""
    modes = selected(request, "mode")
    with ThreadPoolExecutor(2) as pool:
        yield {mode: pool.submit(_answer, path, mode) for mode in modes}
        pool.shutdown(wait=True, cancel_futures=True)


def _scores(entries: list[list[Any]], chosen: list[int]) -> torch.Tensor:
    listed = [{token: value for token, value, *_ in entry} for entry in entries]
    return torch.tensor([float.fromhex(values[token]) for token, values in zip(chosen, listed, strict=True)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", MODES)
def test_tokens_have_the_engines_scores(mode: str, path: Path, answered: dict[str, Future]) -> None:
    answers = answered[mode].result()
    trainer = patch(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(DEVICE))
    processed = mode.startswith("processed")
    for sampling, answer in zip(SAMPLINGS, answers, strict=True):
        prompt, [completion] = answer["prompt"], answer["completions"]
        whole = torch.tensor(prompt + completion["tokens"], device=DEVICE)
        with torch.no_grad():
            logits = trainer(whole[None]).logits[0]
        before, sampled = slice(0, len(prompt) - 1), slice(len(prompt) - 1, -1)
        chosen = whole[len(prompt) :]
        theirs = _scores(completion["logprobs"], completion["tokens"])
        given = {"sampling": sampling} if processed else {}
        assert_same_bits(token_logprobs(logits[sampled], chosen, mode=mode, **given).cpu(), theirs, str(sampling))
        raw = mode.replace("processed", "raw")
        of_prompt = _scores(answer["prompt_logprobs"][1:], prompt[1:])
        assert_same_bits(token_logprobs(logits[before], whole[1 : len(prompt)], mode=raw).cpu(), of_prompt, "prompt")
        if processed and sampling.temperature > 0.01:
            other = replace(sampling, temperature=sampling.temperature * 1.01)
            assert not torch.equal(token_logprobs(logits[sampled], chosen, mode=mode, sampling=other).cpu(), theirs)
