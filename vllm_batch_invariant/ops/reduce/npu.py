"""Sum and mean on an Ascend NPU, in triton-ascend: a program adds a chunk of a row, counted from the row's start.

The reduced axis is moved last, because strided loads made a mean over another axis 16 times slower in a published
comparison. Compiled and simulated, never run on hardware (tests/npu/offline).
"""

import torch
import triton
import triton.language as tl

from ..common.npu_cores import on, vector_grid
from ..common.npu_rows import check_covered, layout_for
from ..common.rows import as_rows, from_rows, normalise_dims
from .reduction import SumReduction

CHUNK = 1 << 16
"""Elements of a row that one program adds; a part of the reduction."""
LARGEST_BLOCK = 8192


@triton.jit(do_not_specialize=["items", "length", "chunks", "divisor"], do_not_specialize_on_alignment=["rows", "sums"])
def _sum_kernel(
    rows, sums, items, length, chunks, divisor, chunk: tl.constexpr, divide: tl.constexpr, block: tl.constexpr
):
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        start = item % chunks * chunk
        row = item // chunks
        first = rows + row.to(tl.int64) * length + start
        here = min(length - start, chunk)
        acc = tl.zeros((block,), tl.float32)
        for offset in range(0, here, block):
            places = offset + tl.arange(0, block)
            acc += tl.load(first + places, mask=places < here, other=0.0).to(tl.float32)
        total = tl.sum(acc)
        if divide:
            total = total / divisor
        tl.store(sums + item, total.to(sums.dtype.element_ty))


def _row_sums(rows: torch.Tensor, dtype: torch.dtype, divisor: int | None) -> torch.Tensor:
    """The sum of each row of a contiguous [rows, length], in ``dtype``, by ``divisor`` unless None."""
    count, length = rows.shape
    chunks = max(1, triton.cdiv(length, CHUNK))
    last = chunks == 1
    sums = torch.empty(count, chunks, dtype=dtype if last else torch.float32, device=rows.device)
    if count:
        with on(rows.device):
            _sum_kernel[vector_grid(count * chunks, rows.device)](
                rows,
                sums,
                count * chunks,
                length,
                chunks,
                divisor or 0,
                chunk=CHUNK,
                divide=last and divisor is not None,
                block=layout_for(length, LARGEST_BLOCK).block,
            )
    return sums[:, 0] if last else _row_sums(sums, dtype, divisor)


def _reduce(
    x: torch.Tensor, dim: int | list[int] | None, keepdim: bool, dtype: torch.dtype | None, divide: bool
) -> torch.Tensor:
    dims = normalise_dims(dim, x.dim())
    rows = as_rows(x, dims, SumReduction(0, dtype or x.dtype).dtype)
    check_covered("a reduction", rows)
    if rows.shape[1] == 0:
        sums = rows.new_full(rows.shape[:1], float("nan") if divide else 0.0)
    else:
        sums = _row_sums(rows, rows.dtype, rows.shape[1] if divide else None)
    return from_rows(sums, x, dims, keepdim)


def sum(
    x: torch.Tensor, dim: int | list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See the operation's package."""
    return _reduce(x, dim, keepdim, dtype, divide=False)


def mean(
    x: torch.Tensor, dim: int | list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See the operation's package."""
    return _reduce(x, dim, keepdim, dtype, divide=True)
