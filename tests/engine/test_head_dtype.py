"""An engine whose output head is in fp32, as trainers have it, gives a request the same tokens and logprobs with any
others.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.engine.engines import EAGER_ON_GPU, OF_DEVICE, UNTRIED_THERE, Result, request, run, tokens
from tests.engine.plans import GREEDY, alone_and_among, moved
from vllm_batch_invariant import batch_invariant_mode
from vllm_batch_invariant.hf import patch, token_logprobs
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.worker import Engine

pytestmark = pytest.mark.engine
ON_GPU = torch.cuda.is_available()
FLOAT32 = {"hf_overrides": json.dumps({"head_dtype": "float32"})}
SHAPE = Shape(hidden=256, intermediate=512, layers=2, max_length=1024)

if not hasattr(patch_points.LOGITS_PROCESSOR.get(), "_apply_head"):
    pytest.skip("this vLLM has no such head", allow_module_level=True)


def afterwards(running: Engine) -> dict[str, Any]:
    """A long prompt in chunks, and again from the cache, and which of other requests a planted fault moves."""
    long = tokens(300, 3)
    asked = {"cold": request(long, max_tokens=8, prompt_logprobs=2), "cached": request(long, max_tokens=8)}
    found: dict[str, Any] = {name: running.step(name, [one]).requests[0] for name, one in asked.items()}
    running.call("tests.engine.head:in_two_parts_for_many_rows")
    answers = {step["name"]: running.step(**step).requests[0]["completions"] for step in alone_and_among()}
    return found | {"moved": [name for name, answer in answers.items() if answer != answers["alone 0"]]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("head") / "model", SHAPE))


def served(checkpoint: str, flag: str = "1", **more: Any) -> Result:
    """What an engine answered that prefills in chunks of 64 tokens."""
    variables = more.pop("variables", {})
    limits = {"max_model_len": 1024, "max_num_batched_tokens": 64, "max_num_seqs": 64, "skip_tokenizer_init": True}
    settings = {"model": checkpoint, **limits, **OF_DEVICE, **EAGER_ON_GPU, **FLOAT32, **more}
    then = {"afterwards": afterwards} if flag == "1" and not more else {}
    steps = alone_and_among() if flag == "1" else alone_and_among(GREEDY)  # plain vLLM has no seeds of fp32 there
    return run(settings, steps, flag, **then, **UNTRIED_THERE, **variables)


def beside_a_grid(done: Result) -> np.ndarray:
    """How far the distances of listed logprobs are from multiples of 2^-12, of which those of logits in bf16 are."""
    listed = done.completions("alone 0")[0]["logprobs"]
    values = [[float.fromhex(bits) for _, bits, _ in position] for position in listed]
    apart = np.concatenate([np.diff(sorted(one)) for one in values])
    return np.abs(apart - np.round(apart * 4096) / 4096)


@pytest.fixture(scope="module")
def done(checkpoint: str) -> Result:
    return served(checkpoint)


def test_a_request_has_the_same_bits_alone_and_among_others_and_from_a_warm_cache(done: Result) -> None:
    assert moved(done) == []
    cold, cached = done.afterwards["cold"], done.afterwards["cached"]
    assert cold["cached"] == 0 < cached["cached"]
    assert cached["completions"] == cold["completions"]
    assert len(cold["prompt_logprobs"]) == 300


def test_sums_that_follow_the_number_of_rows_show(done: Result) -> None:
    assert done.afterwards["moved"]


@pytest.mark.exhaustive
def test_logits_are_not_rounded_to_the_dtype_of_the_model(checkpoint: str, done: Result) -> None:
    """Logprobs of two candidates are as far apart as their logits, which in bf16 have few bits."""
    rounded = served(checkpoint, hf_overrides="{}")
    assert moved(rounded) == []
    assert np.median(beside_a_grid(rounded)) < 5e-6
    assert np.median(beside_a_grid(done)) > 2e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_keep_their_bits(checkpoint: str, dtype: str) -> None:
    assert moved(served(checkpoint, dtype=dtype)) == []


@pytest.mark.exhaustive
def test_embeddings_that_are_the_head_keep_their_bits(tmp_path: Path) -> None:
    """LFM2's are."""
    tied = make_checkpoint(tmp_path / "tied", replace(SHAPE, hybrid="conv"))
    assert moved(served(str(tied))) == []


@pytest.mark.exhaustive
@pytest.mark.skipif(ON_GPU, reason="there products of bf16 are added, and a trainer's are of fp32")
def test_a_trainer_whose_head_multiplies_in_fp32_has_the_engines_logprobs(checkpoint: str, done: Result) -> None:
    trainer, given = patch(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)), tokens(300, 3)
    listed = zip(done.afterwards["cold"]["prompt_logprobs"][1:], given[1:], strict=True)
    engines = [float.fromhex({one: bits for one, bits, _ in every}[token]) for every, token in listed]
    with torch.no_grad():
        hidden = trainer.model(torch.tensor([given])).last_hidden_state.float()
        with batch_invariant_mode():
            ours = F.linear(hidden, trainer.lm_head.weight.float())
        other = F.linear(hidden, trainer.lm_head.weight.float())
    found = [
        token_logprobs(logits[:, :-1], torch.tensor([given[1:]]))[0].tolist() == engines for logits in (ours, other)
    ]
    assert found == [True, False]


@pytest.mark.exhaustive
def test_drafts_leave_answers_alone(checkpoint: str, done: Result) -> None:
    drafter = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    drafted = served(checkpoint, speculative_config=json.dumps(drafter))
    assert moved(drafted) == []
    alone = [name for name in done.steps if name.startswith("alone")]
    assert [name for name in alone if drafted.completions(name) != done.completions(name)] == []


@pytest.mark.exhaustive
@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_workers_leave_a_request_its_bits(checkpoint: str) -> None:
    assert moved(served(checkpoint, tensor_parallel_size=2, variables={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})) == []


@pytest.mark.exhaustive
def test_plain_vllm_moves_bits(checkpoint: str) -> None:
    assert moved(served(checkpoint, "0"))
