"""RMSNorm on an Ascend NPU, in triton-ascend: a program walks one row after the other.

Compiled and simulated, never run on hardware (tests/npu/offline).
"""

import torch
import triton
import triton.language as tl

from ..common.npu_cores import on, vector_grid
from ..common.npu_rows import check_covered, layout_for

LARGEST_BLOCK = 8192
LARGEST_BLOCK_WITH_RESIDUAL = 4096
"""With a residual, 8192 of fp32 fit only if the next block is not loaded meanwhile."""


@triton.jit
def _summed(x, residual, places, mask, has_residual: tl.constexpr):
    """x + residual of a row at ``places``, unrounded."""
    row = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    if has_residual:
        row += tl.load(residual + places, mask=mask, other=0.0).to(tl.float32)
    return row


@triton.jit(
    do_not_specialize=["count", "length", "variance_size"],
    do_not_specialize_on_alignment=["x", "residual", "weight", "out", "summed"],
)
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    summed,
    count,
    length,
    variance_size,
    eps,
    has_residual: tl.constexpr,
    has_weight: tl.constexpr,
    block: tl.constexpr,
):
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * length
        acc = tl.zeros((block,), tl.float32)
        for offset in range(0, variance_size, block):
            places = offset + tl.arange(0, block)
            value = _summed(x + start, residual + start, places, places < variance_size, has_residual)
            acc += value * value
        mean = tl.sum(acc) / variance_size
        scale = 1.0 / tl.sqrt(mean + eps)
        for offset in range(0, length, block):
            places = offset + tl.arange(0, block)
            mask = places < length
            value = _summed(x + start, residual + start, places, mask, has_residual)
            if has_residual:
                tl.store(summed + start + places, value.to(summed.dtype.element_ty), mask=mask)
            value *= scale
            if has_weight:
                # Rounded to the weight's dtype before and after the product, as a multiplication in that dtype is.
                factor = tl.load(weight + places, mask=mask, other=0.0)
                value = (value.to(factor.dtype).to(tl.float32) * factor.to(tl.float32)).to(factor.dtype)
            tl.store(out + start + places, value.to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None, variance_size: int | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    check_covered("RMSNorm", x, weight, residual)
    length = x.shape[-1]
    rows = x.contiguous()
    out = torch.empty_like(rows)
    summed = None if residual is None else torch.empty_like(rows)
    largest = LARGEST_BLOCK if residual is None else LARGEST_BLOCK_WITH_RESIDUAL
    if out.numel():
        with on(x.device):
            count = out.numel() // length
            # What is absent is never read; its place is taken by a tensor whose dtype adds no variant.
            _rms_norm_kernel[vector_grid(count, x.device)](
                rows,
                rows if residual is None else residual.contiguous(),
                rows if weight is None else weight.contiguous(),
                out,
                out if summed is None else summed,
                count,
                length,
                variance_size or length,
                float(eps),
                has_residual=residual is not None,
                has_weight=weight is not None,
                block=layout_for(length, largest).block,
            )
    return out if summed is None else (out, summed)
