"""Sum and mean on an Ascend NPU, in triton-ascend: a program adds a chunk of a row, counted from the row's start.

    sum = sum(x),  mean = sum(x) / divisor

The reduced axis is moved last, because strided loads made a mean over another axis 16 times slower in a published
comparison. Compiled and simulated, never run on hardware (tests/ascend/offline).
"""

from functools import partial

import torch
import triton
import triton.language as tl

from ...ops.common.rows import as_rows, from_rows, normalise_dims, row_length
from ...ops.reduce import SumReduction, composed
from . import reductions
from .rows import check_covered, on, vector_grid


@triton.jit(
    do_not_specialize=["num_items", "length", "num_chunks", "divisor"],
    do_not_specialize_on_alignment=["x_ptr", "sums_ptr"],
)
def _sum_kernel(
    x_ptr,
    sums_ptr,
    num_items,
    length,
    num_chunks,
    divisor,
    CHUNK: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        start = item % num_chunks * CHUNK
        row = item // num_chunks
        chunk_ptr = x_ptr + row.to(tl.int64) * length + start
        chunk_length = min(length - start, CHUNK)
        acc = tl.zeros((BLOCK,), tl.float32)
        for offset in range(0, chunk_length, BLOCK):
            offs = offset + tl.arange(0, BLOCK)
            acc += tl.load(chunk_ptr + offs, mask=offs < chunk_length, other=0.0).to(tl.float32)
        total = tl.sum(acc)
        if DIVIDE:
            total = total / divisor
        tl.store(sums_ptr + item, total.to(sums_ptr.dtype.element_ty))


def _row_sums(rows: torch.Tensor, divisor: int | None, reduction: SumReduction, dtype: torch.dtype) -> torch.Tensor:
    """The sum of each row of a contiguous [rows, length], in ``dtype``, by ``divisor`` unless None."""
    num_rows, length = rows.shape
    num_chunks = reduction.num_chunks
    last = num_chunks == 1
    sums = torch.empty(num_rows, num_chunks, dtype=dtype if last else reduction.accumulate, device=rows.device)
    if num_rows:
        with on(rows.device):
            _sum_kernel[vector_grid(num_rows * num_chunks, rows.device)](
                rows,
                sums,
                num_rows * num_chunks,
                length,
                num_chunks,
                divisor or 0,
                CHUNK=reduction.chunk,
                DIVIDE=last and divisor is not None,
                BLOCK=reduction.block,
            )
    if last:
        return sums[:, 0]
    return _row_sums(sums, divisor, reductions.reduce(num_chunks, reduction.accumulate), dtype)


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
    reduction = reductions.reduce(row_length(x, dims), dtype or x.dtype)
    rows = as_rows(x, dims, reduction.dtype)
    check_covered("a reduction", rows)
    if reduction.length == 0:
        sums = rows.new_full(rows.shape[:1], float("nan") if divide else 0.0)
    else:
        sums = _row_sums(rows, reduction.length if divide else None, reduction, rows.dtype)
    return from_rows(sums, x, dims, keepdim)


sum, mean = partial(_reduce, divide=False), partial(_reduce, divide=True)
sum_of = partial(composed.sum_of, sum)
moments = partial(composed.moments, sum, mean)
