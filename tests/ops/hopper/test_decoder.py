"""A whole model in a Hopper's arithmetic: near Hugging Face's, by the plain definition and the fast one alike."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from scripts.hopper_receipts import save_model
from tests.ops.exact.families import FAMILIES, save
from tests.ops.hopper.cases import same
from tests.ops.hopper.test_definition import ideal
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.exact import known_answers
from vllm_batch_invariant.ops.hopper.decoder import FP8_BLOCKS, PLAIN, HopperDecoder, fast
from vllm_batch_invariant.verify.quantised_model import CHECKPOINT_FORMATS, quantise
from vllm_batch_invariant.verify.receipt.hopper import Hopper
from vllm_batch_invariant.verify.receipt.recompute import config_of, weights_of

TOKENS = np.random.default_rng(0).integers(3, 4096, 90).tolist()
FEW = 12
"""Whose bits do not follow those behind them."""
DEFINED = (
    "Llama with scaled angles and tied embeddings",
    "Llama with biases",
    "Qwen2 with biases and a window that it does not use",
    "Mistral with a window",
    "Gemma",
    "Gemma 2 with soft caps and a window in the first layer",
    "Gemma 3 with a window and angles of its own in the first layer",
)
WITH_EXPERTS = ("Qwen3-MoE with a dense layer",)


def decoder(folder: Path, **how: object) -> HopperDecoder:
    return HopperDecoder(config_of(folder), weights_of(folder, Hopper.dtypes), ideal(), **how)


@pytest.mark.parametrize("family", DEFINED)
def test_logits_are_near_those_of_hugging_faces_model(family: str, tmp_path: Path) -> None:
    made = save(FAMILIES[family], tmp_path).float().eval()
    found = decoder(tmp_path, kernels=fast()).logits(TOKENS)
    with torch.no_grad():
        right = made(torch.tensor([TOKENS])).logits[0].double().numpy()
    assert np.linalg.norm(found - right) / np.linalg.norm(right) < 0.02
    assert same(found[:FEW], decoder(tmp_path, kernels=PLAIN).logits(TOKENS[:FEW]))
    assert not same(found, decoder(tmp_path, k_slices=4).logits(TOKENS))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in DEFINED + WITH_EXPERTS])
def test_a_family_without_a_definition_is_refused(family: str, tmp_path: Path) -> None:
    save(FAMILIES[family], tmp_path)
    with pytest.raises(NotCovered, match="the usual arithmetic of a Hopper"):
        decoder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head_dim": 96}, "heads of 96"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "type yarn"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"quantization_config": FP8_BLOCKS | {"scale_fmt": "ue8m0"}}, "that are no FP8"),
        ({"hidden_size": 20_000}, "rows of 20000"),
    ],
)
def test_a_configuration_without_a_definition_is_refused(changes: dict, said: str) -> None:
    config, _ = known_answers.checkpoint()
    with pytest.raises(NotCovered, match=said):
        HopperDecoder(config | changes, {}, ideal())


@pytest.mark.parametrize("name", ["qwen3-fp8", "llama-fp8"])
def test_codes_are_near_the_matrices_that_they_stand_for(name: str, tmp_path: Path) -> None:
    """And each row has its own: what is quantised does not follow from the rows beside it."""
    plain = save_model(tmp_path / name, name.removesuffix("-fp8"))
    shutil.copytree(plain, packed := tmp_path / "packed")
    quantise(packed, "w8a8-fp8-block", tmp_path / "unpacked")
    found, right = (decoder(folder).logits(TOKENS) for folder in (packed, tmp_path / "unpacked"))
    assert 0.01 < np.linalg.norm(found - right) / np.linalg.norm(right) < 0.15
    assert same(found[:FEW], decoder(packed).logits(TOKENS[:FEW]))
    with pytest.raises(NotCovered, match="a tree of products of codes"):
        decoder(packed, k_slices=2).logits(TOKENS[:FEW])


@pytest.mark.parametrize("form", ["w8a8-fp8-block-ct", "w8a8-fp8-tensor", "w4a16-g128"])
def test_other_quantised_weights_are_refused(form: str, tmp_path: Path) -> None:
    config, _ = known_answers.checkpoint()
    config |= {"quantization_config": CHECKPOINT_FORMATS[form].config}
    with pytest.raises(NotCovered, match="quantised weights of"):
        HopperDecoder(config, {}, ideal())


def test_a_mixture_of_experts_is_near_hugging_faces_model(tmp_path: Path) -> None:
    """But for tokens of which another expert is chosen, by scores that differ in their last bits."""
    save_model(tmp_path, "qwen3-moe")
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    found = decoder(tmp_path, kernels=fast()).logits(TOKENS)
    with torch.no_grad():
        right = made(torch.tensor([TOKENS])).logits[0].numpy()
    errors = np.linalg.norm(found - right, axis=1) / np.linalg.norm(right, axis=1)
    assert np.median(errors) < 0.03
    assert same(found[:FEW], decoder(tmp_path, kernels=PLAIN).logits(TOKENS[:FEW]))
