"""The layers of a state space of Mamba-2 (Nemotron-H) of the engine, with gradients: a short convolution, the state
space, and a norm of groups behind a gate.
"""

from typing import Any

import torch

from ..integration.layers.mamba2 import RECURRENCE
from ..integration.layers.recurrence import Sizes
from .activation import elementwise
from .families import decoder_of
from .linear import linear
from .norm import gated_rms_norm
from .packing import Packed
from .recurrence import convolve, recur


def state_space_forward(self: torch.nn.Module, hidden: torch.Tensor, batch: Packed) -> torch.Tensor:
    """[tokens, hidden] of [tokens, hidden]. Time steps have no least one, which vLLM's layer does not read."""
    gate, mixed, dt = linear(hidden, self.in_proj.weight, biases=[self.in_proj.bias]).split(
        [self.intermediate_size, self.conv_dim, self.num_heads], dim=-1
    )
    convolved = elementwise("silu", convolve(mixed, self.conv1d.weight.flatten(1), self.conv1d.bias, batch))
    operands = convolved, dt, -elementwise("exp", self.A_log.float()), self.dt_bias, self.D
    out = recur(operands, self.n_groups, batch, sizes_of(self).reduction(hidden.dtype))
    out, gate = (one.reshape(len(hidden), self.n_groups, self.norm.group_size) for one in (out, gate))
    weight = self.norm.weight.unflatten(0, out.shape[1:])
    normed = gated_rms_norm(out, weight, self.norm.variance_epsilon, gate, norm_before_gate=False)
    return linear(normed.flatten(1), self.out_proj.weight, biases=[self.out_proj.bias])


def reductions(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """What an engine says of such layers, by names; nothing where a model has none."""
    mixers = [layer.mixer for layer in decoder_of(model).layers if hasattr(getattr(layer, "mixer", None), "A_log")]
    return RECURRENCE.reductions_of([sizes_of(mixer) for mixer in mixers], dtype)


def sizes_of(mixer: torch.nn.Module) -> Sizes:
    """Of Hugging Face's layer those that the engine's has."""
    heads = mixer.n_groups, mixer.num_heads, mixer.ssm_state_size, mixer.head_dim
    return Sizes(*heads, width=mixer.conv_kernel_size, drafts=0, solve=False)
