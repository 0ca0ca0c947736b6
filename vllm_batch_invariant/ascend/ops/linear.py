"""GEMMs on an Ascend NPU, in triton-ascend: one fp32 accumulator an element, K upwards, in tiles that N sizes.

``out[m, n] = sum over k of a[m, k] * b[k, n]``, K_STEP elements of K at a time. The tile is a part of the reduction
(:func:`.reductions.linear` says why): whatever M, rows are padded to whole tiles, and one binary serves them
all. N and K are compile-time constants and no mask follows M, so a step has a static number of rows, and a kernel that
neither masks rows nor adds a bias stays on the cube cores, without synchronisation with vector cores. Compiled and
simulated, never run on hardware (tests/ascend/offline).
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from ...ops.linear.k_slices import by_mm
from ...ops.linear.spec import PRODUCT, MatmulSpec
from . import reductions
from .rows import check_covered, cube_grid, on, vector_grid

_BIAS_BLOCK = 2048


@triton.jit
def _load_tile(
    matrix_ptr,
    first_row,
    first_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    MASK_COLUMNS: tl.constexpr,
):
    """[BLOCK_ROWS, BLOCK_COLUMNS] of a packed [ROWS, COLUMNS] matrix. What is beyond an edge that is masked reads as
    zero.
    """
    offs_row, offs_column = tl.arange(0, BLOCK_ROWS)[:, None], tl.arange(0, BLOCK_COLUMNS)[None, :]
    # 64-bit, because a matrix may have more than 2**31 elements.
    ptrs = matrix_ptr + tl.cast(first_row, tl.int64) * COLUMNS + first_column + offs_row * COLUMNS + offs_column
    if MASK_ROWS and MASK_COLUMNS:
        mask = (offs_row + first_row < ROWS) & (offs_column + first_column < COLUMNS)
        tile = tl.load(ptrs, mask=mask, other=0.0)
    elif MASK_ROWS:
        tile = tl.load(ptrs, mask=offs_row + first_row < ROWS, other=0.0)
    elif MASK_COLUMNS:
        tile = tl.load(ptrs, mask=offs_column + first_column < COLUMNS, other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit(do_not_specialize=["batch", "tiles_m"], do_not_specialize_on_alignment=["a_ptr", "b_ptr", "out_ptr"])
def _gemm_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    batch,
    tiles_m,
    N: tl.constexpr,
    K: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    K_STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """a: [batch, tiles_m * BLOCK_M, K], b: [batch, K, N] (or its transpose, if ``B_K_MAJOR``), out: [batch,
    tiles_m * BLOCK_M, N], all packed.
    """
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    MASK_N: tl.constexpr = N % BLOCK_N != 0
    MASK_K: tl.constexpr = K % K_STEP != 0
    for tile in range(tl.program_id(0), batch * tiles_m * tiles_n, tl.num_programs(0)):
        row = tile // tiles_n
        entry = row // tiles_m
        first_n = tile % tiles_n * BLOCK_N
        a_tile_ptr = a_ptr + row.to(tl.int64) * (BLOCK_M * K)
        b_entry_ptr = b_ptr + entry.to(tl.int64) * (N * K)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first_k in range(0, K, K_STEP):
            a = _load_tile(a_tile_ptr, 0, first_k, BLOCK_M, K, BLOCK_M, K_STEP, False, MASK_K)  # [BLOCK_M, K_STEP]
            if B_K_MAJOR:
                b = tl.trans(_load_tile(b_entry_ptr, first_n, first_k, N, K, BLOCK_N, K_STEP, MASK_N, MASK_K))
            else:
                b = _load_tile(b_entry_ptr, first_k, first_n, K, N, K_STEP, BLOCK_N, MASK_K, MASK_N)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)  # b: [K_STEP, BLOCK_N]
        offs_m, offs_n = tl.arange(0, BLOCK_M)[:, None], first_n + tl.arange(0, BLOCK_N)[None, :]
        ptrs = out_ptr + row.to(tl.int64) * (BLOCK_M * N) + offs_m * N + offs_n
        if MASK_N:
            tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=offs_n < N)
        else:
            tl.store(ptrs, acc.to(out_ptr.dtype.element_ty))


@triton.jit(
    do_not_specialize=["items", "blocks", "N"],
    do_not_specialize_on_alignment=["accumulated_ptr", "bias_ptr", "out_ptr"],
)
def _add_bias_kernel(accumulated_ptr, bias_ptr, out_ptr, items, blocks, N, BLOCK: tl.constexpr):
    """out = accumulated + bias in fp32, rounded once: a kernel of its own, because it needs the vector cores."""
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        offs_n = item % blocks * BLOCK + tl.arange(0, BLOCK)
        row = item // blocks
        start = row.to(tl.int64) * N
        mask = offs_n < N
        value = tl.load(accumulated_ptr + start + offs_n, mask=mask, other=0.0)  # [BLOCK]
        value += tl.load(bias_ptr + offs_n, mask=mask, other=0.0).to(tl.float32)  # [BLOCK]
        tl.store(out_ptr + start + offs_n, value.to(out_ptr.dtype.element_ty), mask=mask)


def mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[M, K] @ [K, N] + bias; see the operation's package for the contract."""
    if bias is None:
        return _gemm(a[None], b[None], a.dtype)[0]
    return _with_bias(accumulate(a, b), bias, a.dtype)


