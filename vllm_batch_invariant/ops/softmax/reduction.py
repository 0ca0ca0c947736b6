"""What decides the bits of softmax and log_softmax."""

from dataclasses import dataclass

import torch

from ..reduce.reduction import SumReduction


@dataclass(frozen=True)
class SoftmaxReduction:
    """The reduction of one row: its maximum (exact in any order), exp of the differences, and their sum by
    :class:`SumReduction`.

    exp is the one of ``numba_math`` on a CPU, additions and multiplications in a fixed order, and Triton's on a GPU.
    There a row of up to 16384 elements is one block, and a longer one is cut into chunks (of 2048 elements up to a
    length of 262144) whose sums are relative to their own maxima, rescaled to the row's, and added by one tree.
    """

    length: int
    dtype: torch.dtype

    @property
    def sum(self) -> SumReduction:
        return SumReduction(self.length, self.dtype)
