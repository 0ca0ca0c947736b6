"""The layers of a short convolution (LFM2) of the engine, with gradients."""

from typing import Any

import torch

from ..integration.layers.short_conv import reductions_of
from .families import decoder_of
from .linear import linear
from .packing import Packed
from .recurrence import convolve


def short_conv_forward(self: torch.nn.Module, hidden: torch.Tensor, batch: Packed) -> torch.Tensor:
    """[tokens, hidden] of [tokens, hidden]."""
    projected = linear(hidden, self.in_proj.weight, biases=[self.in_proj.bias])
    convolved = convolve(projected, self.conv.weight.flatten(1), self.conv.bias, batch, gated=True)
    return linear(convolved, self.out_proj.weight, biases=[self.out_proj.bias])


def reductions(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """What an engine says of such layers, by names; nothing where a model has none."""
    layers = decoder_of(model).layers
    return reductions_of({layer.conv.conv_kernel_size for layer in layers if hasattr(layer, "conv")}, dtype)
