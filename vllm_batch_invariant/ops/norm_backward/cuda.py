"""Gradients of RMSNorm on a GPU, in Triton: a program has a few tiles of rows, and reads each row once."""

import torch
import triton
import triton.language as tl

from .. import reduce
from ..common.launch import launch
from ..common.triton_rows import aligned, row_sums
from ..norm.triton_kernels import rstd_of
from . import composed
from .reduction import LARGEST_BLOCK, NormBackwardReduction


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_backward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    grad_ptr,
    grad_of_sum_ptr,
    of_x_ptr,
    of_weight_ptr,
    num_rows,
    eps,
    LENGTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_GRAD_OF_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    TILES_PER_PROGRAM: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    offs, rows = tl.arange(0, BLOCK)[None, :], tl.arange(0, ROWS_PER_PROGRAM)[:, None]
    in_row = offs + tl.zeros_like(rows) < LENGTH  # [ROWS_PER_PROGRAM, BLOCK]
    weight = tl.load(weight_ptr + offs + tl.zeros_like(rows), mask=in_row, other=0.0).to(tl.float32)
    of_weight = tl.zeros((ROWS_PER_PROGRAM, BLOCK), tl.float32)
    first = tl.program_id(0) * TILES_PER_PROGRAM * ROWS_PER_PROGRAM
    for tile in range(TILES_PER_PROGRAM):
        row = first + tile * ROWS_PER_PROGRAM + rows
        mask = in_row & (row < num_rows)
        place = row.to(tl.int64) * LENGTH + offs
        summed = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            summed += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32)
        rstd = rstd_of(row_sums(summed * summed, 32 * NUM_WARPS), LENGTH, eps)[:, None]
        normalised = tl.where(mask, summed * rstd, 0.0)  # a row that is not there may be divided by 0
        weighted = grad * weight
        mean = tl.div_rn(row_sums(weighted * normalised, 32 * NUM_WARPS), LENGTH)[:, None]
        of_x = rstd * (weighted - normalised * mean)
        if HAS_GRAD_OF_SUM:
            of_x += tl.load(grad_of_sum_ptr + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(of_x_ptr + place, of_x.to(of_x_ptr.dtype.element_ty), mask=mask)
        of_weight += grad * normalised
    partial = (tl.program_id(0) * ROWS_PER_PROGRAM + rows).to(tl.int64)
    tl.store(of_weight_ptr + partial * LENGTH + offs, of_weight, mask=in_row)


def rms_norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    grad: torch.Tensor,
    residual: torch.Tensor | None,
    grad_of_sum: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package. Rows of more than :data:`LARGEST_BLOCK` elements are computed by PyTorch's
    operations.
    """
    length = x.shape[-1]
    if length > LARGEST_BLOCK:
        return composed.rms_norm_backward(x, weight, eps, grad, residual, grad_of_sum)
    reduction = NormBackwardReduction.of_length(length)
    num_rows = x.numel() // length
    programs = triton.cdiv(num_rows, reduction.rows_per_program * reduction.tiles_per_program)
    of_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    of_weight = torch.empty(programs * reduction.rows_per_program, length, dtype=torch.float32, device=x.device)
    if programs:
        launch(
            _rms_norm_backward_kernel,
            programs,
            (
                aligned(x),
                None if residual is None else aligned(residual),
                aligned(weight),
                aligned(grad),
                None if grad_of_sum is None else aligned(grad_of_sum),
                of_x,
                of_weight,
                num_rows,
                eps,
            ),
            on=x,
            LENGTH=length,
            HAS_RESIDUAL=residual is not None,
            HAS_GRAD_OF_SUM=grad_of_sum is not None,
            BLOCK=reduction.block,
            ROWS_PER_PROGRAM=reduction.rows_per_program,
            TILES_PER_PROGRAM=reduction.tiles_per_program,
            NUM_WARPS=reduction.num_warps,
            num_warps=reduction.num_warps,
        )
    return of_x, reduce.sum(of_weight, 0)
