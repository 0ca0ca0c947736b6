"""RMSNorm on a GPU, in Triton: one program a row."""

import torch
import triton
import triton.language as tl

from ...errors import NotCovered
from ..triton_rows import aligned, layout_for


@triton.jit
def _summed(x, residual, places, mask, has_residual: tl.constexpr):
    """x + residual of a row at ``places``, unrounded."""
    row = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    if has_residual:
        row += tl.load(residual + places, mask=mask, other=0.0).to(tl.float32)
    return row


@triton.jit(do_not_specialize=["variance_size"])
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    summed,
    length,
    variance_size,
    eps,
    has_residual: tl.constexpr,
    has_weight: tl.constexpr,
    block: tl.constexpr,
):
    start_of_row = tl.program_id(0).to(tl.int64) * length
    x += start_of_row
    out += start_of_row
    if has_residual:
        residual += start_of_row
        summed += start_of_row
    acc = tl.zeros((block,), tl.float32)
    for start in range(0, variance_size, block):
        places = start + tl.arange(0, block)
        row = _summed(x, residual, places, places < variance_size, has_residual)
        acc += row * row
    mean = tl.div_rn(tl.sum(acc), variance_size.to(tl.float32))
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    for start in range(0, length, block):
        places = start + tl.arange(0, block)
        mask = places < length
        row = _summed(x, residual, places, mask, has_residual)
        if has_residual:
            tl.store(summed + places, row.to(summed.dtype.element_ty), mask=mask)
        row *= scale
        if has_weight:
            # Rounded to the weight's dtype before and after the product, as a multiplication in that dtype is.
            factor = tl.load(weight + places, mask=mask, other=0.0)
            row = (row.to(factor.dtype).to(tl.float32) * factor.to(tl.float32)).to(factor.dtype)
        tl.store(out + places, row.to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None, variance_size: int | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    for tensor in (x, weight, residual):
        if tensor is not None and tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotCovered(f"RMSNorm in {tensor.dtype}", "its accumulator is fp32", "use fp32, bf16 or fp16")
    length = x.shape[-1]
    rows = aligned(x)
    out = torch.empty_like(rows)
    summed = None if residual is None else torch.empty_like(rows)
    layout = layout_for(length)
    if out.numel():
        with torch.cuda.device_of(x):
            _rms_norm_kernel[(out.numel() // length,)](
                rows,
                None if residual is None else aligned(residual),
                None if weight is None else aligned(weight),
                out,
                summed,
                length,
                variance_size or length,
                eps,
                has_residual=residual is not None,
                has_weight=weight is not None,
                block=layout.block,
                num_warps=layout.warps,
            )
    return out if summed is None else (out, summed)
