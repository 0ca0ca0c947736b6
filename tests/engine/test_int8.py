"""An engine of int8 weights and activations gives a request the same tokens and logprobs with any others."""

from typing import Any

import pytest
import torch

from tests.engine.engines import EAGER_ON_GPU, OF_DEVICE, UNTRIED_THERE, Result, request, run, tokens
from tests.engine.plans import alone_and_among, moved
from tests.int8_checkpoints import write
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.worker import Engine

pytestmark = pytest.mark.engine
ON_GPU = torch.cuda.is_available()

if not patch_points.INT8_KERNELS.is_there():
    pytest.skip("int8 is refused with this vLLM", allow_module_level=True)


def afterwards(running: Engine) -> dict[str, Any]:
    """A long prompt in chunks, and again from the cache; and which of other requests move one where all rows of a step
    have one scale.
    """
    long = tokens(300, 3)
    asked = {"cold": request(long, max_tokens=8, prompt_logprobs=2), "cached": request(long, max_tokens=8)}
    found: dict[str, Any] = {name: running.step(name, [one]).requests[0] for name, one in asked.items()}
    running.call("tests.engine.quantisers:one_scale_a_tensor")
    steps = alone_and_among([request(tokens(40, 5), max_tokens=6)])
    answers = {step["name"]: running.step(**step).requests[0]["completions"] for step in steps}
    return found | {"moved": [name for name, answer in answers.items() if answer != answers["alone 0"]]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Attention is given activations of one scale for all tokens, MLPs of one a token."""
    folder = tmp_path_factory.mktemp("int8")
    plain = make_checkpoint(folder / "plain", Shape(hidden=256, intermediate=512, layers=2, max_length=1024))
    return str(write(plain, folder / "int8"))


def served(checkpoint: str, workers: int = 1, **variables: str) -> Result:
    """What an engine answered that prefills in chunks of 64 tokens."""
    engine = {"model": checkpoint, "skip_tokenizer_init": True, "tensor_parallel_size": workers}
    limits = {"max_model_len": 1024, "max_num_batched_tokens": 64, "max_num_seqs": 64}
    settings = engine | limits | OF_DEVICE | EAGER_ON_GPU
    return run(settings, alone_and_among(), "1", afterwards=afterwards, **variables)


@pytest.fixture(scope="module")
def done(checkpoint: str) -> Result:
    return served(checkpoint)


def test_a_request_has_the_same_bits_alone_and_among_others_and_from_a_warm_cache(done: Result) -> None:
    assert moved(done) == []


def test_a_prompt_in_chunks_has_the_bits_of_one_whose_beginning_is_cached(done: Result) -> None:
    cold, cached = done.afterwards["cold"], done.afterwards["cached"]
    assert cold["cached"] == 0
    assert cached["cached"] >= 128
    assert cached["completions"] == cold["completions"]
    assert len(cold["prompt_logprobs"]) == 300


def test_the_layers_are_computed_by_ours(done: Result) -> None:
    assert "Selected BatchInvariantInt8Kernel for CompressedTensorsW8A8Int8" in done.log


def test_one_scale_of_all_rows_of_a_step_is_found(done: Result) -> None:
    assert done.afterwards["moved"] == ["among 1", "among 3", "among 17", "among 40"]


@pytest.mark.exhaustive
@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_workers_leave_a_request_its_bits(checkpoint: str) -> None:
    assert moved(served(checkpoint, 2, VLLM_CPU_OMP_THREADS_BIND="0|1", **UNTRIED_THERE)) == []
