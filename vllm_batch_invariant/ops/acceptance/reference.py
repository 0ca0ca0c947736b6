"""The definition, request by request."""

from itertools import pairwise

import torch

from . import NO_TOKEN


def accept(
    sampled: torch.Tensor, inputs: torch.Tensor, starts: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    bounds = starts.tolist()
    tokens = torch.full((len(bounds) - 1, width), NO_TOKEN, dtype=torch.int64, device=sampled.device)
    counts = torch.zeros(len(bounds) - 1, dtype=torch.int32, device=sampled.device)
    for request, (start, end) in enumerate(pairwise(bounds)):
        count = 1
        while start + count < end and inputs[start + count] == sampled[start + count - 1]:
            count += 1
        tokens[request, :count] = sampled[start : start + count]
        counts[request] = count
    return tokens, counts
