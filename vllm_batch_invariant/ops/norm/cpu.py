"""RMSNorm on the CPU, in numba: y = x * rsqrt(mean(x[:variance_size]**2) + eps) * weight."""

import numpy as np
import torch
from numba import prange

from ...errors import NotCovered
from ..common.numba_bf16 import rounded, widened
from ..common.numba_math import LANES, row_sum
from ..common.numba_rows import ELEMENTS, RowKernel, array_at
from ..pointwise import elementwise
from .reduction import NormReduction


def _rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, of_x, of_w, rows, length, eps, variance_size):
    """Normalise packed rows of x, words of bf16 or fp32, to ``out``; with a residual, its sum with x goes to ``total``.
    Addresses of what is not there are 0.
    """
    for row in prange(rows):
        start = row * length * of_x.itemsize
        x, out = array_at(x_ptr + start, length, of_x), array_at(out_ptr + start, length, of_x)
        wide, squares = np.empty(length, np.float32), np.empty(variance_size, np.float32)
        for i in range(length):
            wide[i] = widened(x[i])
        if residual_ptr != 0:
            residual, total = array_at(residual_ptr + start, length, of_x), array_at(total_ptr + start, length, of_x)
            for i in range(length):
                wide[i] += widened(residual[i])
                total[i] = rounded(wide[i], total)
        for i in range(variance_size):
            squares[i] = wide[i] * wide[i]
        mean = row_sum(squares, np.empty(LANES, np.float32)) / np.float32(variance_size)
        rstd = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
        if weight_ptr != 0:
            weight = array_at(weight_ptr, length, of_w)
            for i in range(length):
                normalised = widened(rounded(wide[i] * rstd, weight))
                out[i] = rounded(widened(rounded(normalised * widened(weight[i]), weight)), out)
        else:
            for i in range(length):
                out[i] = rounded(wide[i] * rstd, out)


_rms_norm = RowKernel(_rms_norm_kernel)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None, variance_size: int | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotCovered(f"RMSNorm in {x.dtype}", "its accumulator is fp32", "use fp32, bf16 or fp16")
    length = x.shape[-1]
    of_weight = torch.float32 if weight is None else weight.dtype
    known = {x.dtype, of_weight} <= {torch.bfloat16, torch.float32}
    if not known or (residual is not None and residual.dtype != x.dtype):
        return _rms_norm_by_parts(x, weight, eps, residual, variance_size)
    x = x.contiguous()
    out, w_ptr, residual_ptr, total, total_ptr = torch.empty_like(x), 0, 0, None, 0
    if weight is not None:
        weight = weight.contiguous()
        w_ptr = weight.data_ptr()
    if residual is not None:
        residual, total = residual.contiguous(), torch.empty_like(x)
        residual_ptr, total_ptr = residual.data_ptr(), total.data_ptr()
    elements, pointers = x.numel(), (x.data_ptr(), residual_ptr, w_ptr, out.data_ptr(), total_ptr)
    of_x, of_w = ELEMENTS[x.dtype], ELEMENTS[of_weight]
    _rms_norm(elements, *pointers, of_x, of_w, elements // length, length, eps, variance_size or length)
    return out if total is None else (out, total)


def _rms_norm_by_parts(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None, variance_size: int | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The same of dtypes that the kernel does not know, as fp16."""
    wide = x.float() if residual is None else x.float() + residual.float()
    out = rms_norm(wide, None, eps, None, variance_size)
    assert isinstance(out, torch.Tensor)  # there is no residual
    out = (out if weight is None else out.to(weight.dtype) * weight).to(x.dtype)
    return out if residual is None else (out, wide.to(x.dtype))


def gated_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, gate: torch.Tensor, activation: str, norm_before_gate: bool
) -> torch.Tensor:
    """See the operation's package."""
    reduction = NormReduction.of_device("cpu", x.shape[-1], x.dtype, False, activation, norm_before_gate)
    rows, factor = x.to(reduction.accumulate), elementwise(activation, gate.to(reduction.accumulate))
    if not reduction.norm_before_gate:
        rows = rows * factor
    normalised = rms_norm(rows, None, eps, None, None)
    assert isinstance(normalised, torch.Tensor)  # there is no residual
    normalised = normalised * weight.to(reduction.accumulate)
    return (normalised * factor if reduction.norm_before_gate else normalised).to(x.dtype)
