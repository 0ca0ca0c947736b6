"""What decides the bits of softmax and log_softmax."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch

from ..common.row_reduction import (
    LANES,
    REDUCTIONS_KEPT,
    RowReduction,
    exp_of,
    gpu_block,
    gpu_warps,
    next_power_of_two,
)
from ..devices import reduction_of

LONGEST_WHOLE = 1 << 14
"""Elements of the longest row that one program of a GPU holds."""
SHORTEST_CHUNK = 1 << 11
"""Elements of a chunk on a GPU, so that the row of one request spreads over it."""
_MANY_CHUNKS = 128
"""More than that only where chunks would be longer than :data:`LONGEST_WHOLE`."""
_MOST_WARPS = 16


@dataclass(frozen=True, kw_only=True)
class SoftmaxReduction(RowReduction):
    """The reduction of one row: its maximum (exact in any order), exp of the differences, and their sum, added as
    :class:`RowReduction` says.

    On a GPU a row of up to 16384 elements is one block. A longer one is cut into chunks of a block each (of 2048
    elements up to a length of 262144), whose sums are relative to their own maxima, rescaled to the row's, and added by
    one tree of ``padded_chunks`` leaves.

    Attributes:
        exp: the function that computes exp.
    """

    exp: str

    @property
    def padded_chunks(self) -> int:
        """Leaves of the tree that adds the sums of chunks: a power of two."""
        return next_power_of_two(self.num_chunks)

    @classmethod
    @lru_cache(REDUCTIONS_KEPT)
    def of_device(cls, device_type: str, length: int, dtype: torch.dtype) -> Self:
        """The reduction of a row of ``length`` elements that are loaded as ``dtype``."""
        if joined := reduction_of("softmax", device_type):
            return joined(length, dtype)
        row = {"length": length, "dtype": dtype, "exp": exp_of(device_type)}
        if device_type == "cpu":
            return cls(**row, lanes=LANES)
        if length <= LONGEST_WHOLE:
            block, chunk = gpu_block(length, LONGEST_WHOLE), None
        else:
            block = chunk = max(gpu_block(-(-length // _MANY_CHUNKS), LONGEST_WHOLE), SHORTEST_CHUNK)
        num_warps = gpu_warps(block, 1, _MOST_WARPS)
        return cls(**row, block=block, num_warps=num_warps, chunk=chunk, enable_fp_fusion=False)
