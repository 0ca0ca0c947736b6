"""Sum and mean on a GPU, in Triton: one program a chunk of a row, chunks counted from the row's start.

sum = sum(x),  mean = sum(x) / divisor
"""

from functools import partial

import torch
import triton
import triton.language as tl

from ..common.launch import launch
from ..common.rows import from_rows, normalise_dims, row_length
from ..common.triton_rows import aligned_rows, row_sum
from . import composed
from .reduction import SumReduction


@triton.jit(do_not_specialize=["divisor"])
def _sum_kernel(
    x_ptr,
    sums_ptr,
    length,
    divisor,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    start = program % NUM_CHUNKS * CHUNK
    x_ptr += program // NUM_CHUNKS * length + start
    length = min(length - start, CHUNK)
    acc = tl.zeros((BLOCK,), sums_ptr.dtype.element_ty)
    for first in range(0, length, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        acc += tl.load(x_ptr + offs, mask=offs < length, other=0.0).to(acc.dtype)  # [BLOCK]
    total = row_sum(acc, 32 * NUM_WARPS)
    if DIVIDE:
        # A plain fp32 division is approximate on a GPU.
        total = tl.div_rn(total, divisor.to(tl.float32)) if acc.dtype == tl.float32 else total / divisor
    tl.store(sums_ptr + program, total)


def _row_sums(rows: torch.Tensor, divisor: int | None, reduction: SumReduction) -> torch.Tensor:
    """The sum of each row of a contiguous [rows, length], in ``accumulate``, by ``divisor`` unless None."""
    num_rows, length = rows.shape
    num_chunks = reduction.num_chunks
    sums = torch.empty(num_rows, num_chunks, dtype=reduction.accumulate, device=rows.device)
    if num_rows:
        launch(
            _sum_kernel,
            num_rows * num_chunks,
            (rows, sums, length, divisor or 0),
            on=rows,
            CHUNK=reduction.chunk,
            NUM_CHUNKS=num_chunks,
            DIVIDE=divisor is not None and num_chunks == 1,
            BLOCK=reduction.block,
            NUM_WARPS=reduction.num_warps,
            num_warps=reduction.num_warps,
            enable_fp_fusion=reduction.enable_fp_fusion,
        )
    if num_chunks == 1:
        return sums[:, 0]
    return _row_sums(sums, divisor, SumReduction.of_device("cuda", num_chunks, reduction.accumulate))


def _reduce(
    x: torch.Tensor,
    dim: int | list[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    divide: bool,
) -> torch.Tensor:
    """:func:`sum` and :func:`mean` of the operation's package."""
    dims = normalise_dims(dim, x.dim())
    reduction = SumReduction.of_device("cuda", row_length(x, dims), dtype or x.dtype)
    rows = aligned_rows(x, dims, reduction.dtype)
    sums = _row_sums(rows, reduction.length if divide else None, reduction)
    return from_rows(sums, x, dims, keepdim).to(reduction.dtype)


sum, mean = partial(_reduce, divide=False), partial(_reduce, divide=True)
sum_of = partial(composed.sum_of, sum)
moments = partial(composed.moments, sum, mean)
