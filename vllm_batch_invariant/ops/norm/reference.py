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


def gated_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    gate: torch.Tensor,
    activation: str = "silu",
    norm_before_gate: bool = True,
) -> torch.Tensor:
    """The same, times silu or sigmoid of the gate; or of x times that."""
    sigmoid = gate.double().sigmoid()
    factor = sigmoid if activation == "sigmoid" else gate.double() * sigmoid
    return rms_norm(x, weight, eps) * factor if norm_before_gate else rms_norm(x.double() * factor, weight, eps)
