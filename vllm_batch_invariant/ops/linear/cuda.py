"""Products on a GPU, in Triton: each element is one chain of tensor-core steps over K, whatever the tile."""

import torch
import triton
import triton.language as tl

from .reduction import LinearReduction
from .schedule import Tile, tile_for

_TILES_SHARING_B = 8
"""Tiles of rows worked on side by side, so that they find their columns of b in the L2 cache."""


@triton.jit(do_not_specialize=["m"])
def _mm_kernel(
    a,
    b,
    bias,
    out,
    m,
    n,
    k,
    stride_a_batch,
    stride_b_batch,
    stride_a_m,
    stride_a_k,
    stride_b_k,
    stride_b_n,
    has_bias: tl.constexpr,
    whole_steps: tl.constexpr,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
    sharing: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(m, tile_m), tl.cdiv(n, tile_n)
    program = tl.program_id(0)
    batch = (program // (tiles_m * tiles_n)).to(tl.int64)
    program = program % (tiles_m * tiles_n)
    first_m = program // (sharing * tiles_n) * sharing
    height = min(tiles_m - first_m, sharing)
    place = program % (sharing * tiles_n)

    # 64-bit, because an operand may have more than 2**31 elements.
    rows = (first_m + place % height).to(tl.int64) * tile_m + tl.arange(0, tile_m)
    columns = (place // height).to(tl.int64) * tile_n + tl.arange(0, tile_n)
    depth = tl.arange(0, tile_k).to(tl.int64)
    a += batch * stride_a_batch + rows[:, None] * stride_a_m + depth[None, :] * stride_a_k
    b += batch * stride_b_batch + depth[:, None] * stride_b_k + columns[None, :] * stride_b_n
    in_m, in_n = rows < m, columns < n

    acc = tl.zeros((tile_m, tile_n), tl.float64 if a.dtype.element_ty == tl.float64 else tl.float32)
    for start in range(0, k, tile_k):
        if whole_steps:
            a_mask, b_mask = in_m[:, None], in_n[None, :]
        else:
            in_k = depth < k - start
            a_mask, b_mask = in_m[:, None] & in_k[None, :], in_k[:, None] & in_n[None, :]
        step_a = tl.load(a, mask=a_mask, other=0.0)
        step_b = tl.load(b, mask=b_mask, other=0.0)
        # "ieee" keeps fp32 operands from being rounded to tf32; it changes nothing for the others.
        acc = tl.dot(step_a, step_b, acc, input_precision="ieee", out_dtype=acc.dtype)
        a += tile_k * stride_a_k
        b += tile_k * stride_b_k
    if has_bias:
        acc += tl.load(bias + columns, mask=in_n, other=0.0).to(acc.dtype)[None, :]
    out += batch * m * n + rows[:, None] * n + columns[None, :]
    tl.store(out, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def _product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, tile: Tile | None = None
) -> torch.Tensor:
    """[B, M, K] @ [B, K, N] + [N] as a contiguous [B, M, N] in ``dtype``; operands may have any strides."""
    batch, m, k = a.shape
    n = b.shape[2]
    out = torch.empty(batch, m, n, dtype=dtype, device=a.device)
    if out.numel() == 0:
        return out
    tile = tile or tile_for(m, n, a.dtype)
    # One entry needs no stride, and Triton would compile the kernel anew for some of its values: M * K follows M.
    batch_strides = (a.stride(0), b.stride(0)) if batch > 1 else (0, 0)
    with torch.cuda.device_of(a):
        _mm_kernel[(batch * triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns),)](
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
            has_bias=bias is not None,
            whole_steps=k % tile.depth == 0,
            tile_m=tile.rows,
            tile_n=tile.columns,
            tile_k=tile.depth,
            sharing=_TILES_SHARING_B,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


def mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[M, K] @ [K, N] + bias; see the operation's package for the contract."""
    reduction = LinearReduction(b.shape[1], b.shape[0], a.dtype)
    return _product(a[None], b[None], bias, reduction.dtype)[0]


def accumulate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[M, K] @ [K, N], not yet rounded: the result is in the reduction's accumulator dtype."""
    reduction = LinearReduction(b.shape[1], b.shape[0], a.dtype)
    return _product(a[None], b[None], None, reduction.accumulate)[0]


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, M, K] @ [B, K, N]; an entry has the bits of :func:`mm`."""
    reduction = LinearReduction(b.shape[2], b.shape[1], a.dtype)
    return _product(a, b, None, reduction.dtype)


def accumulate_batch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, M, K] @ [B, K, N], not yet rounded."""
    reduction = LinearReduction(b.shape[2], b.shape[1], a.dtype)
    return _product(a, b, None, reduction.accumulate)
