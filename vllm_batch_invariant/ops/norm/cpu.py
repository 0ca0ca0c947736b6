"""RMSNorm on the CPU, in numba: y = x * rsqrt(mean(x[:variance_size]**2) + eps) * weight."""

import numpy as np
import torch
from numba import prange

from ...errors import NotCovered
from ..common.numba_math import LANES, row_sum
from ..common.numba_rows import RowKernel
from ..pointwise import elementwise
from .reduction import NormReduction


def _normalise_kernel(rows, out, eps, variance_size):
    for row in prange(rows.shape[0]):
        x, y = rows[row], out[row]
        for i in range(variance_size):
            y[i] = x[i] * x[i]
        mean = row_sum(y[:variance_size], np.empty(LANES, np.float32)) / np.float32(variance_size)
        rstd = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
        for i in range(x.size):
            y[i] = x[i] * rstd


_normalise = RowKernel(_normalise_kernel)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None, variance_size: int | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotCovered(f"RMSNorm in {x.dtype}", "its accumulator is fp32", "use fp32, bf16 or fp16")
    reduction = NormReduction.of_device("cpu", x.shape[-1], x.dtype)
    wide = x.to(reduction.accumulate)
    if residual is not None:
        wide = wide + residual.to(reduction.accumulate)
    rows = wide.reshape(x.shape[:-1].numel(), reduction.length).contiguous()
    out = torch.empty_like(rows)
    _normalise(rows.numel(), rows, out, eps, variance_size or reduction.length)
    if weight is not None:
        out = out.to(weight.dtype) * weight
    normalised = out.to(x.dtype).reshape(x.shape)
    return normalised if residual is None else (normalised, wide.to(x.dtype))


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
