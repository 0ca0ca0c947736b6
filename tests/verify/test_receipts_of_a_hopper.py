"""Receipts that an H200 has made while it served, in its usual arithmetic, are computed again on any CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.hopper_receipts import MODELS, SAMPLINGS, save_model
from vllm_batch_invariant.verify.receipt.model_files import model_at
from vllm_batch_invariant.verify.receipt.recompute import recompute
from vllm_batch_invariant.verify.receipt.record import Receipt

MADE = Path(__file__).with_name("receipts_of_h200")
"""By ``scripts.hopper_receipts``, with vLLM 0.33, without what layers made."""
NAMES = [f"{model}-{sampling}" for model in MODELS for sampling in SAMPLINGS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(tmp_path_factory.mktemp(name), name) for name in MODELS}


def receipt(name: str) -> Receipt:
    return Receipt.load(MADE / f"{name}.json")


@pytest.mark.parametrize("name", NAMES)
def test_every_bit_of_an_engine_on_a_gpu_is_computed_again(name: str, models: dict[str, Path]) -> None:
    made = receipt(name)
    assert made.environment.device["name"] == "NVIDIA H200"
    verdict = recompute(made, str(models[name.rpartition("-")[0]]))
    assert verdict, verdict
    assert verdict.promised


def test_a_bit_of_a_logprob_is_found_at_its_token(models: dict[str, Path]) -> None:
    made = receipt("qwen3-greedy")
    bits = made.completion.logprobs
    changed = (*bits[:-1], f"{int(bits[-1], 16) ^ 1:08x}")
    verdict = recompute(replace(made, completion=replace(made.completion, logprobs=changed)), str(models["qwen3"]))
    assert not verdict
    assert verdict.difference.position == len(bits) - 1


def test_a_bit_of_a_weight_is_found(models: dict[str, Path], tmp_path: Path) -> None:
    """With the digest of the other files: whoever made them says that they are the model."""
    made = receipt("llama-greedy")
    (tmp_path / "config.json").write_bytes((models["llama"] / "config.json").read_bytes())
    weights = load_file(models["llama"] / "model.safetensors")
    weight = weights["model.layers.0.mlp.down_proj.weight"]
    weight.view(torch.int16)[0, 0] ^= 1 << 6
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    verdict = recompute(replace(made, model=model_at(tmp_path, "llama")), str(tmp_path))
    assert not verdict
    assert verdict.difference
