"""Rotary embeddings of encoders that vLLM multiplies as complex numbers (MoonViT's, Llama 4's, Pixtral's).

PyTorch's loop over complex numbers on a CPU computes the last few of each thread's share by other instructions, which
round a product and a sum at once. Where a share ends follows from the number of rows, so from the items of a call.
Products, sums and differences of real numbers are rounded alike wherever they lie.
"""

from types import MethodType
from typing import Any

import torch

from ..reviews import patch_points


def turn(query: torch.Tensor, key: torch.Tensor, freqs_cis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn each pair of neighbours of a head by its row's angles, in fp32.

    Args:
        query: [..., rows, heads, head size], in any dtype.
        key: the same.
        freqs_cis: [rows, head size / 2] of complex numbers of length 1, or with a last axis of both parts.

    Returns:
        both, turned, in their dtypes.
    """
    parts = torch.view_as_real(freqs_cis) if freqs_cis.is_complex() else freqs_cis
    cos, sin = parts.unsqueeze(-3).unbind(-1)
    return _turned(query, cos, sin), _turned(key, cos, sin)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).type_as(x)


def _forward(self: Any, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of Llama 4's layer: [items, rows, heads, head size], by an angle of each of an item's rows."""
    return turn(query, key, self.cos_sin_cache.squeeze(1).to(query.device))


def replace_in(tower: torch.nn.Module) -> None:
    """Have the rotary embeddings of an encoder be ours."""
    modules = {type(layer).__module__ for layer in tower.modules()}
    for point in (patch_points.MOONVIT_ROTARY, patch_points.PIXTRAL_ROTARY):
        if modules.intersection(point.modules):
            point.put(turn)
    for layer in tower.modules():
        kind = type(layer)
        if kind.__name__ == patch_points.LLAMA_4_VISION_ROTARY.attribute:
            layer.__class__ = type(f"BatchInvariant{kind.__name__}", (kind,), {"__module__": __name__})
            layer._forward_method = MethodType(_forward, layer)
