"""The definition of softmax and log_softmax, in float64."""

import torch


def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """exp(x) / sum(exp(x)) over ``dim``, float64."""
    return x.double().softmax(dim)


def log_softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x - log(sum(exp(x))) over ``dim``, float64."""
    return x.double().log_softmax(dim)
