"""The definition of the operation, in float64."""

import torch


def scaled_linear(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product of the numbers that codes [..., K] and a weight's [N, K] stand for, plus a bias [N]: float64."""
    x, matrix = codes.double() * scale.double()[..., None], weight.double() * weight_scale.double()[:, None]
    product = torch.einsum("...k,nk->...n", x, matrix)
    return product if bias is None else product + bias.double()
