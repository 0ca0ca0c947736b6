"""What decides the bits of the gradients of attention."""

from dataclasses import dataclass
from typing import Self

import torch

_CPU_BLOCK_M = 64
_GPU_BLOCK, _GPU_TILE_BYTES = 64, 1 << 14
_GPU_FP32_BLOCK = 16
"""fp32 has no tensor cores that multiply it exactly, and larger tiles do not fit in registers."""
_GPU_WARPS, _GPU_FP32_WARPS = 4, 8
"""Without tensor cores the threads hold whole operands, for which those of four warps have too few registers."""


@dataclass(frozen=True, kw_only=True)
class AttentionBackwardReduction:
    """The order in which the gradients of one sequence are added, in tiles that are counted from its first token.

    On a CPU a tile of queries has all its keys at once: the gradient of a query is one matmul over them, and those of
    keys and values are added tile after tile of queries, ascending. On a GPU the gradient of a query is added tile
    after tile of keys, ascending, those of a key and a value tile after tile of queries, ascending, query head after
    query head of the KV head. There are no atomics.

    On a GPU the weights and the gradients of scores are rounded to the tensors' dtype before the tensor cores multiply
    them; scores and sums stay in fp32.

    Attributes:
        block_m: queries of a tile.
        block_n: keys of a tile; 0 on a CPU, where all are one.
        num_warps: of a program, among whose threads the weights of a row are added; 0 on a CPU.
        accumulate: the dtype of every addition.
        enable_fp_fusion: whether the compiler may add a product unrounded.
    """

    block_m: int
    block_n: int = 0
    num_warps: int = 0
    accumulate: torch.dtype = torch.float32
    enable_fp_fusion: bool = False

    @classmethod
    def of_device(cls, device_type: str, head_size: int, dtype: torch.dtype) -> Self:
        """The reduction of every sequence on a device: on a GPU with tiles whose rows are in shared memory."""
        if device_type == "cpu":
            return cls(block_m=_CPU_BLOCK_M)
        row_bytes = dtype.itemsize * (1 << (head_size - 1).bit_length())
        if dtype == torch.float32:
            return cls(block_m=_GPU_FP32_BLOCK, block_n=_GPU_FP32_BLOCK, num_warps=_GPU_FP32_WARPS)
        block = min(_GPU_TILE_BYTES // row_bytes, _GPU_BLOCK)
        return cls(block_m=block, block_n=block, num_warps=_GPU_WARPS)


@dataclass(frozen=True)
class AttentionBackwardSchedule:
    """How a GPU's program is run.

    Attributes:
        num_stages: tiles that are loaded ahead.
    """

    num_stages: int

    @classmethod
    def of_dtype(cls, dtype: torch.dtype) -> Self:
        """The schedule for tensors of a dtype."""
        return cls(num_stages=1 if dtype == torch.float32 else 2)
