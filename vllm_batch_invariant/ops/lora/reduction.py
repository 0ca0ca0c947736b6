"""What decides the bits of an adapter of low rank."""

from dataclasses import dataclass

import torch

from ...errors import NotCovered
from ..devices import reduction_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RANK_STEP = 16
_LEAF, _LEAVES = 512, 16


@dataclass(frozen=True)
class LoraReduction:
    """The reduction of a row x [K] with an adapter A [rank, K], B [N, rank], on the base layer's row y [N]::

        u = round(L[0] + L[1] + ... )                       # L[i] = x[leaf i] . A[leaf i], fp32, i ascending from 0
        delta = 0 + P[0] + P[1] + ...                       # P[j] = u[step j] . B[step j], fp32, j ascending from +0
        y' = round(y + delta)                               # in fp32

    ``round`` is the one to ``dtype``. A leaf is ``k_leaf`` elements of K, the last one what is left, and a step is
    ``rank_step`` of the rank. A rank that is no multiple of it is one with zeros behind, so that a tensor with room for
    a higher rank has the same bits: zeros are added to a sum that began with +0, which no such addition changes (of
    finite u: 0 times an infinity is none). On a GPU leaves and steps are added as tensor cores do, in steps of 16 into
    one accumulator, and fp32 by fmas. On a CPU a product is what the operation ``linear`` has there, and K is one leaf.

    Attributes:
        k: elements of x.
        dtype: of operands and result.
        k_leaf: elements of a leaf.
        rank_step: of the rank that are added at once.
        accumulate: the dtype of every addition.
    """

    k: int
    dtype: torch.dtype
    k_leaf: int
    rank_step: int = RANK_STEP
    accumulate: torch.dtype = torch.float32

    @property
    def leaves(self) -> int:
        """How many K has."""
        return -(-self.k // self.k_leaf)

    @classmethod
    def of_device(cls, device_type: str, k: int, dtype: torch.dtype) -> "LoraReduction":
        """The reduction in force on a device, from K and the dtype alone.

        Raises:
            NotCovered: a dtype that is not fp32, bf16 or fp16.
        """
        if dtype not in DTYPES:
            raise NotCovered(f"LoRA adapters in {dtype}", "they add in fp32", "use fp32, bf16 or fp16")
        joined = reduction_of("lora", device_type)
        if joined is not None:
            return joined(k, dtype)
        if device_type == "cpu":
            return cls(k, dtype, k)
        return cls(k, dtype, _LEAF if k <= _LEAF * _LEAVES else -(-k // (_LEAVES * 16)) * 16)
