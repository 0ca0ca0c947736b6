"""RMSNorm on the CPU, in numba."""

import numpy as np
import torch
from numba import prange

from ...errors import NotCovered
from ..common.numba_math import LANES, row_sum
from ..common.numba_rows import RowKernel


def _normalise_kernel(rows, out, eps, variance_size):
    for row in prange(rows.shape[0]):
        x, y = rows[row], out[row]
        for i in range(variance_size):
            y[i] = x[i] * x[i]
        mean = row_sum(y[:variance_size], np.empty(LANES, np.float32)) / np.float32(variance_size)
        scale = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
        for i in range(x.size):
            y[i] = x[i] * scale


_normalise = RowKernel(_normalise_kernel)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None, variance_size: int | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotCovered(f"RMSNorm in {x.dtype}", "its accumulator is fp32", "use fp32, bf16 or fp16")
    summed = x.float() if residual is None else x.float() + residual.float()
    rows = summed.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    _normalise(rows.numel(), rows, out, eps, variance_size or x.shape[-1])
    if weight is not None:
        out = out.to(weight.dtype) * weight
    normalised = out.to(x.dtype).reshape(x.shape)
    return normalised if residual is None else (normalised, summed.to(x.dtype))
