"""Every RMSNorm that vLLM builds is the mode's, also those of models that it takes from Transformers."""

import importlib
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant.integration.layers import norm
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.ops.norm import rms_norm

pytest.importorskip("vllm")


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, type]]:
    """Of out-of-tree layers, as a worker leaves it."""
    registered: dict[str, type] = {}
    monkeypatch.setattr(patch_points.CUSTOM_OP.module(), "op_registry_oot", registered)
    norm.install()
    monkeypatch.delitem(sys.modules, norm.OF_TRANSFORMERS, raising=False)
    importlib.import_module(norm.OF_TRANSFORMERS)
    yield registered
    for point in (patch_points.RMS_NORM, patch_points.GEMMA_RMS_NORM):
        del point.get().__init_subclass__  # of the class's own


@pytest.mark.parametrize("name", ["RMSNorm", "GemmaRMSNorm", "TPAwareRMSNorm", "TPAwareGemmaRMSNorm"])
def test_a_norm_has_the_operations_bits(name: str, registry: dict[str, type]) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    module = importlib.import_module(norm.OF_TRANSFORMERS)
    with set_current_vllm_config(VllmConfig()):
        layer = getattr(module, name)(96, eps=1e-6).bfloat16()
    assert type(layer) is registry[name]
    layer.weight.data = torch.randn(96).bfloat16()
    x, residual = torch.randn(5, 96).bfloat16(), torch.randn(5, 96).bfloat16()
    weight = layer.weight.data.float() + 1 if "Gemma" in name else layer.weight.data
    assert_same_bits(layer(x), rms_norm(x, weight, 1e-6))
    for one, other in zip(layer(x, residual.clone()), rms_norm(x, weight, 1e-6, residual.clone()), strict=True):
        assert_same_bits(one, other)


def test_another_subclass_is_left_to_its_author(registry: dict[str, type]) -> None:
    type("Own", (patch_points.RMS_NORM.get(),), {})
    assert "Own" not in registry
