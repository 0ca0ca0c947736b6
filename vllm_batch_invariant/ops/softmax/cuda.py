"""softmax and log_softmax on a GPU, in Triton: one program a row."""

import torch
import triton
import triton.language as tl

from ...errors import NotCovered
from ..rows import normalise_dims, rows_back
from ..triton_rows import aligned_rows, layout_for, on_device_of


@triton.jit
def _softmax_kernel(rows, out, length, log: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    rows += row * length
    out += row * length
    largest = tl.full((block,), -float("inf"), tl.float32)
    for start in range(0, length, block):
        places = start + tl.arange(0, block)
        x = tl.load(rows + places, mask=places < length, other=-float("inf")).to(tl.float32)
        largest = tl.maximum(largest, x)
    top = tl.max(largest)
    acc = tl.zeros((block,), tl.float32)
    for start in range(0, length, block):
        places = start + tl.arange(0, block)
        x = tl.load(rows + places, mask=places < length, other=-float("inf")).to(tl.float32)
        acc += tl.exp(x - top)
    total = tl.sum(acc)
    log_total = tl.log(total)
    for start in range(0, length, block):
        places = start + tl.arange(0, block)
        x = tl.load(rows + places, mask=places < length, other=-float("inf")).to(tl.float32)
        y = (x - top) - log_total if log else tl.exp(x - top) / total
        tl.store(out + places, y.to(out.dtype.element_ty), mask=places < length)


@triton.jit
def _softmax_backward_kernel(grads, outputs, out, length, log: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    grads += row * length
    outputs += row * length
    out += row * length
    acc = tl.zeros((block,), tl.float32)
    for start in range(0, length, block):
        places = start + tl.arange(0, block)
        g = tl.load(grads + places, mask=places < length, other=0.0).to(tl.float32)
        if log:
            acc += g
        else:
            acc += g * tl.load(outputs + places, mask=places < length, other=0.0).to(tl.float32)
    total = tl.sum(acc)
    for start in range(0, length, block):
        places = start + tl.arange(0, block)
        g = tl.load(grads + places, mask=places < length, other=0.0).to(tl.float32)
        p = tl.load(outputs + places, mask=places < length, other=0.0).to(tl.float32)
        y = g - tl.exp(p) * total if log else g * p - p * total
        tl.store(out + places, y.to(out.dtype.element_ty), mask=places < length)


def _over_rows(
    kernel: triton.JITFunction, dim: int, dtype: torch.dtype, log: bool, *tensors: torch.Tensor
) -> torch.Tensor:
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotCovered(f"softmax in {tensor.dtype}", "its exp is defined in fp32", "use fp32, bf16 or fp16")
    like = tensors[0]
    dims = normalise_dims(dim, like.dim())
    rows = [aligned_rows(tensor, dims, tensor.dtype) for tensor in tensors]
    out = torch.empty_like(rows[0], dtype=dtype)
    if out.numel():
        count, length = out.shape
        layout = layout_for(length)
        with on_device_of(out):
            kernel[(count,)](*rows, out, length, log=log, block=layout.block, num_warps=layout.warps)
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
