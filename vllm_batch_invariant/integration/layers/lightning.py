"""vLLM's layer of linear attention whose decay is constant (Ling 2.5, Ring 2.5), lightning attention (Qin et al.:
arxiv.org/abs/2401.04658), with the operations between its projections: norms of heads, a rotary embedding, the state
space of Mamba-2 with time steps of 1 and one decay for every token, and a norm of groups with a gate.
"""

from importlib import import_module
from typing import Any

import torch

from ...ops.delta_rule import delta_rule
from ...ops.norm import gated_rms_norm, rms_norm
from ..reviews import patch_points
from .recurrence import Recurrence, Sizes
from .state_backend import step_of_layer

_BACKENDS, _BACKEND = f"{__package__}.recurrence_backends", "LightningBackend"


def _sizes(layer: Any) -> Sizes:
    return _sizes_of_model(layer.num_heads, layer.tp_size, layer.head_dim)


def _sizes_of_model(num_heads: int, tp_size: int, head_dim: int) -> Sizes:
    """With vLLM's names, by which it passes them."""
    heads = num_heads // tp_size
    return Sizes(heads, heads, head_dim, head_dim, width=0, drafts=0, solve=False)


def forward(self: Any, hidden_states: torch.Tensor, output: torch.Tensor, positions: torch.Tensor) -> None:
    """vLLM's method: of [tokens, hidden] writes [tokens, hidden]. What is written for rows of no request means nothing.

    Args:
        positions: [tokens] of the rotary embedding.
    """
    projected, _ = self.query_key_value(hidden_states)
    step = step_of_layer(self.prefix)
    if step is None:
        out = projected.chunk(3, dim=-1)[2].unflatten(1, (-1, self.head_dim)).contiguous()
    else:
        operands = decayed_inputs(self, projected, positions)
        out = delta_rule(*operands, *RECURRENCE.states(self, step, projected.dtype))
    gate, _ = self.g_proj(hidden_states)
    groups = max(self.group_norm_size // self.tp_size, 1), -1
    out, gate = (one.flatten(1).unflatten(1, groups) for one in (out, gate))
    normed = gated_rms_norm(out, self.g_norm.weight.data.view(groups), self.rms_norm_eps, gate, "sigmoid")
    output[:] = self.dense(normed.flatten(1))[0]


def decayed_inputs(
    layer: Any, projected: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands of the rule, each token by itself: all in fp32 as vLLM has it, rounded to the dtype of what a layer
    projects. Queries are scaled before they are rounded.

    Args:
        layer: vLLM's.
        projected: [tokens, 3 * heads * size], queries, keys and values.
        positions: [tokens]

    Returns:
        q, k and v [tokens, heads, size]; decays, the same for each token, and time steps of 1, [tokens, heads] fp32.
    """
    mixed = projected.float()
    if layer.linear_silu:
        mixed = torch.nn.functional.silu(mixed)
    q, k, v = (one.unflatten(1, (-1, layer.head_dim)) for one in mixed.chunk(3, dim=-1))
    if layer.use_qk_norm:
        norms = layer.query_layernorm, layer.key_layernorm
        q, k = (rms_norm(one, norm.weight.data, layer.rms_norm_eps) for one, norm in zip((q, k), norms, strict=True))
    q, k = q.flatten(1), k.flatten(1)
    if layer.linear_rope:
        q, k = layer.rotary_emb(positions, q.contiguous(), k.contiguous())
    q, k, v = (one.reshape(v.shape).to(projected.dtype) for one in (q * layer.scaling, k, v))
    g = -layer.tp_slope.float().view(1, -1).expand(len(v), -1)
    return q, k, v, g, torch.ones_like(g)


def _backend(_: Any) -> Any:
    """The layer asks for no backend by name."""
    return getattr(import_module(_BACKENDS), _BACKEND)


RECURRENCE = Recurrence(
    name="linear attention",
    layer=patch_points.LIGHTNING,
    calculated="linear_attention",
    backend="LINEAR",
    told_by=f"{_BACKENDS}.{_BACKEND}",
    sizes=_sizes,
    of_model=_sizes_of_model,
    forward=forward,
    needed=(patch_points.LIGHTNING_BACKEND, patch_points.LIGHTNING_BUILDER, patch_points.LIGHTNING_METADATA),
    methods={"get_attn_backend": _backend},
    convolves=False,
)
