"""Sums of terms, and variances, made of a device's own sum and mean: terms are elementwise, and written to memory."""

from collections.abc import Callable

import torch

from .reduction import TERMS

_TERM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sizes": torch.abs,
    "squares": torch.square,
    "numbers": lambda x: x.masked_fill(x.isnan(), 0),
}
assert tuple(_TERM) == TERMS
Sum = Callable[..., torch.Tensor]


def sum_of(sum: Sum, term: str, x: torch.Tensor, dim: int | list[int] | None, keepdim: bool) -> torch.Tensor:
    """The sum of a term of :data:`TERMS` of each element of fp32 or fp64."""
    return sum(_TERM[term](x), dim, keepdim)


def moments(
    sum: Sum, mean: Sum, x: torch.Tensor, dim: int | list[int] | None, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the squared distances from the mean, and the mean, of rows of fp32 or fp64."""
    means = mean(x, dim, True)
    squares = sum((x - means).square(), dim, keepdim)
    return squares, means.reshape(squares.shape)
