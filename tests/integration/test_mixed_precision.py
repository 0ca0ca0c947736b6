"""Checkpoints of ModelOpt whose layers have several formats: the gate reads each, and a layer of which vLLM would guess
it is refused.
"""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integration.test_schemes import found as found_of_rows
from vllm_batch_invariant.envs import UNTRIED
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration import coverage
from vllm_batch_invariant.integration.layers import mixed_precision
from vllm_batch_invariant.integration.reviews import patch_points, schemes

pytest.importorskip("vllm")
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM

FOUR, EIGHT, WEIGHTS_ALONE = (
    {"quant_algo": "NVFP4", "group_size": 16},
    {"quant_algo": "FP8"},
    {"quant_algo": "W4A16_NVFP4"},
)
CACHE = {"num_bits": 8, "type": "float", "dynamic": False}
EXPERTS = "backbone.layers.1.mixer.experts"
LAYERS = {
    "backbone.layers.0.mixer.in_proj": EIGHT,
    "backbone.layers.1.mixer.experts.0.up_proj": FOUR,
    "backbone.layers.1.mixer.experts.1.up_proj": FOUR,
    "backbone.layers.1.mixer.shared_experts.up_proj": EIGHT,
}
"""As of Nemotron 3 Super."""


def config_of(layers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
        "ignore": [],
    } | more


def found(layers: dict[str, Any], device: str = "cpu", **more: Any) -> list[str]:
    of_model = {"quantization": schemes.MIXED, "is_moe": more.pop("is_moe", False), "workers": more.pop("workers", 1)}
    return found_of_rows(config_of(layers, **more), device, **of_model)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")


@pytest.mark.parametrize("is_moe", [False, True])
def test_fp8_and_both_kinds_of_nvfp4_pass_together(is_moe: bool) -> None:
    """Also in lower case, as vLLM reads it, with fields that say nothing, and with a KV cache in FP8."""
    lower = {"quant_algo": "nvfp4", "group_size": 16, "has_zero_point": False, "pre_quant_scale": False}
    for layers in (LAYERS, {"a": EIGHT, "b": WEIGHTS_ALONE}, {"a": lower, "b": {"quant_algo": "fp8"}}, {"a": FOUR}):
        assert found(layers, is_moe=is_moe) == []
        assert found(layers, is_moe=is_moe, kv_cache_scheme=CACHE) == []
    of = {"quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS, "kv_cache_quant_algo": "NVFP4"}
    read = get_quantization_config(schemes.MIXED).from_config({"quantization": of})
    said = schemes.refused(SimpleNamespace(quantization=schemes.MIXED, is_moe=False), read)
    assert said == "quantisation modelopt_mixed with this scheme for the KV cache"


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"quant_algo": "MXFP8"}, "with b in MXFP8"),
        ({"quant_algo": "FP8_PB_WO"}, "with b in FP8_PB_WO"),
        ({"quant_algo": "W4A16_AWQ", "group_size": 128}, "with b in W4A16_AWQ"),
        ({}, "with b in no algorithm"),
        (FOUR | {"pre_quant_scale": True}, "with pre_quant_scale True of b"),
        (EIGHT | {"group_size": 128}, "with group_size 128 of b"),
        (EIGHT | {"rotation": "hadamard"}, "with rotation hadamard of b"),
    ],
)
def test_what_is_not_known_of_one_layer_is_named(recipe: dict[str, Any], said: str) -> None:
    """Of vLLM a linear layer of an unknown algorithm would be one of 16 bits."""
    assert found({"a": EIGHT, "b": recipe}) == [f"quantisation modelopt_mixed {said}"]


def test_groups_are_those_of_all_layers() -> None:
    """vLLM takes those of the first layer that has some, or of the whole."""
    for layers, more in (({"a": FOUR, "b": FOUR | {"group_size": 32}}, {}), ({"a": FOUR}, {"group_size": 32})):
        [said] = found(layers, **more)
        assert "(one scale a tensor_group 32)" in said


def test_it_is_covered_where_each_kind_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """So on GPUs, but by two of experts in FP8."""
    read = get_quantization_config(schemes.MIXED).from_config(json.loads(json.dumps(config_of(LAYERS))))
    model = SimpleNamespace(quantization=schemes.MIXED, is_moe=True)
    eight, four = schemes.kinds(model, read)
    assert {eight, four} <= {*coverage.RAN.mamba2_quantised_experts["cpu"]}
    assert schemes.of_activations(model, read) == (eight,)
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    assert found(LAYERS, "cuda", is_moe=True) == found(LAYERS, "cuda", workers=2) == []
    [refused] = found(LAYERS, "cuda", is_moe=True, workers=2)
    assert refused == f"quantisation modelopt_mixed on a GPU of {eight} by several GPUs"
    monkeypatch.setenv(UNTRIED.name, "1")
    assert found(LAYERS, "cuda", is_moe=True, workers=2) == []


