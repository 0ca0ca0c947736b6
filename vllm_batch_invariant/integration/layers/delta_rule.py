"""vLLM's layer of a gated delta rule (Qwen3-Next, Qwen3.5), with the operations between its projections: a short
convolution and SiLU, the rule, and a norm of heads with a gate.
"""

from typing import Any

import torch

from ...ops.delta_rule import delta_rule, gdn_inputs
from ..reviews import patch_points
from .recurrence import Recurrence, Sizes, convolution
from .state_backend import step_of_layer


def install_cuda() -> None:
    """Keep vLLM from two things that it does for these models on a GPU: it compiles kernels for states in its own
    layout, and one kernel of its own computes norms of heads, their rotary embedding and a copy of gates.
    """
    if patch_points.DELTA_RULE_WARMUP.is_there():
        patch_points.DELTA_RULE_WARMUP.put(lambda *_: None)
    if patch_points.GATED_ATTENTION.is_there():
        # vLLM's layer sets it of itself when it is built.
        apart = property(lambda self: False, lambda self, fused: None)
        patch_points.GATED_ATTENTION.get().use_fused_qk_norm_rope_gate = apart


def _init(self: Any, *args: Any, **named: Any) -> None:
    """vLLM's, without the layer of its own kernels."""
    patch_points.DELTA_RULE.get().__init__(self, *args, **named)
    del self.chunk_gated_delta_rule


def _sizes(layer: Any) -> Sizes:
    return _sizes_of_model(
        *(layer.tp_size, layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim),
        *(layer.conv_kernel_size, layer.num_spec),
    )


def _sizes_of_model(
    workers: int, key_heads: int, value_heads: int, key_size: int, value_size: int, width: int, drafts: int = 0
) -> Sizes:
    return Sizes(key_heads // workers, value_heads // workers, key_size, value_size, width, drafts, solve=True)


def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """vLLM's method for a device: of [tokens, hidden] makes [tokens, hidden]. What it gives for rows of no request
    means nothing.
    """
    mixed, z, b, a = _projected(self, hidden_states)
    step = step_of_layer(self.prefix)
    if step is None:
        out = z.contiguous()
    else:
        sizes = _sizes(self)
        gates = a, b, self.A_log, self.dt_bias
        operands = gdn_inputs(mixed, *gates, sizes.key_heads, sizes.key_size, convolution(self, step))
        out = delta_rule(*operands, *RECURRENCE.states(self, step, mixed.dtype))
    return self._output_projection(out, z)


def _projected(layer: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a step convolves [tokens, channels], gates of heads [tokens, heads, size], and b and a [tokens, heads]."""
    mixed_and_z, _ = layer.in_proj_qkvz(hidden_states)
    b_and_a, _ = layer.in_proj_ba(hidden_states)
    if layer.gqa_interleaved_layout:
        *parts, z, b, a = layer.fix_query_key_value_ordering(mixed_and_z, b_and_a)
        return torch.cat([part.flatten(1) for part in parts], dim=-1), z, b, a
    mixed, z = mixed_and_z.split([layer.conv_dim // layer.tp_size, layer.value_dim // layer.tp_size], dim=-1)
    return mixed, z.unflatten(-1, (-1, layer.head_v_dim)), *layer.split_ba(b_and_a)


RECURRENCE = Recurrence(
    name="gated delta rule",
    layer=patch_points.DELTA_RULE,
    calculated="gated_delta_net",
    backend="GDN_ATTN",
    told_by=f"{__package__}.recurrence_backends.DeltaRuleBackend",
    sizes=_sizes,
    of_model=_sizes_of_model,
    forward=forward,
    needed=(patch_points.DELTA_RULE_BACKEND, patch_points.DELTA_RULE_BUILDER, patch_points.DELTA_RULE_METADATA),
    methods={"__init__": _init},
)
