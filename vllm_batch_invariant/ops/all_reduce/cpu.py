"""The sum over ranks on a CPU: additions of whole tensors, which PyTorch does element by element."""

import torch

from .reduction import AllReduceReduction


def add_ranks(partials: torch.Tensor, tree: bool = False) -> torch.Tensor:
    """See the operation's package."""
    reduction = AllReduceReduction.of_ranks(len(partials), partials.dtype, tree)
    if reduction.tree:
        while len(partials) > 1:
            partials = (partials[::2].to(reduction.accumulate) + partials[1::2]).to(reduction.dtype)
        return partials[0]
    acc = partials[0].to(reduction.accumulate, copy=True)
    for partial in partials[1:]:
        acc += partial
    return acc.to(reduction.dtype)
