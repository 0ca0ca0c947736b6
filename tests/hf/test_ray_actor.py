"""A rollout by an engine in an actor of Ray, whose weights follow a trainer outside: after each update the logprobs are
the trainer's, bit for bit. Skipped without Ray.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.assertions import assert_same_bits
from tests.engine.engines import SETTINGS
from tests.hf.models import DEVICE, VOCABULARY, model
from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.hf import check_engine, patch, token_logprobs
from vllm_batch_invariant.verify.harness.requests import tokens

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.engine, pytest.mark.skipif(DEVICE == "cuda", reason="the actor has CPUs")]

PROMPTS = [tokens(length, length, range(16, VOCABULARY)) for length in (1, 45, 150)]
"""The last has more than a page of the prefix cache, which an update must empty."""
ENVIRONMENT = SETTINGS | {FLAG: "1", "OMP_NUM_THREADS": ""}
"""Ray would give an actor one thread a CPU that it asks for."""


@ray.remote(num_cpus=1)
class Rollouts:
    """An engine, as RL libraries with Ray have it."""

    def __init__(self, folder: str) -> None:
        from vllm import LLM

        self._llm = LLM(folder, dtype="bfloat16", max_model_len=256, skip_tokenizer_init=True)

    def sampled(self, seed: int) -> list[tuple[list[int], list[float]]]:
        """Tokens and logprobs of a completion of each prompt."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True, logprobs=0)
        answers = self._llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        found = [answer.outputs[0] for answer in answers]
        return [
            (
                list(one.token_ids),
                [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)],
            )
            for one in found
        ]

    def declared(self) -> list[dict[str, Any]]:
        """What the workers say of themselves."""
        return self._llm.collective_rpc("batch_invariant_declaration")

    def load(self, folder: str) -> None:
        """Take other weights."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})


@pytest.fixture
def started() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": ENVIRONMENT})
    yield
    ray.shutdown()


def logprobs_of(trainer: torch.nn.Module, prompt: list[int], sampled: list[int]) -> torch.Tensor:
    """[tokens] of the trainer."""
    logits = trainer(torch.tensor([prompt + sampled])).logits[:, len(prompt) - 1 : -1]
    return token_logprobs(logits, torch.tensor([sampled]))[0]


@pytest.mark.exhaustive
def test_an_engine_in_an_actor_has_the_logprobs_of_the_trainer_before_and_after_an_update(
    started: None, tmp_path: Path
) -> None:
    folder = str(tmp_path / "first")
    model(torch.bfloat16).save_pretrained(folder)
    actor = Rollouts.remote(folder)
    declared = ray.get(actor.declared.remote())
    trainer = patch(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    check_engine(trainer, declared)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.5)
    for step in range(3):
        sampled = ray.get(actor.sampled.remote(step))
        loss = torch.zeros(())
        for prompt, (chosen, theirs) in zip(PROMPTS, sampled, strict=True):
            ours = logprobs_of(trainer, prompt, chosen)
            assert_same_bits(ours.detach(), torch.tensor(theirs), f"step {step}")
            loss = loss + (ours * torch.linspace(-1, 1, len(chosen))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            assert not torch.equal(logprobs_of(trainer, prompt, chosen), torch.tensor(theirs)), "the weights are others"
        folder = tmp_path / f"step {step}"
        trainer.save_pretrained(folder)
        ray.get(actor.load.remote(str(folder)))
