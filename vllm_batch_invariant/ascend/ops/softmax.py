"""softmax and log_softmax on an Ascend NPU, in triton-ascend: a program walks one row after the other.

    m = max(x),  l = sum(exp(x - m)),  softmax = exp(x - m) / l,  log_softmax = (x - m) - log(l)

Compiled and simulated, never run on hardware (tests/ascend/offline).
"""

import torch
import triton
import triton.language as tl

from ...ops.common.rows import as_rows, normalise_dims, rows_back
from . import reductions
from .rows import check_covered, on, vector_grid


@triton.jit(do_not_specialize=["num_rows", "length"], do_not_specialize_on_alignment=["x_ptr", "out_ptr"])
def _softmax_kernel(x_ptr, out_ptr, num_rows, length, LOG: tl.constexpr, BLOCK: tl.constexpr):
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * length
        block_m = tl.full((BLOCK,), -float("inf"), tl.float32)
        for offset in range(0, length, BLOCK):
            offs = offset + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + start + offs, mask=offs < length, other=-float("inf")).to(tl.float32)
            block_m = tl.maximum(block_m, x)
        m = tl.max(block_m)
        acc = tl.zeros((BLOCK,), tl.float32)
        for offset in range(0, length, BLOCK):
            offs = offset + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + start + offs, mask=offs < length, other=-float("inf")).to(tl.float32)
            acc += tl.exp(x - m)
        l = tl.sum(acc)
        log_l = tl.log(l)
        for offset in range(0, length, BLOCK):
            offs = offset + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + start + offs, mask=offs < length, other=-float("inf")).to(tl.float32)
            y = (x - m) - log_l if LOG else tl.exp(x - m) / l
            tl.store(out_ptr + start + offs, y.to(out_ptr.dtype.element_ty), mask=offs < length)


@triton.jit(
    do_not_specialize=["num_rows", "length"], do_not_specialize_on_alignment=["grad_ptr", "output_ptr", "out_ptr"]
)
def _softmax_backward_kernel(grad_ptr, output_ptr, out_ptr, num_rows, length, LOG: tl.constexpr, BLOCK: tl.constexpr):
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * length
        acc = tl.zeros((BLOCK,), tl.float32)
        for offset in range(0, length, BLOCK):
            offs = offset + tl.arange(0, BLOCK)
            grad = tl.load(grad_ptr + start + offs, mask=offs < length, other=0.0).to(tl.float32)
            if LOG:
                acc += grad
            else:
                acc += grad * tl.load(output_ptr + start + offs, mask=offs < length, other=0.0).to(tl.float32)
        total = tl.sum(acc)
        for offset in range(0, length, BLOCK):
            offs = offset + tl.arange(0, BLOCK)
            grad = tl.load(grad_ptr + start + offs, mask=offs < length, other=0.0).to(tl.float32)
            output = tl.load(output_ptr + start + offs, mask=offs < length, other=0.0).to(tl.float32)
            y = grad - tl.exp(output) * total if LOG else grad * output - output * total
            tl.store(out_ptr + start + offs, y.to(out_ptr.dtype.element_ty), mask=offs < length)


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
        num_rows, length = out.shape
        reduction = reductions.softmax(length, rows[0].dtype)
        with on(out.device):
            kernel[vector_grid(num_rows, out.device)](*rows, out, num_rows, length, LOG=log, BLOCK=reduction.block)
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
