"""The definition of sum and mean, in float64."""

import torch


def sum(x: torch.Tensor, dim: int | list[int] | None = None, keepdim: bool = False) -> torch.Tensor:
    """Sum over ``dim`` (all if None), float64."""
    return x.double().sum(dim, keepdim=keepdim)


def mean(x: torch.Tensor, dim: int | list[int] | None = None, keepdim: bool = False) -> torch.Tensor:
    """Mean over ``dim`` (all if None), float64."""
    return x.double().mean(dim, keepdim=keepdim)
