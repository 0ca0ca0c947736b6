"""What layers with states are told of a step, and what vLLM does for their models beside calling them."""

from types import SimpleNamespace

import pytest

from tests.integration.test_layers import bare
from vllm_batch_invariant.integration.layers import delta_rule, state_backend
from vllm_batch_invariant.integration.reviews import patch_points

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
