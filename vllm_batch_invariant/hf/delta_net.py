"""The layers of a gated delta net (Qwen3.5) of the engine, with gradients: a short convolution, the rule, and a norm of
heads with a gate.
"""

from typing import Any

import torch

from ..integration.layers.delta_rule import RECURRENCE
from ..integration.layers.recurrence import Sizes
from .activation import elementwise
from .families import decoder_of
from .linear import linear
from .norm import gated_rms_norm
from .packing import Packed
from .recurrence import convolve, recur


def delta_net_forward(self: torch.nn.Module, hidden: torch.Tensor, batch: Packed) -> torch.Tensor:
    """[tokens, hidden] of [tokens, hidden]."""
    mixed, z = linear(hidden, self.in_proj_qkv.weight, self.in_proj_z.weight).split(
        [self.conv_dim, self.value_dim], dim=-1
    )
    b, a = linear(hidden, self.in_proj_b.weight, self.in_proj_a.weight).chunk(2, dim=-1)
    convolved = elementwise("silu", convolve(mixed, self.conv1d.weight.flatten(1), None, batch))
    operands = convolved, a, b, self.A_log, self.dt_bias
    out = recur(operands, self.num_k_heads, batch, sizes_of(self).reduction(hidden.dtype))
    gate = z.unflatten(-1, (-1, self.head_v_dim))
    normed = gated_rms_norm(out, self.norm.weight, self.norm.variance_epsilon, gate)
    return linear(normed.flatten(1), self.out_proj.weight)


def reductions(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """What an engine says of such layers, by names; nothing where a model has none."""
    nets = [layer.linear_attn for layer in decoder_of(model).layers if hasattr(layer, "linear_attn")]
    return RECURRENCE.reductions_of([sizes_of(net) for net in nets], dtype)


def sizes_of(net: torch.nn.Module) -> Sizes:
    """Of Hugging Face's layer those that the engine's has."""
    heads = net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim
    return Sizes(*heads, width=net.conv_kernel_size, drafts=0, solve=True)
