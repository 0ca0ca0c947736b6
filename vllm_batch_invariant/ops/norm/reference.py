"""The definition of RMSNorm, in float64."""

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, variance_size: int | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension, float64; the mean over its first ``variance_size``
    elements.
    """
    x = x.double()
    normalised = x * torch.rsqrt(x[..., :variance_size].pow(2).mean(-1, keepdim=True) + eps)
    return normalised if weight is None else normalised * weight.double()
