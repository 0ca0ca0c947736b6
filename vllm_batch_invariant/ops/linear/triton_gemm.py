"""GEMMs in Triton, on every GPU and for all strides, dtypes and batches."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common.gpu import Gpu
from ..common.launch import launch
from . import schedule
from .problem import leading_dim, supports_tma
from .reduction import LinearReduction
from .schedule import NarrowTile, Tile
from .spec import PRODUCT, MatmulSpec
from .triton_kernels import TL_DTYPES, gemm_ptr_kernel, gemm_tma_kernel


def mm(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[M, K] @ [K, N] + bias; see the operation's package for the contract.

    Args:
        a: [M, K]
        b: [K, N]
        bias: [N], or None.
        out: [M, N] of a's dtype, packed, to be written instead of a new tensor.
    """
    return _mm(a, b, bias, _reduction(a, b), a.dtype, out)


def mm_ptr(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`mm` by :func:`gemm_ptr` alone, which every other schedule is compared with."""
    return _bmm(a[None], b[None], bias, _reduction(a, b), a.dtype, None if out is None else out[None])[0]


def accumulate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[M, K] @ [K, N], not yet rounded: the result is in the reduction's accumulator dtype."""
    reduction = _reduction(a, b)
    return _mm(a, b, None, reduction, reduction.accumulate)


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, M, K] @ [B, K, N]; an entry has the bits of :func:`mm`."""
    return _bmm(a, b, None, _reduction(a, b), a.dtype)


def accumulate_batch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, M, K] @ [B, K, N], not yet rounded."""
    reduction = _reduction(a, b)
    return _bmm(a, b, None, reduction, reduction.accumulate)


def _reduction(a: torch.Tensor, b: torch.Tensor) -> LinearReduction:
    return LinearReduction.of_device("cuda", b.shape[-1], b.shape[-2], a.dtype)


def _mm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: LinearReduction,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    gpu = Gpu.of(a.device.index)
    if not (gpu.has_tma and supports_tma(a, b, dtype)):
        return _bmm(a[None], b[None], bias, reduction, dtype, None if out is None else out[None])[0]
    out = torch.empty(m, n, dtype=dtype, device=a.device) if out is None else out
    return gemm_tma(a, b, bias, out, reduction, schedule.tma_tile(m, n, k, dtype.itemsize, gpu))


def _bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: LinearReduction,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    (batch, m, _), n = a.shape, b.shape[2]
    out = torch.empty(batch, m, n, dtype=dtype, device=a.device) if out is None else out
    if out.numel() == 0:
        return out
    return gemm_ptr(a, b, bias, out, reduction, schedule.ptr_tile(m, n, a.dtype, Gpu.of(a.device.index)))


def _compiled_with(bias: torch.Tensor | None, reduction: LinearReduction, tile: Tile) -> dict[str, Any]:
    """What both kernels are compiled with."""
    return {
        "HAS_BIAS": bias is not None,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "ACCUMULATE": TL_DTYPES[reduction.accumulate],
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": reduction.enable_fp_fusion,
    }


def gemm_ptr(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    reduction: LinearReduction,
    tile: Tile,
) -> torch.Tensor:
    """``a @ b + bias`` for operands of any strides.

    Args:
        a: [B, M, K]
        b: [B, K, N]
        bias: [N], or None.
        out: [B, M, N], packed and not empty; its dtype is what results are rounded to.
        reduction: decides the bits.
        tile: decides the speed.

    Returns:
        ``out``.
    """
    batch, m, k = a.shape
    n = b.shape[2]
    # One entry needs no stride, and Triton would compile the kernel anew for some of its values: M * K follows M.
    batch_strides = (a.stride(0), b.stride(0)) if batch > 1 else (0, 0)
    launch(
        gemm_ptr_kernel,
        batch * triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n),
        (
            a,
            b,
            None if bias is None else bias.contiguous(),
            out,
            m,
            n,
            k,
            *batch_strides,
            *a.stride()[1:],
            *b.stride()[1:],
        ),
        on=a,
        EVEN_K=k % tile.block_k == 0,
        PRECISION=reduction.precision,
        **_compiled_with(bias, reduction, tile),
    )
    return out


def gemm_tma(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    reduction: LinearReduction,
    tile: Tile,
) -> torch.Tensor:
    """``a @ b + bias``, read and written by the tensor memory accelerator.

    Args:
        a: [M, K]
        b: [K, N]; :func:`.problem.supports_tma` says of which operands it is.
        bias: [N], or None.
        out: [M, N], packed; its dtype is what results are rounded to.
        reduction: decides the bits.
        tile: of :func:`.schedule.tma_tiles`; decides the speed.

    Returns:
        ``out``.
    """
    (m, k), n = a.shape, b.shape[1]
    gpu = Gpu.of(a.device.index)
    tiles_m, tiles_n = triton.cdiv(m, tile.block_m), triton.cdiv(n, tile.block_n)
    tiles_m *= schedule.redundancy(tiles_m * tiles_n, gpu)
    a_desc, a_k_major = _describe(a, tile.block_m, tile.block_k)
    b_desc, b_k_major = _describe(b.t(), tile.block_n, tile.block_k)
    out_desc = TensorDescriptor(out, [m, n], [n, 1], [tile.block_m, tile.block_n])
    launch(
        gemm_tma_kernel,
        min(tiles_m * tiles_n, gpu.num_sms),
        (a_desc, b_desc, None if bias is None else bias.contiguous(), out_desc, n, k, tiles_m),
        on=a,
        A_K_MAJOR=a_k_major,
        B_K_MAJOR=b_k_major,
        **_compiled_with(bias, reduction, tile),
    )
    return out


def _describe(matrix: torch.Tensor, block_rows: int, block_columns: int) -> tuple[TensorDescriptor, bool]:
    """A descriptor of the matrix in such blocks and True, or of its transpose in transposed blocks and False."""
    stride, by_rows = leading_dim(matrix)
    if not by_rows:
        matrix, block_rows, block_columns = matrix.t(), block_columns, block_rows
    return TensorDescriptor(matrix, list(matrix.shape), [stride, 1], [block_rows, block_columns]), by_rows


def gemm_sm90_swap_ab(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    reduction: LinearReduction,
    tile: NarrowTile,
    overlaps: bool = False,
    spec: MatmulSpec = PRODUCT,
    scales: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Whole matmuls by Hopper's narrow kernel, for operands that :func:`.problem.supports_tma` with K as the contiguous
    side; arguments as of :func:`gemm_tma`, with a tile of :func:`.schedule.sm90_tiles`, whether the launch does not
    wait for kernels before, which must not write b, what is computed, and what else the weight's format stores.
    """
    from . import sm90_kernel  # Gluon is needed for this kernel alone

    return sm90_kernel.gemm_sm90_swap_ab(a, b, bias, out, reduction, tile, overlaps, spec.epilogue.gated, scales)
