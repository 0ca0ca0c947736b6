"""The definition: a stable sort."""

import torch


def first(values: torch.Tensor) -> torch.Tensor:
    """See the operation's package."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, 0]


def top_and_ranks(values: torch.Tensor, count: int, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    order = torch.sort(values, dim=-1, descending=True, stable=True).indices
    ranks = (order == chosen.to(torch.int64).unsqueeze(-1)).int().argmax(-1)
    return order[:, :count], ranks + 1
