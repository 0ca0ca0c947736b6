"""softmax and log_softmax on an Ascend NPU, in triton-ascend: a program walks one row after the other.

Compiled and simulated, never run on hardware (tests/npu/offline).
"""

import torch
import triton
import triton.language as tl

from ..common.npu_cores import on, vector_grid
from ..common.npu_rows import check_covered, layout_for
from ..common.rows import as_rows, normalise_dims, rows_back

LARGEST_BLOCK = 4096


@triton.jit(do_not_specialize=["count", "length"], do_not_specialize_on_alignment=["rows", "out"])
def _softmax_kernel(rows, out, count, length, log: tl.constexpr, block: tl.constexpr):
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * length
        largest = tl.full((block,), -float("inf"), tl.float32)
        for offset in range(0, length, block):
            places = offset + tl.arange(0, block)
            x = tl.load(rows + start + places, mask=places < length, other=-float("inf")).to(tl.float32)
            largest = tl.maximum(largest, x)
        top = tl.max(largest)
        acc = tl.zeros((block,), tl.float32)
        for offset in range(0, length, block):
            places = offset + tl.arange(0, block)
            x = tl.load(rows + start + places, mask=places < length, other=-float("inf")).to(tl.float32)
            acc += tl.exp(x - top)
        total = tl.sum(acc)
        log_total = tl.log(total)
        for offset in range(0, length, block):
            places = offset + tl.arange(0, block)
            x = tl.load(rows + start + places, mask=places < length, other=-float("inf")).to(tl.float32)
            y = (x - top) - log_total if log else tl.exp(x - top) / total
            tl.store(out + start + places, y.to(out.dtype.element_ty), mask=places < length)


@triton.jit(do_not_specialize=["count", "length"], do_not_specialize_on_alignment=["grads", "outputs", "out"])
def _softmax_backward_kernel(grads, outputs, out, count, length, log: tl.constexpr, block: tl.constexpr):
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * length
        acc = tl.zeros((block,), tl.float32)
        for offset in range(0, length, block):
            places = offset + tl.arange(0, block)
            g = tl.load(grads + start + places, mask=places < length, other=0.0).to(tl.float32)
            if log:
                acc += g
            else:
                acc += g * tl.load(outputs + start + places, mask=places < length, other=0.0).to(tl.float32)
        total = tl.sum(acc)
        for offset in range(0, length, block):
            places = offset + tl.arange(0, block)
            g = tl.load(grads + start + places, mask=places < length, other=0.0).to(tl.float32)
            p = tl.load(outputs + start + places, mask=places < length, other=0.0).to(tl.float32)
            y = g - tl.exp(p) * total if log else g * p - p * total
            tl.store(out + start + places, y.to(out.dtype.element_ty), mask=places < length)


def _over_rows(
    kernel: triton.JITFunction, dim: int, dtype: torch.dtype, log: bool, *tensors: torch.Tensor
) -> torch.Tensor:
    check_covered("softmax", *tensors)
    like = tensors[0]
    dims = normalise_dims(dim, like.dim())
    rows = [as_rows(tensor, dims, tensor.dtype) for tensor in tensors]
    out = torch.empty_like(rows[0], dtype=dtype)
    check_covered("softmax", out)
    if out.numel():
        count, length = out.shape
        with on(out.device):
            kernel[vector_grid(count, out.device)](
                *rows, out, count, length, log=log, block=layout_for(length, LARGEST_BLOCK).block
            )
    return rows_back(out, like, dims)


def softmax(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """See the operation's package."""
    return _over_rows(_softmax_kernel, dim, dtype or x.dtype, False, x)


def log_softmax(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """See the operation's package."""
    return _over_rows(_softmax_kernel, dim, dtype or x.dtype, True, x)


def softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Gradient of softmax: output * (grad - sum(grad * output))."""
    return _over_rows(_softmax_backward_kernel, dim, dtype, False, grad, output)


def log_softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Gradient of log_softmax: grad - exp(output) * sum(grad)."""
    return _over_rows(_softmax_backward_kernel, dim, dtype, True, grad, output)
