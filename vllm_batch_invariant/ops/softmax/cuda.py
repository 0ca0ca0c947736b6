"""softmax and log_softmax on a GPU, in Triton: a program has a whole row, or one of the chunks of a long one.

A long row is read twice. First each chunk leaves its maximum and the sum of its exponentials relative to that, then
every program merges those of its row and writes its chunk (online softmax: Milakov and Gimelshein 2018,
arXiv:1805.02867).
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ...errors import NotCovered
from ..common.rows import normalise_dims, rows_back
from ..common.triton_rows import RowLayout, aligned_rows, on_device_of

LONGEST_WHOLE = 1 << 14
"""Elements of the longest row that one program holds; a part of the reduction."""
CHUNK = 1 << 11
"""Elements of a chunk, so that the row of one request spreads over a GPU; a part of the reduction."""
_MANY_CHUNKS = 128
"""More than that only where chunks would be longer than :data:`LONGEST_WHOLE`."""


def layout_for(length: int) -> RowLayout:
    """How a program holds a row or a chunk of ``block`` elements, decided by the row's length alone."""
    if length <= LONGEST_WHOLE:
        block = max(triton.next_power_of_2(length), 32)
    else:
        block = min(max(triton.next_power_of_2(triton.cdiv(length, _MANY_CHUNKS)), CHUNK), LONGEST_WHOLE)
    return RowLayout(block, min(max(block // 512, 1), 16))


@triton.jit
def _softmax_kernel(rows, out, length, log: tl.constexpr, block: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * length
    places = tl.arange(0, block)
    x = tl.load(rows + start + places, mask=places < length, other=-float("inf")).to(tl.float32)
    top = tl.max(x)
    exponentials = tl.exp(x - top)
    total = tl.sum(exponentials)
    y = (x - top) - tl.log(total) if log else exponentials / total
    tl.store(out + start + places, y.to(out.dtype.element_ty), mask=places < length)


@triton.jit
def _chunk_kernel(rows, tops, totals, length, chunks: tl.constexpr, block: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    places = program % chunks * block + tl.arange(0, block)
    x = tl.load(rows + program // chunks * length + places, mask=places < length, other=-float("inf")).to(tl.float32)
    top = tl.max(x)
    tl.store(tops + program, top)
    # A chunk of nothing but -inf has no exponentials; NaN would be its own and not the row's.
    tl.store(totals + program, tl.sum(tl.exp(x - tl.where(top == -float("inf"), 0.0, top))))


@triton.jit
def _merged_softmax_kernel(
    rows, out, tops, totals, length, log: tl.constexpr, chunks: tl.constexpr, parts: tl.constexpr, block: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    row = program // chunks
    places = program % chunks * block + tl.arange(0, block)
    x = tl.load(rows + row * length + places, mask=places < length, other=-float("inf")).to(tl.float32)
    part = tl.arange(0, parts)
    part_tops = tl.load(tops + row * chunks + part, mask=part < chunks, other=-float("inf"))
    part_totals = tl.load(totals + row * chunks + part, mask=part < chunks, other=0.0)
    top = tl.max(part_tops)
    total = tl.sum(part_totals * tl.exp(part_tops - top))
    y = (x - top) - tl.log(total) if log else tl.exp(x - top) / total
    tl.store(out + row * length + places, y.to(out.dtype.element_ty), mask=places < length)


@triton.jit
def _terms(grads, outputs, places, length, log: tl.constexpr):
    """Gradient and output of a row at ``places``, and what the gradient of the input adds up of them."""
    g = tl.load(grads + places, mask=places < length, other=0.0).to(tl.float32)
    p = tl.load(outputs + places, mask=places < length, other=0.0).to(tl.float32)
    return g, p, g if log else g * p


@triton.jit
def _input_gradient(g, p, total, log: tl.constexpr):
    return g - tl.exp(p) * total if log else g * p - p * total


@triton.jit
def _backward_kernel(grads, outputs, out, length, log: tl.constexpr, block: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * length
    places = tl.arange(0, block)
    g, p, terms = _terms(grads + start, outputs + start, places, length, log)
    y = _input_gradient(g, p, tl.sum(terms), log)
    tl.store(out + start + places, y.to(out.dtype.element_ty), mask=places < length)


@triton.jit
def _chunk_backward_kernel(
    grads, outputs, totals, length, log: tl.constexpr, chunks: tl.constexpr, block: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    start = program // chunks * length
    places = program % chunks * block + tl.arange(0, block)
    _, _, terms = _terms(grads + start, outputs + start, places, length, log)
    tl.store(totals + program, tl.sum(terms))


@triton.jit
def _merged_backward_kernel(
    grads,
    outputs,
    out,
    totals,
    length,
    log: tl.constexpr,
    chunks: tl.constexpr,
    parts: tl.constexpr,
    block: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program // chunks
    places = program % chunks * block + tl.arange(0, block)
    g, p, _ = _terms(grads + row * length, outputs + row * length, places, length, log)
    part = tl.arange(0, parts)
    total = tl.sum(tl.load(totals + row * chunks + part, mask=part < chunks, other=0.0))
    y = _input_gradient(g, p, total, log)
    tl.store(out + row * length + places, y.to(out.dtype.element_ty), mask=places < length)


def _forward(x: torch.Tensor, out: torch.Tensor, log: bool) -> None:
    """Write the rows of ``out`` from those of ``x``."""
    count, length = out.shape
    layout = layout_for(length)
    block, warps = layout.block, layout.warps
    if length <= LONGEST_WHOLE:
        _softmax_kernel[(count,)](x, out, length, log=log, block=block, num_warps=warps)
        return
    chunks = triton.cdiv(length, block)
    # Two allocations: the alignment of a part of one would follow the number of rows, and the compiled code with it.
    tops, totals = (torch.empty(count, chunks, dtype=torch.float32, device=x.device) for _ in range(2))
    grid, parts = (count * chunks,), triton.next_power_of_2(chunks)
    _chunk_kernel[grid](x, tops, totals, length, chunks=chunks, block=block, num_warps=warps)
    _merged_softmax_kernel[grid](
        x, out, tops, totals, length, log=log, chunks=chunks, parts=parts, block=block, num_warps=warps
    )


def _backward(grads: torch.Tensor, outputs: torch.Tensor, out: torch.Tensor, log: bool) -> None:
    """Write the rows of ``out``, the gradient of the input."""
    count, length = out.shape
    layout = layout_for(length)
    block, warps = layout.block, layout.warps
    if length <= LONGEST_WHOLE:
        _backward_kernel[(count,)](grads, outputs, out, length, log=log, block=block, num_warps=warps)
        return
    chunks = triton.cdiv(length, block)
    totals = torch.empty(count, chunks, dtype=torch.float32, device=out.device)
    grid, parts = (count * chunks,), triton.next_power_of_2(chunks)
    _chunk_backward_kernel[grid](grads, outputs, totals, length, log=log, chunks=chunks, block=block, num_warps=warps)
    _merged_backward_kernel[grid](
        grads, outputs, out, totals, length, log=log, chunks=chunks, parts=parts, block=block, num_warps=warps
    )


def _over_rows(
    launch: Callable[..., None], dim: int, dtype: torch.dtype, log: bool, *tensors: torch.Tensor
) -> torch.Tensor:
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotCovered(f"softmax in {tensor.dtype}", "its exp is defined in fp32", "use fp32, bf16 or fp16")
    like = tensors[0]
    dims = normalise_dims(dim, like.dim())
    # Rows that are widened first have the bits of wide ones: a kernel adds in an order that follows what it loads.
    rows = [aligned_rows(tensor, dims, torch.promote_types(tensor.dtype, dtype)) for tensor in tensors]
    out = torch.empty_like(rows[0], dtype=dtype)
    if out.numel():
        with on_device_of(out):
            launch(*rows, out, log)
    return rows_back(out, like, dims)


def softmax(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """See the operation's package."""
    return _over_rows(_forward, dim, dtype or x.dtype, False, x)


def log_softmax(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """See the operation's package."""
    return _over_rows(_forward, dim, dtype or x.dtype, True, x)


def softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Gradient of softmax: output * (grad - sum(grad * output))."""
    return _over_rows(_backward, dim, dtype, False, grad, output)


def log_softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Gradient of log_softmax: grad - exp(output) * sum(grad)."""
    return _over_rows(_backward, dim, dtype, True, grad, output)
