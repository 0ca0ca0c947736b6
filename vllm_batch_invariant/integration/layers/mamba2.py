"""vLLM's layer of a state space of Mamba-2 (Nemotron-H, Granite 4 H, Falcon-H1), with the operations between its
projections: a short convolution and SiLU, the state space, and a norm of groups behind their gates.
"""

from typing import Any

import torch

from ...ops.delta_rule import delta_rule, mamba2_inputs
from ..reviews import patch_points
from .recurrence import Recurrence, Sizes, convolution
from .state_backend import step_of_layer


def _sizes(layer: Any) -> Sizes:
    return _sizes_of_model(
        *(layer.tp_size, layer.intermediate_size, layer.n_groups, layer.num_heads, layer.head_dim),
        *(layer.ssm_state_size, layer.conv_kernel_size, layer.num_spec),
    )


def _sizes_of_model(
    tp_world_size: int,
    intermediate_size: int,
    n_groups: int,
    num_heads: int,
    head_dim: int,
    state_size: int,
    conv_kernel: int,
    num_spec: int = 0,
) -> Sizes:
    """With vLLM's names, by which it passes them; one group is every worker's."""
    groups, heads = max(n_groups // tp_world_size, 1), num_heads // tp_world_size
    return Sizes(groups, heads, state_size, head_dim, conv_kernel, num_spec, solve=False)


def forward(self: Any, hidden_states: torch.Tensor, mup_vector: torch.Tensor | None = None) -> torch.Tensor:
    """vLLM's method: of [tokens, hidden] makes [tokens, hidden]. What it gives for rows of no request means nothing.

    Args:
        mup_vector: [1, projections], by which the first projection is multiplied.
    """
    projected, _ = self.in_proj(hidden_states)
    if mup_vector is not None:
        projected = projected * mup_vector
    sizes = _sizes(self)
    gate, mixed, dt = projected.split([self.tped_intermediate_size, sizes.channels, sizes.value_heads], dim=-1)
    step = step_of_layer(self.prefix)
    if step is None:
        out = gate.contiguous()
    else:
        gates = dt, self.A, self.dt_bias
        operands = mamba2_inputs(mixed, *gates, sizes.key_heads, sizes.key_size, convolution(self, step))
        out = delta_rule(*operands, *RECURRENCE.states(self, step, mixed.dtype), self.D).flatten(1)
    return self.out_proj(self.norm(out, gate))[0]


RECURRENCE = Recurrence(
    name="state space",
    layer=patch_points.MAMBA2,
    calculated="mamba2",
    backend="MAMBA2",
    told_by=f"{__package__}.recurrence_backends.Mamba2Backend",
    sizes=_sizes,
    of_model=_sizes_of_model,
    forward=forward,
    needed=(patch_points.MAMBA2_BACKEND, patch_points.MAMBA2_BUILDER, patch_points.MAMBA2_METADATA),
    methods={},
)
