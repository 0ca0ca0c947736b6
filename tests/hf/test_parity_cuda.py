"""A patched Hugging Face model on a GPU has the logprobs of a real rollout there, bit for bit, and gradients; of either
model runner and either attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_batch_invariant.envs import ATTENTION
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.requests import concurrent_requests, request, tokens
from vllm_batch_invariant.verify.harness.worker import Engine

pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers", minversion="5.5")

from scripts.parity import Gap, Sample, of_trainer, plain_logprobs, rollout  # noqa: E402 - they need transformers
from tests.assertions import assert_near, assert_same_bits  # noqa: E402
from tests.hf.models import ON_A_SHARED_GPU  # noqa: E402
from vllm_batch_invariant.hf import patch, token_logprobs  # noqa: E402

pytestmark = pytest.mark.engine

VOCABULARY = 20_011
"""Odd, so that vLLM pads it, and longer than a row of logits that one program holds."""
WORDS = range(16, 4000)
PROMPTS = (1, 45, 257, 700)
MOST_TOKENS = 24
ARGUMENTS = ["--max-model-len", "1024", "--max-logprobs", "-1", "--skip-tokenizer-init"]
RUNS: dict[str, tuple[str, dict[str, str]]] = {
    "bfloat16": ("bfloat16", {}),
    "float16, first model runner": ("float16", {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "bfloat16, FlexAttention": ("bfloat16", {ATTENTION.name: "flex"}),
}
"""Dtype and environment of the engine and the trainer."""


@dataclass(frozen=True)
class Rollout:
    """What an engine answered, and the checkpoint that it served."""

    path: Path
    dtype: torch.dtype
    samples: list[Sample]
    """Rolled out together, so prompts are prefilled together and tokens decoded in batches."""
    group: list[dict[str, Any]]
    """Completions of the last prompt, from a warm cache and with others."""
    cached: int
    distribution: dict[str, Any]
    """A completion with every token's logprob."""


@pytest.fixture(scope="module", params=RUNS)
def rolled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollout]:
    """The engine's process has ended when the trainer runs; its environment is the trainer's."""
    dtype, environment = RUNS[request.param]
    shape = Shape(hidden=512, intermediate=1024, layers=3, heads=8, kv_heads=2, head_size=128, vocab=VOCABULARY)
    path = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), shape)
    with pytest.MonkeyPatch.context() as patched:
        for name in (ATTENTION.name, "VLLM_USE_V2_MODEL_RUNNER"):
            patched.delenv(name, raising=False)
        for name, value in environment.items():
            patched.setenv(name, value)
        yield _roll_out(path, dtype)


def _roll_out(path: Path, dtype: str) -> Rollout:
    with Engine(str(path), ["--dtype", dtype, *ARGUMENTS, *ON_A_SHARED_GPU], flag="1") as engine:
        samples = rollout(engine, (tokens(length, 1, WORDS) for length in PROMPTS), MOST_TOKENS)
        prompt = samples[-1].tokens[: samples[-1].prompt]
        asked = request(prompt, n=4, temperature=1.0, seed=9, logprobs=0, max_tokens=12)
        group = engine.step("group", [*concurrent_requests(9, 3, vocabulary=WORDS), asked]).requests[-1]
        asked = request(tokens(45, 2, WORDS), temperature=1.0, seed=1, logprobs=-1, max_tokens=2)
        [distribution] = engine.step("distribution", [asked]).requests[0]["completions"]
    return Rollout(path, getattr(torch, dtype), samples, group["completions"], group["cached"], distribution)


def load(rolled: Rollout) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(rolled.path, dtype=rolled.dtype).cuda().eval()


@pytest.fixture(scope="module")
def trainer(rolled: Rollout) -> torch.nn.Module:
    return patch(load(rolled))


def numbers(values: list[str]) -> torch.Tensor:
    return torch.tensor([float.fromhex(value) for value in values])


