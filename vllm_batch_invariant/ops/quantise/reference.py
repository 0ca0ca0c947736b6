"""The definition of the codes, in float64."""

import torch

from .reduction import E4M3, QuantiseReduction

_FINEST = -6
"""Below 2**-6 codes of e4m3 are 2**-9 apart, as they are just above it."""


def quantise(
    x: torch.Tensor, scale: torch.Tensor | None = None, *, codes: torch.dtype = torch.int8, group: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] on its grid without the roundings of fp32: codes [..., K] and scales [...] or [..., groups], float64.
    Codes of e4m3 are the numbers that they stand for.
    """
    reduction, x = QuantiseReduction.of_dtype(x.dtype, codes, group), x.double()
    length = x.shape[-1]
    counts = reduction.scales_of(length)
    size, count = (length, 1) if counts is None else (reduction.group, counts)
    x = torch.nn.functional.pad(x, (0, size * count - length)).unflatten(-1, (count, size))
    top = x.abs().amax(-1, keepdim=True) if length else x.new_zeros(*x.shape[:-1], 1)
    least = reduction.smallest_static
    if scale is None:
        step, least = torch.where(top < reduction.least, 0.0, top / reduction.largest), -reduction.largest
    else:
        step = scale.max().double().expand_as(top)
    near = torch.where(step > 0, x / step, 0.0)
    near = (near.round() if codes != E4M3 else _nearest_e4m3(near)).clamp(least, reduction.largest)
    step = torch.where(step > 0, step, reduction.scale_of_zeros)
    is_finite = top.isfinite()
    found, scales = torch.where(is_finite, near, 0.0), torch.where(is_finite, step, torch.nan)[..., 0]
    return found.flatten(-2)[..., :length], scales[..., 0] if counts is None else scales


def _nearest_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Of four significant bits, with no bound above."""
    exponent = (torch.frexp(x).exponent - 1).clamp(min=_FINEST)
    return torch.ldexp(torch.ldexp(x, 3 - exponent).round(), exponent - 3)
