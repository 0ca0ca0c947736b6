"""The definition of the operation, in float64."""

import torch

from .reduction import E4M3, GROUP


def scaled_linear(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product of the numbers that codes [..., K] and a weight's [N, K] stand for, plus a bias [N]: float64."""
    n, k = weight.shape
    scale, weight_scale = scale.double(), weight_scale.double()
    if codes.dtype == E4M3 and weight_scale.dim() == 2:
        scale = scale.repeat_interleave(GROUP, -1)[..., :k]
        weight_scale = weight_scale.repeat_interleave(GROUP, 0)[:n].repeat_interleave(GROUP, 1)[:, :k]
    else:
        scale, weight_scale = scale[..., None], weight_scale[:, None]
    product = torch.einsum("...k,nk->...n", codes.double() * scale, weight.double() * weight_scale)
    return product if bias is None else product + bias.double()
