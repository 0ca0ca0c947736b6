"""Which checkpoints of int8 start: what vLLM reads of their configurations passes, or is refused by name."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.int8_checkpoints import configuration, group
from vllm_batch_invariant.integration import coverage
from vllm_batch_invariant.integration.reviews import patch_points

pytest.importorskip("vllm")
from vllm.model_executor.layers.quantization import get_quantization_config

ROWS = [
    feature for feature in coverage.REFUSED if "uantised weights" in feature.name or "tokens of a step" in feature.name
]
LAYERS = ["Linear"]


def found(config: dict[str, Any], **of_model: Any) -> list[str]:
    """What the rows find in a model of this ``quantization_config``, on a CPU."""
    method = config["quant_method"]
    read = get_quantization_config(method).from_config(json.loads(json.dumps(config)))
    model = SimpleNamespace(**({"quantization": method, "is_moe": False} | of_model))
    device = SimpleNamespace(device_type="cpu")
    alone = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    given = SimpleNamespace(device_config=device, model_config=model, quant_config=read, parallel_config=alone)
    return [what for row in ROWS if (what := row.found(given))]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")


@pytest.mark.parametrize("weights", ["channel", "tensor"])
@pytest.mark.parametrize("activations", ["token", "tensor"])
def test_int8_by_rows_tensors_and_tokens_passes(weights: str, activations: str) -> None:
    assert len(ROWS) == 3
    assert found(configuration(group(LAYERS, weights, activations))) == []
    mixed = configuration(group(["re:.*mlp.*"], weights, activations), group(LAYERS, "channel", "token"))
    assert found(mixed) == []


def changed(part: str, **values: Any) -> dict[str, Any]:
    """A configuration whose second group of layers is another one."""
    other = group(LAYERS, "channel", "token")
    other[part] = (other[part] or other["weights"]) | values
    return configuration(group(["re:.*mlp.*"], "channel", "token"), other)


@pytest.mark.parametrize(
    "config",
    [
        configuration(group(LAYERS, "channel", "token", symmetric=False)),
        configuration(group(LAYERS, "channel", "tensor", symmetric=False)),
        changed("input_activations", strategy="tensor"),
        changed("weights", num_bits=4),
        changed("weights", type="float"),
        changed("weights", strategy="group", group_size=128),
        changed("output_activations"),
        changed("weights") | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "symmetric": True}},
    ],
    ids=lambda config: "",
)
def test_anything_else_is_refused(config: dict[str, Any]) -> None:
    [said] = found(config)
    assert said.startswith("quantisation compressed-tensors with ")


def test_experts_and_other_versions_and_methods_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(group(LAYERS, "channel", "token"))
    [of_experts] = found(config, is_moe=True)
    assert of_experts.endswith("int8 dynamic token activations of a mixture of experts")
    [twice] = found(config, quantization_config=object())
    assert twice.endswith("beside quantisation while loading")
    assert found(config, quantization="quark") == ["quantisation quark"]
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.31.0")
    assert found(config) == ["quantisation compressed-tensors on a CPU with vLLM 0.31.0"]
