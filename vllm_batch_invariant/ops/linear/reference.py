"""The definition of the operation, in float64: what every implementation is compared with."""

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` in float64. x: [..., K], weight: [N, K], bias: [N]; returns [..., N] float64."""
    product = torch.einsum("...k,nk->...n", x.double(), weight.double())
    return product if bias is None else product + bias.double()