class Experts(torch.nn.Module):
    """Stands for experts of vLLM's."""


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Chooses the method of a layer, as ours does, from ``quantized_layers`` and ``ignore``."""
    point = patch_points.ROUTED_EXPERTS
    monkeypatch.setattr(point.module(), point.attribute, Experts)

    def chosen(kind: type, prefix: str, layers: dict[str, Any], ignore: tuple[str, ...] = ()) -> Any:
        config = get_quantization_config(schemes.MIXED).from_config(config_of(layers, ignore=[*ignore]))
        config.packed_modules_mapping = NemotronHForCausalLM.packed_modules_mapping
        config.apply_vllm_mapper(NemotronHForCausalLM.hf_to_vllm_mapper.get_rename_mapper())

        def of_vllm(config: Any, layer: Any, prefix: str) -> Any:
            if config.is_layer_excluded(prefix):
                return UnquantizedLinearMethod()
            return None if kind is VocabParallelEmbedding else config._resolve_quant_algo(prefix)

        check = mixed_precision.checked(of_vllm, lambda method: isinstance(method, UnquantizedLinearMethod))
        return check(config, kind.__new__(kind), prefix)

    yield chosen


QKV = {f"backbone.layers.2.mixer.{name}_proj": EIGHT for name in "qkv"}


def test_each_layer_has_its_own_format(choose: Any) -> None:
    assert choose(LinearBase, "model.layers.0.mixer.in_proj", LAYERS) == "FP8"
    assert choose(Experts, "model.layers.1.mixer.experts", LAYERS) == "NVFP4"
    assert choose(LinearBase, "model.layers.1.mixer.shared_experts.up_proj", LAYERS) == "FP8"
    assert choose(LinearBase, "model.layers.2.mixer.qkv_proj", QKV) == "FP8"
    assert choose(LinearBase, "model.layers.2.mixer.o_proj", QKV) is None
    kept = choose(LinearBase, "model.layers.2.mixer.o_proj", QKV, ("backbone.layers.2.mixer.o_proj",))
    assert isinstance(kept, UnquantizedLinearMethod)
    assert choose(VocabParallelEmbedding, "model.embed_tokens", LAYERS) is None
    assert choose(LinearBase, "lm_head", {"lm_head": FOUR}) == "NVFP4"


@pytest.mark.parametrize(
    ("kind", "prefix", "layers", "ignore", "said"),
    [
        (
            *(LinearBase, "model.layers.2.mixer.qkv_proj", QKV | {"backbone.layers.2.mixer.v_proj": FOUR}, ()),
            "of parts in several formats, k_proj in FP8 and v_proj in NVFP4",
        ),
        (
            *(LinearBase, "model.layers.2.mixer.qkv_proj", {"backbone.layers.2.mixer.q_proj": EIGHT}, ()),
            "of parts in several formats, q_proj in FP8 and v_proj in 16 bits",
        ),
        (
            *(
                Experts,
                "model.layers.1.mixer.experts",
                LAYERS | {f"{EXPERTS}.1.up_proj": EIGHT},
                (),
            ),
            "in several formats, model.layers.1.mixer.experts.0.up_proj in NVFP4 and model.layers.1.mixer.experts.1",
        ),
        (
            *(Experts, "model.layers.1.mixer.experts", {"backbone.layers.1.mixer.shared_experts.up_proj": EIGHT}, ()),
            "quantised, of which quantized_layers says nothing",
        ),
        (
            *(LinearBase, "model.layers.0.mixer.in_proj", LAYERS, ("backbone.layers.0.mixer*",)),
            "in 16 bits that quantized_layers has in FP8",
        ),
        (
            *(VocabParallelEmbedding, "model.embed_tokens", {"backbone.embeddings": FOUR}, ()),
            "in 16 bits that quantized_layers has in NVFP4",
        ),
    ],
)
def test_a_layer_of_which_vllm_would_guess_the_format_is_refused(
    choose: Any, kind: type, prefix: str, layers: dict[str, Any], ignore: tuple[str, ...], said: str
) -> None:
    with pytest.raises(NotCovered) as refused:
        choose(kind, prefix, layers, ignore)
    assert said in str(refused.value)
    assert str(refused.value).count("\n") == 0
