"""The definition of sums, means and variances, in float64."""

import torch


def sum(x: torch.Tensor, dim: int | list[int] | None = None, keepdim: bool = False) -> torch.Tensor:
    """Sum over ``dim`` (all if None), float64."""
    return x.double().sum(dim, keepdim=keepdim)


def mean(x: torch.Tensor, dim: int | list[int] | None = None, keepdim: bool = False) -> torch.Tensor:
    """Mean over ``dim`` (all if None), float64."""
    return x.double().mean(dim, keepdim=keepdim)


def moments(
    x: torch.Tensor, dim: int | list[int] | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the squared distances from the mean over ``dim`` (all if None), and the mean, float64."""
    centre = mean(x, dim, keepdim=True)
    return sum((x.double() - centre).square(), dim, keepdim), mean(x, dim, keepdim)
