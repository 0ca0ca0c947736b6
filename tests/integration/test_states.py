"""What layers with states are told of a step, and what vLLM does for their models beside calling them."""

from types import SimpleNamespace

import pytest
import torch

from tests.integration.test_layers import bare
from vllm_batch_invariant.integration.layers import delta_rule, mamba2, state_backend
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.ops.delta_rule import DeltaRuleReduction

NEEDED = (patch_points.DELTA_RULE_WARMUP, patch_points.GATED_ATTENTION, patch_points.DELTA_RULE)
if not all(point.is_there() for point in NEEDED):
    pytest.skip("this vLLM has no gated delta rules", allow_module_level=True)


@pytest.mark.parametrize(
    ("told", "expected"), [(None, None), ({"another": "step"}, None), ({"another": "step", "layer": "its"}, "its")]
)
def test_a_layer_without_states_computes_nothing_of_a_step(
    told: object, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM measures memory with steps that nobody is told of, and compiles attention with steps that it alone is."""
    monkeypatch.setattr(
        patch_points.FORWARD_CONTEXT.module(),
        patch_points.FORWARD_CONTEXT.attribute,
        lambda: SimpleNamespace(attn_metadata=told),
    )
    assert state_backend.step_of_layer("layer") == expected


def test_on_a_gpu_vllm_neither_warms_up_its_rules_nor_joins_what_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, warmup = patch_points.GATED_ATTENTION.get(), patch_points.DELTA_RULE_WARMUP
    monkeypatch.setattr(attention, "use_fused_qk_norm_rope_gate", None, raising=False)
    monkeypatch.setattr(warmup.module(), warmup.attribute, lambda *_: pytest.fail("it compiles vLLM's kernels"))
    delta_rule.install_cuda()
    warmup.get()("runner", "configuration of the model")
    assert bare(attention, use_fused_qk_norm_rope_gate=True).use_fused_qk_norm_rope_gate is False


def test_layers_of_one_shape_are_compared_once_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = pytest.importorskip("vllm_batch_invariant.ops.delta_rule.certificate")
    compared: list[tuple[object, ...]] = []
    monkeypatch.setattr(certificate, "certify", lambda *given: compared.append(given))

    def layer(value_heads: int) -> torch.nn.Module:
        convolution = SimpleNamespace(weight=torch.zeros(1))
        sizes = {"num_k_heads": 4, "num_v_heads": value_heads, "head_k_dim": 128, "head_v_dim": 64}
        return bare(
            patch_points.DELTA_RULE.get(),
            **sizes,
            tp_size=2,
            conv_kernel_size=4,
            num_spec=3,
            conv1d=convolution,
            model_config=SimpleNamespace(dtype=torch.bfloat16),
        )

    layers = torch.nn.ModuleList([layer(8), torch.nn.Linear(1, 1), layer(8), layer(16)])
    for of_layers in (delta_rule.RECURRENCE, mamba2.RECURRENCE):
        of_layers.certify(layers)
    reduction = DeltaRuleReduction.of(128, 64, torch.bfloat16)
    assert compared == [(2, heads, reduction, 3, torch.device("cpu")) for heads in (4, 8)]
