"""The definition of the codes, in float64."""

import torch

from .reduction import QuantiseReduction


def quantise(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] on its grid without the roundings of fp32: codes [..., K] and scales [...], float64."""
    reduction, x = QuantiseReduction.of_dtype(x.dtype), x.double()
    top = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    least = reduction.smallest_static
    if scale is None:
        step, least = torch.where(top < reduction.least, 0.0, top / reduction.largest), -reduction.largest
    else:
        step = scale.double().expand_as(top)
    codes = torch.where(step > 0, x / step, 0.0).round().clamp(least, reduction.largest)
    is_finite = top.isfinite()
    return torch.where(is_finite, codes, 0.0), torch.where(is_finite, step, torch.nan)[..., 0]
