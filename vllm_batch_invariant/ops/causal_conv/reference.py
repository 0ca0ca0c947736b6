"""The definition of a short causal convolution, in float64."""

import torch


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False
) -> torch.Tensor:
    """Of one request from its first token on, x [tokens, channels] or gated [tokens, 3 * channels]: float64, nothing is
    rounded in between.
    """
    before, after, u = x.double().chunk(3, dim=1) if gated else (1.0, 1.0, x.double())
    u = before * u
    width = weight.shape[1]
    padded = torch.cat([u.new_zeros(width - 1, u.shape[1]), u])
    taps = [padded[tap : tap + len(u)] * weight[:, tap].double() for tap in range(width)]
    return after * (sum(taps) + (0.0 if bias is None else bias.double()))
