"""Whole models by the definition: near Hugging Face's, whatever name a configuration has for a thing."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.ops.exact.families import FAMILIES, save
from vllm_batch_invariant.ops.exact import MODELS, problem_of
from vllm_batch_invariant.ops.exact.decoder import Decoder
from vllm_batch_invariant.verify.receipt.recompute import decoder_of

TOKENS = np.random.default_rng(0).integers(3, 4096, 90).tolist()
"""More than the windows' 48."""
FEW = TOKENS[:56]
"""Still more than they."""


def distance(got: np.ndarray, right: np.ndarray) -> float:
    return float(np.linalg.norm(got - right) / np.linalg.norm(right))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_near_those_of_hugging_faces_model(family: str, tmp_path: Path) -> None:
    made = save(FAMILIES[family], tmp_path).float().eval()
    with torch.no_grad():
        right = made(torch.tensor([TOKENS])).logits[0].double().numpy()
    assert distance(decoder_of(tmp_path).logits(TOKENS), right) < 0.02


def family(start: str) -> str:
    [name] = [name for name in FAMILIES if name.startswith(start)]
    return name


Unchanged = Callable[[str], tuple[Decoder, np.ndarray]]


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Unchanged:
    """The model of a family, and its logits."""

    @cache
    def made(start: str) -> tuple[Decoder, np.ndarray]:
        folder = tmp_path_factory.mktemp("family")
        save(FAMILIES[family(start)], folder)
        decoder = decoder_of(folder)
        return decoder, decoder.logits(FEW)

    return made


@pytest.mark.parametrize(
    ("start", "changes"),
    [
        ("Mistral", {"sliding_window": None}),
        ("Gemma 2", {"sliding_window": None}),
        ("Gemma 2", {"attn_logit_softcapping": None}),
        ("Gemma 2", {"final_logit_softcapping": None}),
        ("Gemma 2", {"query_pre_attn_scalar": 64}),
        ("Gemma 2", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("Gemma 3", {"sliding_window": 49}),
        ("Gemma 3", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}),
        ("Gemma 3", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}}}),
        ("Gemma 3", {"tie_word_embeddings": True}),
        ("Granite", {"embedding_multiplier": 1.0}),
        ("Granite", {"residual_multiplier": 1.0}),
        ("Granite", {"attention_multiplier": 0.125}),
        ("Granite", {"logits_scaling": 1.0}),
        ("Phi-3", {"sliding_window": None}),
    ],
)
def test_each_number_of_a_configuration_is_used(start: str, changes: dict[str, Any], unchanged: Unchanged) -> None:
    decoder, logits = unchanged(start)
    assert not np.array_equal(logits, Decoder(decoder.config | changes, decoder._weights).logits(FEW))


def test_older_names_in_a_configuration_say_the_same(tmp_path: Path) -> None:
    """Those of Gemma 2's and Gemma 3's first checkpoints, which leave out what was usual."""
    save(FAMILIES[family("Gemma 3")], tmp_path)
    decoder = decoder_of(tmp_path)
    older = {name: value for name, value in decoder.config.items() if name not in ("layer_types", "rope_parameters")}
    older |= {"rope_theta": 1e6, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window_pattern": 2}
    read = transformers.Gemma3TextConfig(**older)
    assert read.layer_types == decoder.config["layer_types"]
    assert read.rope_parameters == decoder.config["rope_parameters"]
    assert np.array_equal(Decoder(older, decoder._weights).logits(TOKENS), decoder.logits(TOKENS))
    least = {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4, "num_attention_heads": 8}
    usual = transformers.Gemma2Config(num_hidden_layers=4)
    found = Decoder(least | {"hidden_size": 2304}, {})
    assert found._layer_types == usual.layer_types
    for name in MODELS["Gemma2ForCausalLM"].usual:
        assert found._get(name) == getattr(usual, name), name
    for name, value in MODELS["Gemma3ForCausalLM"].usual.items():
        assert name.startswith("rope") or getattr(transformers.Gemma3TextConfig(), name) == value, name


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_server_reads_of_a_configuration_is_defined(name: str) -> None:
    config = FAMILIES[name]
    [model] = [
        one
        for one in MODELS
        if one.removesuffix("ForCausalLM") == type(config).__name__.split("Text")[0].removesuffix("Config")
    ]
    assert problem_of(model, lambda key, default: getattr(config, key, default)) is None


@pytest.mark.parametrize(
    ("model", "config", "problem"),
    [
        ("OPTForCausalLM", transformers.OPTConfig(), "the model OPTForCausalLM"),
        ("GemmaForCausalLM", transformers.GemmaConfig(hidden_activation="gelu"), "the activation gelu"),
        ("LlamaForCausalLM", transformers.LlamaConfig(hidden_act="gelu"), "the activation gelu"),
        ("Qwen2ForCausalLM", transformers.Qwen2Config(use_sliding_window=True), "sliding windows of a Qwen"),
        (
            "Gemma3ForCausalLM",
            transformers.Gemma3TextConfig(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
            "a rotary embedding of type yarn",
        ),
        (
            "Phi3ForCausalLM",
            transformers.Phi3Config(partial_rotary_factor=0.5),
            "a rotary embedding of a part of a head",
        ),
        (
            "GraniteForCausalLM",
            transformers.GraniteConfig(num_hidden_layers=1, layer_types=["sliding_attention"]),
            "windows, angles and sinks of single layers of a Granite",
        ),
    ],
)
def test_what_is_not_defined_is_named(model: str, config: transformers.PretrainedConfig, problem: str) -> None:
    assert problem_of(model, lambda key, default: getattr(config, key, default)) == problem
