"""Gradients of RMSNorm by PyTorch's operations, in fp32: on a CPU, and of rows that are too long for a GPU's kernel."""

import torch

from .. import reduce


def rms_norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    grad: torch.Tensor,
    residual: torch.Tensor | None,
    grad_of_sum: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    summed = x.float() if residual is None else x.float() + residual.float()
    rstd = 1 / (reduce.mean(summed.square(), -1, keepdim=True) + eps).sqrt()
    normalised = summed * rstd
    weighted = grad.float() * weight.float()
    of_x = rstd * (weighted - normalised * reduce.mean(weighted * normalised, -1, keepdim=True))
    if grad_of_sum is not None:
        of_x = of_x + grad_of_sum.float()
    return of_x.to(x.dtype), reduce.sum((grad.float() * normalised).flatten(0, -2), 0)
