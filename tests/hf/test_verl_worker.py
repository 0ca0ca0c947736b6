"""A rollout through a worker with verl's extension: after every step of the optimizer the ratio of trainer and engine
is exactly 1.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.assertions import assert_same_bits
from tests.engine.engines import PATHS
from tests.hf import verl_worker
from tests.hf.models import DEVICE, VOCABULARY, model
from vllm_batch_invariant.hf import Sampling, patch, token_logprobs
from vllm_batch_invariant.verify.harness.requests import request, tokens
from vllm_batch_invariant.verify.harness.worker import Engine

pytestmark = [pytest.mark.engine, pytest.mark.skipif(DEVICE == "cuda", reason="through a CPU's shared memory")]

SAMPLING = Sampling(temperature=0.8, top_p=0.95)
PROMPT = tokens(150, 1, range(16, VOCABULARY))
"""More than a page of the prefix cache, which an update must empty."""
GROUP, STEPS = 4, 2
ARGUMENTS = [
    "--dtype", "bfloat16", "--max-model-len", "256", "--skip-tokenizer-init", "--logprobs-mode", "processed_logprobs",
    "--worker-extension-cls", verl_worker.EXTENSION,
]  # fmt: skip


def roll_out(engine: Engine, step: int) -> list[dict[str, Any]]:
    """A group of completions of the prompt."""
    drawn = {"temperature": SAMPLING.temperature, "top_p": SAMPLING.top_p, "seed": step, "logprobs": 0}
    [answer] = engine.step(f"step {step}", [request(PROMPT, n=GROUP, max_tokens=10, **drawn)]).requests
    return answer["completions"]


def logprobs_of(trainer: torch.nn.Module, completions: list[dict[str, Any]]) -> torch.Tensor:
    """[GROUP, tokens] of the trainer."""
    whole = torch.tensor([PROMPT + one["tokens"] for one in completions])
    logits = trainer(whole).logits[:, len(PROMPT) - 1 : -1]
    return token_logprobs(logits, whole[:, len(PROMPT) :], mode="processed_logprobs", sampling=SAMPLING)


@pytest.mark.exhaustive
def test_after_every_step_the_engine_and_the_trainer_have_the_same_logprobs(tmp_path: Path) -> None:
    checkpoint, address = tmp_path / "checkpoint", f"ipc://{tmp_path}/zmq"
    model(torch.bfloat16).save_pretrained(checkpoint)
    trainer = patch(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.5)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": PATHS, verl_worker.ADDRESS: address}
    with Engine(str(checkpoint), ARGUMENTS, flag="1", environment=environment) as engine, ThreadPoolExecutor(1) as pool:
        before = None
        for step in range(STEPS + 1):
            completions = roll_out(engine, step)
            entries = [[float.fromhex(value) for [(_, value, _)] in one["logprobs"]] for one in completions]
            theirs, ours = torch.tensor(entries), logprobs_of(trainer, completions)
            assert_same_bits(ours.detach(), theirs, f"step {step}")
            if before is not None:
                with torch.no_grad():
                    assert not torch.equal(logprobs_of(before, completions), theirs), "the weights are others"
            before = copy.deepcopy(trainer)
            ratio = (ours - theirs).exp()
            assert (ratio == 1).all()
            optimizer.zero_grad()
            (ratio * torch.linspace(-1, 1, GROUP)[:, None]).mean().backward()
            optimizer.step()
            sent = pool.submit(verl_worker.send, list(trainer.named_parameters()), address)
            engine.call("tests.hf.verl_worker:update")
            assert sent.result(timeout=60) > 1
