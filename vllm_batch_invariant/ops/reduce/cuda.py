"""Sum and mean on a GPU, in Triton: one program a chunk of a row, chunks counted from the row's start."""

import torch
import triton
import triton.language as tl

from ..common.rows import from_rows, normalise_dims
from ..common.triton_rows import aligned_rows, layout_for, on_device_of
from .reduction import SumReduction

CHUNK = 1 << 16
"""Elements of a row that one program adds; a part of the reduction."""


@triton.jit(do_not_specialize=["divisor"])
def _sum_kernel(
    rows, sums, length, divisor, chunk: tl.constexpr, chunks: tl.constexpr, divide: tl.constexpr, block: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    start = program % chunks * chunk
    rows += program // chunks * length + start
    length = min(length - start, chunk)
    acc = tl.zeros((block,), sums.dtype.element_ty)
    for first in range(0, length, block):
        places = first + tl.arange(0, block)
        acc += tl.load(rows + places, mask=places < length, other=0.0).to(acc.dtype)
    total = tl.sum(acc)
    if divide:
        # A plain fp32 division is approximate on a GPU.
        total = tl.div_rn(total, divisor.to(tl.float32)) if acc.dtype == tl.float32 else total / divisor
    tl.store(sums + program, total)


def _row_sums(rows: torch.Tensor, accumulate: torch.dtype, divisor: int | None) -> torch.Tensor:
    """The sum of each row of a contiguous [rows, length], in ``accumulate``, by ``divisor`` unless None."""
    count, length = rows.shape
    chunks = max(1, triton.cdiv(length, CHUNK))
    layout = layout_for(min(length, CHUNK))
    sums = torch.empty(count, chunks, dtype=accumulate, device=rows.device)
    if count:
        with on_device_of(rows):
            _sum_kernel[(count * chunks,)](
                rows,
                sums,
                length,
                divisor or 0,
                chunk=CHUNK,
                chunks=chunks,
                divide=divisor is not None and chunks == 1,
                block=layout.block,
                num_warps=layout.warps,
            )
    return sums[:, 0] if chunks == 1 else _row_sums(sums, accumulate, divisor)


def _reduce(
    x: torch.Tensor, dim: int | list[int] | None, keepdim: bool, dtype: torch.dtype | None, divide: bool
) -> torch.Tensor:
    dims = normalise_dims(dim, x.dim())
    reduction = SumReduction(0, dtype or x.dtype)
    rows = aligned_rows(x, dims, reduction.dtype)
    sums = _row_sums(rows, reduction.accumulate, rows.shape[1] if divide else None)
    return from_rows(sums, x, dims, keepdim).to(reduction.dtype)


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
