"""The definition of a code and of the scale of a token, in float64."""

import torch

from ..common.kv_cache import LARGEST, LEAST_SCALE

_SMALLEST_EXPONENT = -6
"""Of a normal number; those below have its last place."""


def scale_of_token(x: torch.Tensor) -> torch.Tensor:
    """The scales float64 [...] of keys or values [..., head_size] that are finite, but for their rounding to fp32."""
    return (x.double().abs().amax(-1) / LARGEST).clamp(min=LEAST_SCALE)


def number_of_code(x: torch.Tensor, scale: float) -> torch.Tensor:
    """The number float64 of the code in e4m3 of each element, without the rounding of the division in fp32."""
    x = (x.double() / scale).clamp(-LARGEST, LARGEST)
    exponent = torch.frexp(x).exponent.double() - 1
    place = torch.exp2(exponent.clamp(min=_SMALLEST_EXPONENT) - 3)
    return (x / place).round() * place
