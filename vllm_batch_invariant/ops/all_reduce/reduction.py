"""What decides the bits of a sum over ranks."""

from dataclasses import dataclass
from typing import Self

import torch

from ..common.dtypes import accumulate


@dataclass(frozen=True)
class AllReduceReduction:
    """Rank 0 first, then each next rank is added in ``accumulate``; one rounding to ``dtype`` at the end. This is the
    order of the first stage of vLLM's own kernel for small messages.

    As a tree, ranks 2i and 2i + 1 are added in ``accumulate`` and rounded to ``dtype``, then their sums in the same
    way, until there is one.

    Attributes:
        ranks: how many add.
        dtype: of partial results, each rounded by the matmul that made it, and of the sum.
        accumulate: of additions.
        tree: whether it is one.
    """

    ranks: int
    dtype: torch.dtype
    accumulate: torch.dtype
    tree: bool = False

    @classmethod
    def of_ranks(cls, ranks: int, dtype: torch.dtype, tree: bool = False) -> Self:
        """The reduction for so many ranks.

        Raises:
            NotCovered: a dtype that is not fp32, bf16, fp16 or fp64.
            ValueError: a tree of a number of ranks that is no power of two.
        """
        if tree and ranks & (ranks - 1):
            raise ValueError(f"a tree adds a power of two of ranks, got {ranks}")
        return cls(ranks, dtype, accumulate(dtype, "an all-reduce"), tree)
