"""The sum over ranks on a CPU: additions of whole tensors, which PyTorch does element by element."""

import torch

from .reduction import AllReduceReduction


def add_ranks(partials: torch.Tensor) -> torch.Tensor:
    """See the operation's package."""
    reduction = AllReduceReduction.of_ranks(len(partials), partials.dtype)
    acc = partials[0].to(reduction.accumulate, copy=True)
    for partial in partials[1:]:
        acc += partial
    return acc.to(reduction.dtype)
