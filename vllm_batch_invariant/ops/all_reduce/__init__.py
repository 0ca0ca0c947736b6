"""The sum of what the ranks of tensor parallelism have each computed, one rank after the other.

    out = round(((p[0] + p[1]) + p[2]) + ...)    p[r]: the partial result of rank r, in the model's dtype

Every element is added in the same order whatever its place and the number of tokens. Libraries of collectives begin
with the rank that owns an element, or go around a ring, and change that with the size of a message.

As a tree, the sum does not depend on the number of ranks either, if each rank's partial result is itself the sum of a
subtree::

    out = round(round(p[0] + p[1]) + round(p[2] + p[3]))
"""

import torch

from ..dispatch import implementation
from .reduction import AllReduceReduction

__all__ = ["AllReduceReduction", "add_ranks"]


def add_ranks(partials: torch.Tensor, tree: bool = False) -> torch.Tensor:
    """Add the partial results of all ranks.

    Args:
        partials: [ranks, ...], fp32, bf16, fp16 or fp64; on every rank the same.
        tree: whether neighbours are added, then the sums of neighbours, each rounded; ``ranks`` is a power of two then.

    Returns:
        [...] in the dtype of the partials; on every rank the same bits.

    Raises:
        NotCovered: another dtype, or a device without an implementation.
        ValueError: a tree of a number of ranks that is no power of two.
    """
    return implementation("all_reduce", partials).add_ranks(partials, tree)
