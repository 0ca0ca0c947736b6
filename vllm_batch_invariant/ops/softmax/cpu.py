"""softmax and log_softmax on the CPU, in numba.

m = max(x),  l = sum(exp(x - m)),  softmax = exp(x - m) / l,  log_softmax = (x - m) - log(l)
"""

import numpy as np
import torch
from numba import njit, prange

from ...errors import NotCovered
from ..common.numba_exact_math import ln_of_integer
from ..common.numba_math import LANES, exp32, row_sum
from ..common.numba_rows import RowKernel
from ..common.rows import as_rows, normalise_dims, row_length, rows_back
from .reduction import SoftmaxReduction


@njit(inline="always")
def _exponentials(x, y):
    """Write exp(x - max(x)) to y; returns max(x)."""
    m = x[0]
    for i in range(1, x.size):
        m = max(m, x[i])
    for i in range(x.size):
        y[i] = exp32(x[i] - m)
    return m


def _softmax_kernel(rows, out):
    for row in prange(rows.shape[0]):
        x, y = rows[row], out[row]
        _exponentials(x, y)
        l = row_sum(y, np.empty(LANES, np.float32))
        for i in range(x.size):
            y[i] = y[i] / l


def _log_softmax_kernel(rows, out):
    for row in prange(rows.shape[0]):
        x, y = rows[row], out[row]
        m = _exponentials(x, y)
        l = row_sum(y, np.empty(LANES, np.float32))
        log_l = l if l != l else np.float32(ln_of_integer(l))
        for i in range(x.size):
            y[i] = (x[i] - m) - log_l


def _softmax_backward_kernel(grads, outputs, out):
    for row in prange(grads.shape[0]):
        g, p, y = grads[row], outputs[row], out[row]
        for i in range(g.size):
            y[i] = g[i] * p[i]
        total = row_sum(y, np.empty(LANES, np.float32))
        for i in range(g.size):
            y[i] = y[i] - p[i] * total


def _log_softmax_backward_kernel(grads, outputs, out):
    for row in prange(grads.shape[0]):
        g, p, y = grads[row], outputs[row], out[row]
        total = row_sum(g, np.empty(LANES, np.float32))
        for i in range(g.size):
            y[i] = g[i] - exp32(p[i]) * total


_softmax = RowKernel(_softmax_kernel)
_log_softmax = RowKernel(_log_softmax_kernel)
_softmax_backward = RowKernel(_softmax_backward_kernel)
_log_softmax_backward = RowKernel(_log_softmax_backward_kernel)


def _over_rows(kernel: RowKernel, dim: int, dtype: torch.dtype, *tensors: torch.Tensor) -> torch.Tensor:
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotCovered(f"softmax in {tensor.dtype}", "its exp is defined in fp32", "use fp32, bf16 or fp16")
    like = tensors[0]
    dims = normalise_dims(dim, like.dim())
    reduction = SoftmaxReduction.of_device("cpu", row_length(like, dims), torch.promote_types(like.dtype, dtype))
    rows = [as_rows(tensor, dims, reduction.accumulate) for tensor in tensors]
    out = torch.empty_like(rows[0])
    if out.numel():
        kernel(out.numel(), *rows, out)
    return rows_back(out, like, dims).to(dtype)


def softmax(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """See the operation's package."""
    return _over_rows(_softmax, dim, dtype or x.dtype, x)


def log_softmax(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """See the operation's package."""
    return _over_rows(_log_softmax, dim, dtype or x.dtype, x)


def softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Gradient of softmax: output * (grad - sum(grad * output))."""
    return _over_rows(_softmax_backward, dim, dtype, grad, output)


def log_softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Gradient of log_softmax: grad - exp(output) * sum(grad)."""
    return _over_rows(_log_softmax_backward, dim, dtype, grad, output)
