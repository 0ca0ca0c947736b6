"""What decides the bits of softmax and log_softmax."""

from dataclasses import dataclass

import torch

from ..reduce.reduction import SumReduction


@dataclass(frozen=True)
class SoftmaxReduction:
    """The reduction of one row: its maximum (exact in any order), exp of the differences, and their sum by
    :class:`SumReduction`.

    exp is the one of ``numba_math`` on a CPU, additions and multiplications in a fixed order, and Triton's on a GPU.
    """

    length: int
    dtype: torch.dtype

    @property
    def sum(self) -> SumReduction:
        return SumReduction(self.length, self.dtype)
