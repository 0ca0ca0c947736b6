"""softmax and log_softmax on a GPU, in Triton: a program has a whole row, or one of the chunks of a long one.

    m = max(x),  l = sum(exp(x - m)),  softmax = exp(x - m) / l,  log_softmax = (x - m) - log(l)

A long row is read twice. First each chunk leaves its maximum and the sum of its exponentials relative to that, then
every program merges those of its row and writes its chunk (online softmax: Milakov and Gimelshein 2018,
arXiv:1805.02867).
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ...errors import NotCovered
from ..common.launch import launch
from ..common.rows import normalise_dims, rows_back
from ..common.triton_rows import aligned_rows, row_sum
from .reduction import SoftmaxReduction


@triton.jit
def _softmax_kernel(x_ptr, out_ptr, length, LOG: tl.constexpr, BLOCK: tl.constexpr, NUM_WARPS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * length
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + start + offs, mask=offs < length, other=-float("inf")).to(tl.float32)  # [BLOCK]
    m = tl.max(x)
    p = tl.exp(x - m)
    l = row_sum(p, 32 * NUM_WARPS)
    y = (x - m) - tl.log(l) if LOG else p / l
    tl.store(out_ptr + start + offs, y.to(out_ptr.dtype.element_ty), mask=offs < length)


@triton.jit
def _chunk_kernel(x_ptr, m_ptr, l_ptr, length, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Write a chunk's maximum and the sum of its exponentials: [rows, NUM_CHUNKS] each."""
    program = tl.program_id(0).to(tl.int64)
    offs = program % NUM_CHUNKS * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + program // NUM_CHUNKS * length + offs, mask=offs < length, other=-float("inf"))  # [BLOCK]
    x = x.to(tl.float32)
    m = tl.max(x)
    tl.store(m_ptr + program, m)
    # A chunk of nothing but -inf has no exponentials; NaN would be its own and not the row's.
    tl.store(l_ptr + program, row_sum(tl.exp(x - tl.where(m == -float("inf"), 0.0, m)), 32 * NUM_WARPS))


@triton.jit
def _merged_softmax_kernel(
    x_ptr,
    out_ptr,
    m_ptr,
    l_ptr,
    length,
    LOG: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program // NUM_CHUNKS
    offs = program % NUM_CHUNKS * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * length + offs, mask=offs < length, other=-float("inf")).to(tl.float32)  # [BLOCK]
    chunk = tl.arange(0, PADDED_CHUNKS)
    chunk_m = tl.load(m_ptr + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=-float("inf"))  # [PADDED_CHUNKS]
    chunk_l = tl.load(l_ptr + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=0.0)  # [PADDED_CHUNKS]
    m = tl.max(chunk_m)
    l = row_sum(chunk_l * tl.exp(chunk_m - m), 32 * NUM_WARPS)
    y = (x - m) - tl.log(l) if LOG else tl.exp(x - m) / l
    tl.store(out_ptr + row * length + offs, y.to(out_ptr.dtype.element_ty), mask=offs < length)


@triton.jit
def _load_terms(grad_ptr, output_ptr, offs, length, LOG: tl.constexpr):
    """Gradient and output of a row, and what the gradient of the input adds up of them: [BLOCK] fp32 each."""
    grad = tl.load(grad_ptr + offs, mask=offs < length, other=0.0).to(tl.float32)
    output = tl.load(output_ptr + offs, mask=offs < length, other=0.0).to(tl.float32)
    return grad, output, grad if LOG else grad * output


@triton.jit
def _input_gradient(grad, output, total, LOG: tl.constexpr):
    return grad - tl.exp(output) * total if LOG else grad * output - output * total


