"""Accepted drafts on a CPU, by PyTorch's own operations on integers."""

import torch

from . import NO_TOKEN


def accept(
    sampled: torch.Tensor, inputs: torch.Tensor, starts: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    first, end = starts[:-1].unsqueeze(-1).to(torch.int64), starts[1:].unsqueeze(-1)
    rows = first + torch.arange(width)  # [requests, width]
    follows = torch.zeros_like(inputs, dtype=torch.bool)
    follows[1:] = inputs[1:] == sampled[:-1]
    there = rows < end
    rows = rows.clamp(max=len(sampled) - 1)
    taken = (follows[rows] & there).to(torch.int32)
    taken[:, 0] = 1
    taken = taken.cumprod(-1)
    return sampled.to(torch.int64)[rows].masked_fill(taken == 0, NO_TOKEN), taken.sum(-1).to(torch.int32)
