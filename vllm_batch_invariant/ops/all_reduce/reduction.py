"""What decides the bits of a sum over ranks."""

from dataclasses import dataclass
from typing import Self

import torch

from ..common.dtypes import accumulate


@dataclass(frozen=True)
class AllReduceReduction:
    """Rank 0 first, then each next rank is added in ``accumulate``; one rounding to ``dtype`` at the end. This is the
    order of the first stage of vLLM's own kernel for small messages.

    Attributes:
        ranks: how many add.
        dtype: of partial results, each rounded by the matmul that made it, and of the sum.
        accumulate: of additions.
    """

    ranks: int
    dtype: torch.dtype
    accumulate: torch.dtype

    @classmethod
    def of_ranks(cls, ranks: int, dtype: torch.dtype) -> Self:
        """The reduction for so many ranks.

        Raises:
            NotCovered: a dtype that is not fp32, bf16, fp16 or fp64.
        """
        return cls(ranks, dtype, accumulate(dtype, "an all-reduce"))
