"""RMSNorm on an Ascend NPU, in triton-ascend: a program walks one row after the other.

    y = x * rsqrt(mean(x[:variance_size]**2) + eps) * weight, of x + residual where there is one

Compiled and simulated, never run on hardware (tests/ascend/offline).
"""

import torch
import triton
import triton.language as tl

from . import reductions
from .rows import check_covered, on, vector_grid


@triton.jit
def _load_row(x_ptr, residual_ptr, offs, mask, HAS_RESIDUAL: tl.constexpr):
    """x + residual of a row at ``offs``, unrounded: [BLOCK] fp32."""
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit(
    do_not_specialize=["num_rows", "length", "variance_size"],
    do_not_specialize_on_alignment=["x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "residual_out_ptr"],
)
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    num_rows,
    length,
    variance_size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * length
        acc = tl.zeros((BLOCK,), tl.float32)
        for offset in range(0, variance_size, BLOCK):
            offs = offset + tl.arange(0, BLOCK)
            x = _load_row(x_ptr + start, residual_ptr + start, offs, offs < variance_size, HAS_RESIDUAL)
            acc += x * x
        mean = tl.sum(acc) / variance_size
        rstd = 1.0 / tl.sqrt(mean + eps)
        for offset in range(0, length, BLOCK):
            offs = offset + tl.arange(0, BLOCK)
            mask = offs < length
            x = _load_row(x_ptr + start, residual_ptr + start, offs, mask, HAS_RESIDUAL)
            if HAS_RESIDUAL:
                tl.store(residual_out_ptr + start + offs, x.to(residual_out_ptr.dtype.element_ty), mask=mask)
            x *= rstd
            if HAS_WEIGHT:
                # Rounded to the weight's dtype before and after the product, as a multiplication in that dtype is.
                weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
                x = (x.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)
            tl.store(out_ptr + start + offs, x.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None, variance_size: int | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    check_covered("RMSNorm", x, weight, residual)
    length = x.shape[-1]
    rows = x.contiguous()
    out = torch.empty_like(rows)
    residual_out = None if residual is None else torch.empty_like(rows)
    reduction = reductions.norm(length, x.dtype, residual is not None)
    if out.numel():
        with on(x.device):
            num_rows = out.numel() // length
            # What is absent is never read; its place is taken by a tensor whose dtype adds no variant.
            _rms_norm_kernel[vector_grid(num_rows, x.device)](
                rows,
                rows if residual is None else residual.contiguous(),
                rows if weight is None else weight.contiguous(),
                out,
                out if residual_out is None else residual_out,
                num_rows,
                length,
                variance_size or length,
                float(eps),
                HAS_RESIDUAL=residual is not None,
                HAS_WEIGHT=weight is not None,
                BLOCK=reduction.block,
            )
    return out if residual_out is None else (out, residual_out)
