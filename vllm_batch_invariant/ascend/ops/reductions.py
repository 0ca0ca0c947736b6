"""What decides the bits of each operation on an NPU.

An element of a row is added to accumulator i % ``block``, ascending, and the accumulators by a tree, as on a GPU but
without warps (:class:`~vllm_batch_invariant.ops.common.row_reduction.RowReduction`).
"""

from functools import lru_cache

import torch

from ...ops.common.dtypes import accumulate
from ...ops.common.row_reduction import REDUCTIONS_KEPT
from ...ops.linear import LinearReduction
from ...ops.norm import NormReduction
from ...ops.reduce import SumReduction
from ...ops.softmax import SoftmaxReduction

_BLOCK = 128
_WIDE_BLOCK_N = 256
_WIDE_N = 8192
_CHUNK = 1 << 16
_BLOCKS = (128, 512, 2048)
_LARGEST_BLOCKS = {"sum": 8192, "softmax": 4096, "norm": 8192, "norm with residual": 4096}
"""By kernel, the largest block with which it fits into the unified buffer (192 KiB) with room to load the next block
meanwhile: with a residual, 8192 of fp32 fit only without that. tests/ascend/offline asks the compiler.
"""


def _block(length: int, kernel: str) -> int:
    """The smallest block that holds ``length`` elements, or the largest one with which the kernel fits."""
    return next((block for block in _BLOCKS if length <= block), _LARGEST_BLOCKS[kernel])


@lru_cache(REDUCTIONS_KEPT)
def linear(n: int, k: int, dtype: torch.dtype) -> LinearReduction:
    """One accumulator an element adds K upwards in steps of ``k_step``. That tiles of other sizes give a row the same
    bits is not known of the cube cores, so [``block_m``, ``block_n``] belongs here, too.

    Blocks of 128 rows also for one: a cube core multiplies a tile in about the time in which its share of the memory
    bandwidth brings the weight's part of it (an estimate from data sheets). Wide tiles read the rows less often, and
    narrow ones share a small weight among more cores.
    """
    block_n = _WIDE_BLOCK_N if n >= _WIDE_N else _BLOCK
    wide = accumulate(dtype, "a matmul")
    return LinearReduction(n, k, dtype, wide, precision="ieee", k_step=_BLOCK, block_m=_BLOCK, block_n=block_n)


@lru_cache(REDUCTIONS_KEPT)
def norm(length: int, dtype: torch.dtype, has_residual: bool = False) -> NormReduction:
    """Of a row of ``length`` elements: another one with a residual."""
    block = _block(length, "norm with residual" if has_residual else "norm")
    return NormReduction(length=length, dtype=dtype, block=block)


@lru_cache(REDUCTIONS_KEPT)
def softmax(length: int, dtype: torch.dtype) -> SoftmaxReduction:
    """Of a row of ``length`` elements."""
    return SoftmaxReduction(length=length, dtype=dtype, exp="triton.language.exp", block=_block(length, "softmax"))


@lru_cache(REDUCTIONS_KEPT)
def reduce(length: int, dtype: torch.dtype) -> SumReduction:
    """Of a row of ``length`` elements: the sums of its chunks, in ``accumulate``, are a row again, with a reduction of
    its own.

    Raises:
        NotCovered: a dtype that is not fp32, bf16, fp16 or fp64.
    """
    wide = accumulate(dtype, "a reduction")
    return SumReduction(length=length, dtype=dtype, accumulate=wide, block=_block(length, "sum"), chunk=_CHUNK)
