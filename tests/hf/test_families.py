"""Every family with a patch has the logprobs of a real rollout, bit for bit; Hugging Face has others."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.parity import Gap, Sample, of_trainer, plain_logprobs, rollout
from tests.assertions import assert_same_bits
from tests.engine import multimodal
from tests.engine.engines import PATHS, SETTINGS, selected, some_exhaustive
from tests.hf.models import DEVICE, FAMILIES, ON_A_SHARED_GPU, VOCABULARY, model
from vllm_batch_invariant.envs import TP_TREE
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.hf import check_engine, patch
from vllm_batch_invariant.verify.harness.requests import tokens
from vllm_batch_invariant.verify.harness.worker import Engine

pytestmark = pytest.mark.engine

PROMPTS = (1, 45, 257)
QUICK = ("Qwen3-MoE",)
"""What CI has time for, beside Qwen3, of test_parity.py."""
ARGUMENTS = ["--max-model-len", "512", "--skip-tokenizer-init", *ON_A_SHARED_GPU]
KEEP_STATES = ("Qwen3.5", "Nemotron-H", "LFM2, tied")
"""Families whose layers have arithmetic of their own in each dtype."""


@dataclass(frozen=True)
class Rollout:
    """Samples of one engine.

    Attributes:
        declared: what the engine said of itself.
    """

    samples: list[Sample]
    declared: list[dict[str, Any]]


def _roll_out(path: Path, *arguments: str, dtype: str = "bfloat16", **environment: str) -> Rollout:
    arguments = (*ARGUMENTS, "--dtype", dtype, *arguments)
    with Engine(str(path), list(arguments), flag="1", environment=SETTINGS | environment) as engine:
        prompts = (tokens(length, 1, range(16, VOCABULARY)) for length in PROMPTS)
        samples = rollout(engine, prompts, max_tokens=12)
        return Rollout(samples, engine.call("tests.engine.engines:declared"))


@pytest.fixture(scope="module")
def python_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """vLLM's file of Qwen3.5 imports what images need."""
    return os.pathsep.join([*multimodal.python_path(tmp_path_factory.mktemp("path")), PATHS])


@pytest.fixture(scope="module")
def rolled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, python_path: str
) -> Iterator[dict[str, tuple[Path, Future]]]:
    """Every family's checkpoint in an engine of its own, two at a time: most of a start takes one core."""
    with ThreadPoolExecutor(2) as pool:
        found = {}
        for name in selected(request, "name"):
            kind, changed = FAMILIES[name]
            folder = tmp_path_factory.mktemp("checkpoint")
            model(torch.bfloat16, kind, **changed).save_pretrained(folder)
            found[name] = folder, pool.submit(_roll_out, folder, PYTHONPATH=python_path)
        yield found
        pool.shutdown(wait=True, cancel_futures=True)


@pytest.mark.parametrize("name", some_exhaustive(FAMILIES, QUICK))
def test_a_family_has_the_logprobs_of_its_rollout_and_hugging_face_has_others(
    name: str, rolled: dict[str, tuple[Path, Future]]
) -> None:
    path, running = rolled[name]
    rolled_out = running.result()
    samples = rolled_out.samples
    trainer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(DEVICE).eval()
    stock = Gap.of(samples, of_trainer(trainer, samples, plain_logprobs))
    assert stock.different > stock.tokens / 2
    assert stock.kl > 0.0
    patched = patch(trainer)
    check_engine(patched, rolled_out.declared)
    assert_equal(of_trainer(patched, samples), samples)


@pytest.mark.exhaustive
@pytest.mark.skipif(DEVICE == "cuda", reason="gradients of layers with states are a CPU's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", KEEP_STATES)
def test_a_family_with_states_has_them_in_other_dtypes(
    name: str, dtype: torch.dtype, python_path: str, tmp_path: Path
) -> None:
    kind, changed = FAMILIES[name]
    model(dtype, kind, **changed).save_pretrained(tmp_path)
    rolled_out = _roll_out(tmp_path, dtype=str(dtype).removeprefix("torch."), PYTHONPATH=python_path)
    trainer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    assert Gap.of(rolled_out.samples, of_trainer(trainer, rolled_out.samples, plain_logprobs)).kl != 0.0
    check_engine(patch(trainer), rolled_out.declared)
    assert_equal(of_trainer(trainer, rolled_out.samples), rolled_out.samples)


def assert_equal(logprobs: list[torch.Tensor], samples: list[Sample]) -> None:
    for ours, sample in zip(logprobs, samples, strict=True):
        assert_same_bits(ours, sample.logprobs, f"prompt of {sample.prompt}")


@pytest.mark.skipif(DEVICE == "cuda", reason="a trainer has a tree on a CPU only")
@pytest.mark.exhaustive
def test_with_a_tree_an_unsharded_trainer_has_the_logprobs_of_two_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, changed = FAMILIES["Llama with biases and its rotary scaling, tied"]
    model(torch.bfloat16, kind, **changed).save_pretrained(tmp_path)
    tree, cores = {TP_TREE.name: "2"}, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    rolled_out = _roll_out(tmp_path, "--tensor-parallel-size=2", **tree, **cores)
    without = patch(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    assert Gap.of(rolled_out.samples, of_trainer(without, rolled_out.samples)).different > 0
    with pytest.raises(NotCovered, match="tensor_parallel_tree 2 beside a trainer with tensor_parallel_tree unset"):
        check_engine(without, rolled_out.declared)
    monkeypatch.setenv(TP_TREE.name, "2")
    trainer = patch(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    check_engine(trainer, rolled_out.declared)
    assert_equal(of_trainer(trainer, rolled_out.samples), rolled_out.samples)