@triton.jit
def _backward_kernel(
    grad_ptr, output_ptr, out_ptr, length, LOG: tl.constexpr, BLOCK: tl.constexpr, NUM_WARPS: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * length
    offs = tl.arange(0, BLOCK)
    grad, output, terms = _load_terms(grad_ptr + start, output_ptr + start, offs, length, LOG)
    y = _input_gradient(grad, output, row_sum(terms, 32 * NUM_WARPS), LOG)
    tl.store(out_ptr + start + offs, y.to(out_ptr.dtype.element_ty), mask=offs < length)


@triton.jit
def _chunk_backward_kernel(
    grad_ptr,
    output_ptr,
    totals_ptr,
    length,
    LOG: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    """Write the sum of a chunk's terms: [rows, NUM_CHUNKS]."""
    program = tl.program_id(0).to(tl.int64)
    start = program // NUM_CHUNKS * length
    offs = program % NUM_CHUNKS * BLOCK + tl.arange(0, BLOCK)
    _, _, terms = _load_terms(grad_ptr + start, output_ptr + start, offs, length, LOG)
    tl.store(totals_ptr + program, row_sum(terms, 32 * NUM_WARPS))


@triton.jit
def _merged_backward_kernel(
    grad_ptr,
    output_ptr,
    out_ptr,
    totals_ptr,
    length,
    LOG: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program // NUM_CHUNKS
    offs = program % NUM_CHUNKS * BLOCK + tl.arange(0, BLOCK)
    grad, output, _ = _load_terms(grad_ptr + row * length, output_ptr + row * length, offs, length, LOG)
    chunk = tl.arange(0, PADDED_CHUNKS)
    total = row_sum(tl.load(totals_ptr + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=0.0), 32 * NUM_WARPS)
    y = _input_gradient(grad, output, total, LOG)
    tl.store(out_ptr + row * length + offs, y.to(out_ptr.dtype.element_ty), mask=offs < length)


def _tile(reduction: SoftmaxReduction) -> dict[str, int]:
    """What a kernel is compiled with, of a row's reduction."""
    return {
        "BLOCK": reduction.block,
        "NUM_WARPS": reduction.num_warps,
        "num_warps": reduction.num_warps,
        "enable_fp_fusion": reduction.enable_fp_fusion,
    }


def _launch_forward(x: torch.Tensor, out: torch.Tensor, log: bool, reduction: SoftmaxReduction) -> None:
    """Write the rows of ``out`` from those of ``x``."""
    num_rows, length = out.shape
    tile = _tile(reduction)
    if reduction.chunk is None:
        launch(_softmax_kernel, num_rows, (x, out, length), on=out, LOG=log, **tile)
        return
    # Two allocations: the alignment of a part of one would follow the number of rows, and the compiled code with it.
    m, l = (torch.empty(num_rows, reduction.num_chunks, dtype=torch.float32, device=x.device) for _ in range(2))
    grid, chunks = (num_rows * reduction.num_chunks,), {"NUM_CHUNKS": reduction.num_chunks}
    launch(_chunk_kernel, grid, (x, m, l, length), on=out, **chunks, **tile)
    launch(
        _merged_softmax_kernel,
        grid,
        (x, out, m, l, length),
        on=out,
        LOG=log,
        PADDED_CHUNKS=reduction.padded_chunks,
        **chunks,
        **tile,
    )


def _launch_backward(
    grad: torch.Tensor, output: torch.Tensor, out: torch.Tensor, log: bool, reduction: SoftmaxReduction
) -> None:
    """Write the rows of ``out``, the gradient of the input."""
    num_rows, length = out.shape
    tile = _tile(reduction)
    if reduction.chunk is None:
        launch(_backward_kernel, num_rows, (grad, output, out, length), on=out, LOG=log, **tile)
        return
    totals = torch.empty(num_rows, reduction.num_chunks, dtype=torch.float32, device=out.device)
    grid, chunks = (num_rows * reduction.num_chunks,), {"NUM_CHUNKS": reduction.num_chunks}
    launch(_chunk_backward_kernel, grid, (grad, output, totals, length), on=out, LOG=log, **chunks, **tile)
    launch(
        _merged_backward_kernel,
        grid,
        (grad, output, out, totals, length),
        on=out,
        LOG=log,
        PADDED_CHUNKS=reduction.padded_chunks,
        **chunks,
        **tile,
    )


def _over_rows(
    launch_rows: Callable[..., None], dim: int, dtype: torch.dtype, log: bool, *tensors: torch.Tensor
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
        reduction = SoftmaxReduction.of_device("cuda", out.shape[1], rows[0].dtype)
        launch_rows(*rows, out, log, reduction)
    return rows_back(out, like, dims)


def softmax(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """See the operation's package."""
    return _over_rows(_launch_forward, dim, dtype or x.dtype, False, x)


def log_softmax(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """See the operation's package."""
    return _over_rows(_launch_forward, dim, dtype or x.dtype, True, x)


def softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Gradient of softmax: output * (grad - sum(grad * output))."""
    return _over_rows(_launch_backward, dim, dtype, False, grad, output)


def log_softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Gradient of log_softmax: grad - exp(output) * sum(grad)."""
    return _over_rows(_launch_backward, dim, dtype, True, grad, output)
