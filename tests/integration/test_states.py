"""What layers with states are told of a step, and what vLLM does for their models beside calling them."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integration.test_layers import bare
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.layers import delta_rule, mamba2, state_backend, state_pages
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
        sizes = {"num_k_heads": 4, "num_v_heads": value_heads, "head_k_dim": 128, "head_v_dim": 64}
        return bare(
            patch_points.DELTA_RULE.get(),
            **sizes,
            tp_size=2,
            conv_kernel_size=4,
            num_spec=3,
            A_log=torch.nn.Parameter(torch.zeros(1)),
            model_config=SimpleNamespace(dtype=torch.bfloat16),
        )

    layers = torch.nn.ModuleList([layer(8), torch.nn.Linear(1, 1), layer(8), layer(16)])
    for of_layers in (delta_rule.RECURRENCE, mamba2.RECURRENCE):
        of_layers.certify(layers)
    reduction = DeltaRuleReduction.of(128, 64, torch.bfloat16)
    assert compared == [(2, heads, reduction, 3, torch.device("cpu")) for heads in (4, 8)]


PAGE = 16
STEPS = {
    "drafts over the end of a page, of which one is accepted behind it": (14, 6, 5, 3, True),
    "the last token of a page, whose drafts are rejected": (15, 6, 5, 1, True),
    "drafts over the end of a page, rejected before it": (13, 6, 5, 2, False),
    "drafts within a page": (16, 6, 5, 6, False),
    "the last token of a page without drafts": (15, 1, 0, 1, False),
    "a chunk of a prompt that ends with a page": (0, 16, 0, 1, False),
}
"""Tokens before a step, of it, drafts among them, tokens that it gave, and whether others find what it wrote."""


@pytest.mark.parametrize("name", STEPS)
def test_a_page_that_accepted_tokens_have_filled_has_the_state_of_the_step(name: str) -> None:
    """Beside a request in other pages."""
    computed, scheduled, drafts, accepted, copied = STEPS[name]
    written = (computed + scheduled - 1) // PAGE

    def staged(*values: int) -> Any:
        return SimpleNamespace(cpu=torch.tensor([*values, -1], dtype=torch.int32))

    step = SimpleNamespace(
        num_computed_tokens_buf=staged(5, computed),
        num_scheduled_tokens_buf=staged(1, scheduled),
        num_draft_tokens_buf=staged(0, drafts),
        mamba_state_idx_buf=staged(0, written),
        mamba_group_ids=[1],
        block_size=PAGE,
    )
    states, given = torch.arange(12.0).view(6, 2), torch.tensor([1, accepted], dtype=torch.int32)
    table = torch.tensor([[1, 0, 0], [4, 2, 5]], dtype=torch.int32)
    expected = states.clone()
    if copied:
        expected[4] = states[2]
    state_pages.keep_full_pages(
        bufs=SimpleNamespace(postprocess_align=step),
        num_reqs=2,
        num_accepted_tokens_gpu=given,
        num_accepted_tokens_cpu_tensor=given,
        input_batch=SimpleNamespace(
            block_table={1: SimpleNamespace(get_device_tensor=lambda requests: table[:requests])}
        ),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None, SimpleNamespace(layer_names=["layer"])]),
        forward_context={"layer": SimpleNamespace(kv_cache=(states,))},
        mamba_state_copy_funcs={},
    )
    assert torch.equal(states, expected)
    assert given.tolist() == [1, 1]


@dataclass(frozen=True)
class Pages:
    """Of vLLM's specification what is replaced."""

    block_size: int
    num_speculative_blocks: int
    mamba_cache_mode: str
    num_prefill_checkpoint_blocks: int = 1
    prefill_checkpoint_alignment: int | None = 16


def test_drafts_that_would_leave_a_page_out_are_refused() -> None:
    assert state_backend.with_one_page(Pages(16, 15, "align")) == Pages(16, 0, "align", 0, None)
    assert state_backend.with_one_page(Pages(16, 16, "none")) == Pages(16, 0, "none", 0, None)
    with pytest.raises(NotCovered, match="16 drafts beside a prefix cache with pages of 16 tokens"):
        state_backend.with_one_page(Pages(16, 16, "align"))
