"""The definition of the two operations in one, in float64."""

import torch

from ..norm.reference import rms_norm


def norm_rotary(
    x: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor, cos_sin_cache: torch.Tensor, eps: float
) -> torch.Tensor:
    """[tokens, heads, head_size], every head normalised and then turned by the angles of its token's position."""
    first, second = rms_norm(x, weight, eps).chunk(2, dim=-1)
    cos, sin = cos_sin_cache[positions].double()[:, None].chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
