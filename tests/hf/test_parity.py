"""A patched Hugging Face model has the logprobs of a real rollout, bit for bit; one that is not patched has others."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.parity import Gap, Sample, of_trainer, plain_logprobs, rollout
from tests.assertions import assert_same_bits
from tests.engine.engines import SETTINGS
from tests.hf.models import DEVICE, ON_A_SHARED_GPU
from vllm_batch_invariant.hf import patch, token_logprobs
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.requests import concurrent_requests, request, tokens
from vllm_batch_invariant.verify.harness.worker import Engine

pytestmark = pytest.mark.engine

VOCABULARY = 4000
"""No multiple of 64, to which vLLM pads an output embedding."""
PROMPTS = (1, 45, 257, 300)
"""A GPU may be shared with other tests, whose memory vLLM would count as its own."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(hidden=320, intermediate=768, layers=3, heads=6, kv_heads=2, vocab=VOCABULARY)
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), shape)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    arguments = ["--max-model-len", "512", "--max-logprobs", "-1", "--skip-tokenizer-init", *ON_A_SHARED_GPU]
    with Engine(str(checkpoint), arguments, flag="1", environment=SETTINGS) as started:
        yield started


@pytest.fixture(scope="module")
def samples(engine: Engine) -> list[Sample]:
    """Rolled out together, so prompts are prefilled in chunks together and tokens decoded in batches."""
    return rollout(engine, (tokens(length, 1, range(16, VOCABULARY)) for length in PROMPTS), max_tokens=24)


@pytest.fixture(params=[1, 2] if DEVICE == "cpu" else [None])
def any_threads(request: pytest.FixtureRequest, threads) -> None:
    """An engine has one or two, where there are two cores."""
    if request.param:
        threads(request.param)


@pytest.fixture
def stock(checkpoint: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(DEVICE).eval()


@pytest.fixture
def trainer(stock: torch.nn.Module, any_threads: None) -> torch.nn.Module:
    return patch(stock)


def test_logprobs_of_prompt_and_sampled_tokens_have_the_rollouts_bits(
    samples: list[Sample], trainer: torch.nn.Module
) -> None:
    found = of_trainer(trainer, samples)
    for ours, sample in zip(found, samples, strict=True):
        assert_same_bits(ours, sample.logprobs, f"prompt of {sample.prompt}")
    assert Gap.of(samples, found).kl == 0.0


def test_a_sequence_that_is_not_padded_has_them_too(samples: list[Sample], trainer: torch.nn.Module) -> None:
    for sample in samples:
        assert_same_bits(of_trainer(trainer, [sample])[0], sample.logprobs)


def test_hugging_face_has_others(samples: list[Sample], stock: torch.nn.Module) -> None:
    gap = Gap.of(samples, of_trainer(stock, samples, plain_logprobs))
    assert gap.different > gap.tokens / 2
    assert gap.kl > 0.0


def test_another_weight_gives_others(samples: list[Sample], trainer: torch.nn.Module) -> None:
    with torch.no_grad():
        trainer.model.layers[-1].mlp.down_proj.weight[0] *= 1.01
    assert Gap.of(samples, of_trainer(trainer, samples)).kl > 0.0


def test_a_group_sampled_from_a_warm_cache_with_others_has_the_trainers_bits(
    engine: Engine, samples: list[Sample], trainer: torch.nn.Module
) -> None:
    prompt = samples[3].tokens[: samples[3].prompt]
    group = request(prompt, n=4, temperature=1.0, seed=9, logprobs=0, max_tokens=12)
    answer = engine.step("group", [*concurrent_requests(9, 3, vocabulary=range(16, VOCABULARY)), group]).requests[-1]
    assert answer["cached"] > 0
    for completion in answer["completions"]:
        whole = torch.tensor([prompt + completion["tokens"]], device=DEVICE)
        with torch.no_grad():
            ours = token_logprobs(trainer(whole).logits[:, :-1], whole[:, 1:])[0, len(prompt) - 1 :].cpu()
        theirs = [float.fromhex(value) for [(_, value, _)] in completion["logprobs"]]
        assert_same_bits(ours, torch.tensor(theirs))


def test_the_whole_distribution_is_the_same_so_kl_is_exactly_0(engine: Engine, trainer: torch.nn.Module) -> None:
    prompt = tokens(45, 2, range(16, VOCABULARY))
    asked = request(prompt, temperature=1.0, seed=1, logprobs=-1, max_tokens=2)
    [completion] = engine.step("distribution", [asked]).requests[0]["completions"]
    theirs = torch.tensor([[float.fromhex(value) for _, value, _ in sorted(entry)] for entry in completion["logprobs"]])
    whole = torch.tensor([prompt + completion["tokens"]], device=DEVICE)
    with torch.no_grad():
        logits = trainer(whole).logits[0, len(prompt) - 1 : -1]
        every = torch.arange(VOCABULARY, device=DEVICE)
        ours = torch.stack([token_logprobs(row.expand(VOCABULARY, -1), every) for row in logits]).cpu()
    assert_same_bits(ours, theirs)
    assert float((theirs.exp() * (theirs - ours)).sum()) == 0.0