def test_logprobs_of_prompt_and_sampled_tokens_have_the_rollouts_bits(
    rolled: Rollout, trainer: torch.nn.Module
) -> None:
    together = of_trainer(trainer, rolled.samples)
    for ours, sample in zip(together, rolled.samples, strict=True):
        assert_same_bits(ours, sample.logprobs, f"prompt of {sample.prompt}")
        assert_same_bits(of_trainer(trainer, [sample])[0], sample.logprobs, f"prompt of {sample.prompt} alone")
    assert Gap.of(rolled.samples, together).kl == 0.0


def test_a_group_sampled_from_a_warm_cache_with_others_has_the_trainers_bits(
    rolled: Rollout, trainer: torch.nn.Module
) -> None:
    sample = rolled.samples[-1]
    prompt = sample.tokens[: sample.prompt]
    assert rolled.cached > 0
    for completion in rolled.group:
        theirs = numbers([value for [(_, value, _)] in completion["logprobs"]])
        every = [*prompt, *completion["tokens"]]
        ours = of_trainer(trainer, [Sample(every, len(prompt), torch.empty(0))])[0]
        assert_same_bits(ours[len(prompt) - 1 :], theirs)


def test_the_whole_distribution_is_the_same(rolled: Rollout, trainer: torch.nn.Module) -> None:
    prompt, found = tokens(45, 2, WORDS), rolled.distribution
    whole = torch.tensor([prompt + found["tokens"]], device="cuda")
    with torch.no_grad():
        logits = trainer(whole).logits[0, len(prompt) - 1 : -1]
    assert len(logits) == len(found["logprobs"]) == 2
    every = torch.arange(VOCABULARY, device="cuda")
    for row, entry in zip(logits, found["logprobs"], strict=True):
        assert sorted(token for token, *_ in entry) == every.tolist()
        ours = token_logprobs(row.expand(VOCABULARY, -1), every).cpu()
        assert_same_bits(ours, numbers([value for _, value, _ in sorted(entry)]))


def test_hugging_face_and_other_weights_have_others(rolled: Rollout) -> None:
    other = load(rolled)
    gap = Gap.of(rolled.samples, of_trainer(other, rolled.samples, plain_logprobs))
    assert gap.different > gap.tokens / 2
    with torch.no_grad():
        other.model.layers[-1].mlp.down_proj.weight[0] *= 1.01
    assert Gap.of(rolled.samples, of_trainer(patch(other), rolled.samples)).different > 0


def test_gradients_are_finite_and_near_those_of_hugging_face_in_fp32(rolled: Rollout, trainer: torch.nn.Module) -> None:
    exact = load(rolled).float()
    losses = []
    for model, logprobs in ((trainer, token_logprobs), (exact, plain_logprobs)):
        model.zero_grad()
        every = [torch.tensor([sample.tokens], device="cuda") for sample in rolled.samples]
        loss = sum(logprobs(model(one).logits[:, :-1], one[:, 1:]).mean() for one in every)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    expected = dict(exact.named_parameters())
    for name, weight in trainer.named_parameters():
        assert weight.grad.isfinite().all(), name
        error = (weight.grad.float() - expected[name].grad).norm() / expected[name].grad.norm()
        assert error < 0.06, (name, error)  # that of tests/hf in bf16
    trainer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_any_alignment_have_the_logprobs_of_the_engines(
    rolled: Rollout, trainer: torch.nn.Module, dtype: torch.dtype
) -> None:
    held = torch.randn(9, 20_032, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).to(dtype)
    chosen = torch.arange(9, device="cuda") * 2000
    as_held = held[:, :VOCABULARY]
    expected = token_logprobs(as_held, chosen)
    assert_near(expected, as_held.double().log_softmax(-1).gather(-1, chosen[:, None])[:, 0])
    packed = as_held.contiguous()
    shifted = torch.empty(held.numel() + 1, dtype=dtype, device="cuda")[1:].view(held.shape)[:, :VOCABULARY]
    shifted.copy_(as_held)
    for logits in (packed, shifted, packed.t().contiguous().t()):
        assert_same_bits(token_logprobs(logits, chosen), expected)
    for row in range(9):
        assert_same_bits(token_logprobs(packed[row:][:1], chosen[row : row + 1]), expected[row : row + 1])
        assert_same_bits(token_logprobs(packed[row], chosen[row]), expected[row])
