"""The definition of the two operations in one, in float64."""

from typing import TYPE_CHECKING

import torch

from ..norm.reference import rms_norm

if TYPE_CHECKING:
    from . import Sections


def norm_rotary(
    x: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    eps: float,
    sections: "Sections | None" = None,
) -> torch.Tensor:
    """[tokens, heads, head_size], every head normalised and then turned by the angles of its token's position, or of
    the one of its token's positions that a frequency has.
    """
    normed = x.double() if weight is None else rms_norm(x, weight, eps)
    first, second = normed.chunk(2, dim=-1)
    cos, sin = cos_sin_cache.double().chunk(2, dim=-1)
    if sections is None:
        cos, sin = cos[positions], sin[positions]
    else:
        rows = positions[sections.rows()].T  # [tokens, half of a head]
        cos, sin = cos.gather(0, rows), sin.gather(0, rows)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
