"""Products in Triton, on every GPU and for all strides, dtypes and batches."""

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from . import schedule
from .reduction import LinearReduction
from .schedule import NarrowTile, Tile
from .triton_kernels import descriptor_kernel, pointer_kernel

ALIGNMENT = 16
"""Bytes: of addresses and strides that the tensor memory accelerator takes."""
LARGEST_SIDE = 2**31 - 1


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
    return _product(a, b, bias, a.dtype, out)


def accumulate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[M, K] @ [K, N], not yet rounded: the result is in the reduction's accumulator dtype."""
    return _product(a, b, None, _reduction(a, b).accumulate)


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, M, K] @ [B, K, N]; an entry has the bits of :func:`mm`."""
    return by_pointers(a, b, None, a.dtype)


def accumulate_batch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, M, K] @ [B, K, N], not yet rounded."""
    return by_pointers(a, b, None, _reduction(a, b).accumulate)


def _reduction(a: torch.Tensor, b: torch.Tensor) -> LinearReduction:
    return LinearReduction(b.shape[-1], b.shape[-2], a.dtype)


def _product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    if schedule.gpu(a.device.index).has_descriptors and is_regular(a, b, dtype):
        return by_descriptors(a, b, bias, dtype, out=out)
    return by_pointers(a[None], b[None], bias, dtype, out=None if out is None else out[None])[0]


def major_stride(matrix: torch.Tensor) -> tuple[int, bool] | None:
    """Elements between neighbouring rows and True, or between columns and False; None if neither side is packed.

    A single row or column may have any stride of its own: it is given as if packed.
    """
    (height, width), (down, across) = matrix.shape, matrix.stride()
    if across == 1:
        return (width if height == 1 else down), True
    if down == 1:
        return (height if width == 1 else across), False
    return None


def is_regular(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a: [M, K] and b: [K, N] and a product in ``dtype`` are of 16 bits, packed on a side, and aligned."""
    if a.dtype not in (torch.bfloat16, torch.float16) or b.dtype != a.dtype:
        return False
    if min(*a.shape, b.shape[1]) == 0 or max(*a.shape, b.shape[1]) > LARGEST_SIDE:
        return False
    if b.shape[1] * dtype.itemsize % ALIGNMENT:
        return False
    for operand in (a, b):
        stride = major_stride(operand)
        if stride is None or stride[0] < operand.shape[stride[1]]:  # rows that overlap are read by pointers
            return False
        if stride[0] * operand.element_size() % ALIGNMENT or operand.data_ptr() % ALIGNMENT:
            return False
    return True


def _describe(matrix: torch.Tensor, height: int, width: int) -> tuple[TensorDescriptor, bool]:
    """The matrix in blocks of [height, width], or its transpose in blocks of [width, height] and False."""
    stride, by_rows = major_stride(matrix)
    if not by_rows:
        matrix, height, width = matrix.t(), width, height
    return TensorDescriptor(matrix, list(matrix.shape), [stride, 1], [height, width]), by_rows


def by_descriptors(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[M, K] @ [K, N] + [N] in ``dtype``, read and written by the tensor memory accelerator; see
    :func:`is_regular`.
    """
    (m, k), n = a.shape, b.shape[1]
    device = schedule.gpu(a.device.index)
    out = torch.empty(m, n, dtype=dtype, device=a.device) if out is None else out
    tile = tile or schedule.descriptor_tile(m, n, k, dtype.itemsize, device)
    tiles_m, tiles_n = triton.cdiv(m, tile.rows), triton.cdiv(n, tile.columns)
    tiles_m *= schedule.redundancy(tiles_m * tiles_n, device)
    described_a, a_by_rows = _describe(a, tile.rows, tile.depth)
    described_b, b_by_columns = _describe(b.t(), tile.columns, tile.depth)
    described_out, _ = _describe(out, tile.rows, tile.columns)
    with torch.cuda.device_of(a):
        descriptor_kernel[(min(tiles_m * tiles_n, device.processors),)](
            described_a,
            described_b,
            None if bias is None else bias.contiguous(),
            described_out,
            n,
            k,
            tiles_m,
            a_by_rows=a_by_rows,
            b_by_columns=b_by_columns,
            has_bias=bias is not None,
            tile_m=tile.rows,
            tile_n=tile.columns,
            tile_k=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


def by_narrow_tile(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tile: NarrowTile, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[M, K] @ [K, N] + [N] by Hopper's narrow kernel, for operands that :func:`is_regular` with K as the inner side.

    Args:
        a: [M, K]
        b: [K, N]
        bias: [N], or None.
        tile: of :data:`.schedule.NARROW_TILES`.
        out: [M, N] of a's dtype, packed, to be written instead of a new tensor.
    """
    from .sm90_kernel import launch  # Gluon is needed for this kernel alone

    weight = b.t()
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device) if out is None else out
    launch(a, weight, bias, out, tile, (major_stride(a)[0], major_stride(weight)[0]))
    return out


def by_pointers(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, M, K] @ [B, K, N] + [N] as a contiguous [B, M, N] in ``dtype``; operands may have any strides."""
    batch, m, k = a.shape
    n = b.shape[2]
    precision = _reduction(a, b).precision
    out = torch.empty(batch, m, n, dtype=dtype, device=a.device) if out is None else out
    if out.numel() == 0:
        return out
    tile = tile or schedule.pointer_tile(m, n, a.dtype, schedule.gpu(a.device.index))
    # One entry needs no stride, and Triton would compile the kernel anew for some of its values: M * K follows M.
    batch_strides = (a.stride(0), b.stride(0)) if batch > 1 else (0, 0)
    with torch.cuda.device_of(a):
        pointer_kernel[(batch * triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns),)](
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
            precision=precision,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out