# out is for slices, which no operation adds on an NPU
matmul = by_mm(lambda a, b, bias, out: mm(a, b, bias))  # noqa: ARG005


def accumulate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[M, K] @ [K, N], not yet rounded: the result is in the reduction's accumulator dtype."""
    return accumulate_batch(a[None], b[None])[0]


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, M, K] @ [B, K, N]; an entry has the bits of :func:`mm`."""
    return _gemm(a, b, a.dtype)


def accumulate_batch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, M, K] @ [B, K, N], not yet rounded."""
    return _gemm(a, b, reductions.linear(b.shape[2], b.shape[1], a.dtype).accumulate)


def prepare(
    weight: torch.Tensor,
    max_m: int,  # noqa: ARG001
    spec: MatmulSpec = PRODUCT,
    sizes: Iterable[int] = (),  # noqa: ARG001
    dtype: torch.dtype | None = None,
    repeats: bool = False,  # noqa: ARG001
) -> None:
    """Compile the kernels that a matmul with such a weight needs. Nothing is measured, and neither ``max_m`` nor
    ``sizes`` matter, because one binary serves all.
    """
    matrix = weight.new_zeros(len(weight), weight.shape[1] * spec.b_format.packing, dtype=dtype)
    bias = matrix.new_zeros(len(weight)) if spec.epilogue.has_bias else None
    mm(matrix.new_zeros(1, matrix.shape[1]), matrix.t(), bias)


def _gemm(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, M, K] @ [B, K, N] as a contiguous [B, M, N] in ``dtype``."""
    (batch, m, k), n = a.shape, b.shape[2]
    reduction = reductions.linear(n, k, a.dtype)
    check_covered("a matmul", a, b)
    if 0 in (batch, m, n, k):
        return torch.zeros(batch, m, n, dtype=dtype, device=a.device)
    tiles_m = triton.cdiv(m, reduction.block_m)
    padding = tiles_m * reduction.block_m - m
    padded = torch.nn.functional.pad(a, (0, 0, 0, padding)) if padding else a
    b_k_major = not b.is_contiguous() and b.transpose(1, 2).is_contiguous()
    out = torch.empty(batch, m + padding, n, dtype=dtype, device=a.device)
    with on(a.device):
        _gemm_kernel[cube_grid(batch * tiles_m * triton.cdiv(n, reduction.block_n), a.device)](
            padded.contiguous(),
            b if b_k_major else b.contiguous(),
            out,
            batch,
            tiles_m,
            N=n,
            K=k,
            B_K_MAJOR=b_k_major,
            BLOCK_M=reduction.block_m,
            BLOCK_N=reduction.block_n,
            K_STEP=reduction.k_step,
            PRECISION=reduction.precision,
        )
    return out[:, :m].contiguous()


def _with_bias(accumulated: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """accumulated: [M, N] fp32 plus bias: [N], in ``dtype``."""
    m, n = accumulated.shape
    check_covered("a matmul", bias)
    out = torch.empty(m, n, dtype=dtype, device=accumulated.device)
    if out.numel():
        blocks = triton.cdiv(n, _BIAS_BLOCK)
        with on(out.device):
            _add_bias_kernel[vector_grid(m * blocks, out.device)](
                accumulated, bias.contiguous(), out, m * blocks, blocks, n, BLOCK=_BIAS_BLOCK
            )
    return out
