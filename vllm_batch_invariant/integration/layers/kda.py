"""vLLM's layer of Kimi Delta Attention (Ling 3.0), with the operations between its projections: a short convolution and
SiLU, the delta rule with a gate for each element of a key, and a norm of heads with a gate.
"""

from typing import Any

import torch

from ...ops.delta_rule import delta_rule, kda_inputs
from ...ops.norm import gated_rms_norm
from ..reviews import patch_points
from .delta_rule import RECURRENCE as GATED_DELTA_RULE
from .recurrence import Sizes, convolution_of
from .state_backend import step_of_layer


def _sizes(layer: Any) -> Sizes:
    of_worker = layer.tp_size, layer.num_heads, layer.head_dim
    return _sizes_of_model(*of_worker, conv_kernel_size=layer.conv_size, num_spec=layer.num_speculative_tokens)


def _sizes_of_model(
    tp_world_size: int, num_heads: int, head_dim: int, *, conv_kernel_size: int = 4, num_spec: int = 0
) -> Sizes:
    """With vLLM's names, by which it passes them."""
    heads = num_heads // tp_world_size
    return Sizes(heads, heads, head_dim, head_dim, conv_kernel_size, num_spec, solve=True, gates="channel")


def forward(self: Any, hidden_states: torch.Tensor, positions: torch.Tensor, output: torch.Tensor) -> None:
    """vLLM's method: of [tokens, hidden] writes [tokens, hidden]. What is written for rows of no request means nothing.

    Args:
        positions: none are needed.
    """
    gate = self.g_proj(hidden_states)[0].unflatten(-1, (-1, self.head_dim))
    step = step_of_layer(self.prefix)
    if step is None:
        out = gate.contiguous()
    else:
        if self.separate_b_proj:
            mixed, b = self.qkv_proj(hidden_states)[0], self.b_proj(hidden_states)[0]
        else:
            mixed, b = self.qkvb_proj(hidden_states)[0].split(
                [3 * self.projection_size_per_partition, self.local_num_heads], dim=-1
            )
        # vLLM keeps them apart, and in fp32.
        taps = torch.cat([part.weight for part in (self.q_conv1d, self.k_conv1d, self.v_conv1d)]).to(mixed.dtype)
        gates = self.f_proj(hidden_states)[0], b, self.A_log.view(-1), self.dt_bias
        least = self.lower_bound if self.safe_gate else None
        operands = kda_inputs(mixed, *gates, least, convolution_of(self, taps, None, step))
        out = delta_rule(*operands, *RECURRENCE.states(self, step, mixed.dtype))
    normed = gated_rms_norm(out, self.o_norm.weight.data, self.o_norm.eps, gate, "sigmoid")
    output[:] = self.o_proj(normed.flatten(1))[0]


RECURRENCE = GATED_DELTA_RULE._replace(  # vLLM has one backend for both
    name="Kimi Delta Attention",
    layer=patch_points.KDA,
    calculated="kda",
    sizes=_sizes,
    of_model=_sizes_of_model,
    forward=forward,
    methods={},
)
