"""The definition of the operation, in float64: what every implementation is compared with."""

from collections.abc import Sequence

import torch

from .spec import PRODUCT, MatmulSpec


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    spec: MatmulSpec = PRODUCT,
    bias: torch.Tensor | None = None,
    scales: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """What ``spec`` says in float64, where slices are no other sum; arguments as of :func:`..linear.matmul`."""
    return spec.epilogue.definition(linear(x, spec.b_format.matrix(weight.t(), scales, x).t(), bias))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` in float64. x: [..., K], weight: [N, K], bias: [N]; returns [..., N] float64."""
    product = torch.einsum("...k,nk->...n", x.double(), weight.double())
    return product if bias is None else product + bias.double()
