"""RMSNorm on a GPU, in Triton: a program has one row, or several short ones."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from ...errors import NotCovered
from ..common.triton_rows import ALIGNMENT, aligned, on_device_of
from .kernels import inverse_root_mean, sum_of_pairs, weighted
from .reduction import HEAD_SIZES

_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
_VECTOR = 8
"""Elements in 16 bytes of the narrowest dtype."""
_TILE = 2048
"""Elements that a program of short rows holds: with 4 warps, two vectors a thread."""
_LARGEST_BLOCK = 16_384
_MOST_ROWS = 2**31 - 1 - _TILE


@dataclass(frozen=True)
class NormLayout:
    """How a program holds its rows, decided by their length alone: a part of the reduction.

    Attributes:
        rows: rows of a program.
        block: elements of a row that are held at a time.
        warps: warps of a program.
        unit: elements by which every stride must be divisible, and in which it is given to the kernel: Triton then
            knows the alignment of every row without looking at the strides of a call.
        paired: whether a row may be a head, see :data:`.reduction.HEAD_SIZES`.
    """

    rows: int
    block: int
    warps: int
    unit: int
    paired: bool


@cache
def layout_for(length: int) -> NormLayout:
    """The layout for rows of ``length`` elements."""
    block = min(max(triton.next_power_of_2(length), 32), _LARGEST_BLOCK)
    warps = min(max(block // 512, 4), 16)
    unit = 1 if length % _VECTOR else _VECTOR
    return NormLayout(max(_TILE // block, 1), block, warps, unit, length in HEAD_SIZES)


@triton.jit
def _load(x, residual, starts, residual_starts, places, mask, has_residual: tl.constexpr):
    """x + residual of rows at ``places``, unrounded."""
    tile = tl.load(x + starts[:, None] + places[None, :], mask=mask, other=0.0).to(tl.float32)
    if has_residual:
        places_there = residual_starts[:, None] + places[None, :]
        tile += tl.load(residual + places_there, mask=mask, other=0.0).to(tl.float32)
    return tile


@triton.jit
def _load_weight(weight, places, mask):
    """The weight for each row, not for one: then it lies where the rows do without a trip through shared memory."""
    return tl.load(tl.broadcast_to(weight + places[None, :], mask.shape), mask=mask, other=0.0)


@triton.jit
def _starts(row, inner_count, outer_stride, inner_stride, unit: tl.constexpr):
    """Where rows start whose two indices have a stride each, in units."""
    outer, inner = (row // inner_count).to(tl.int64), (row % inner_count).to(tl.int64)
    return (outer * outer_stride + inner * inner_stride) * unit


@triton.jit(
    do_not_specialize=[
        "count",
        "x_inner_count",
        "x_outer_stride",
        "x_inner_stride",
        "residual_inner_count",
        "residual_outer_stride",
        "residual_inner_stride",
    ]
)
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    summed,
    count,
    x_inner_count,
    x_outer_stride,
    x_inner_stride,
    residual_inner_count,
    residual_outer_stride,
    residual_inner_stride,
    eps,
    length: tl.constexpr,
    variance_size: tl.constexpr,
    has_residual: tl.constexpr,
    has_weight: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    unit: tl.constexpr,
    paired: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = row[:, None] < count
    starts = _starts(row, x_inner_count, x_outer_stride, x_inner_stride, unit)
    residual_starts = starts
    if has_residual:
        residual_starts = _starts(row, residual_inner_count, residual_outer_stride, residual_inner_stride, unit)
    out_starts = row.to(tl.int64)[:, None] * length
    if length <= block:  # the tile stays in registers, and every load is on its way before the first one is waited for
        places = tl.arange(0, block)
        mask = inside & (places < length)[None, :]
        if has_weight:
            factor = _load_weight(weight, places, mask)
        tile = _load(x, residual, starts, residual_starts, places, mask, has_residual)
        if has_residual:
            tl.store(summed + out_starts + places[None, :], tile.to(summed.dtype.element_ty), mask=mask)
        squares = tile * tile
        if variance_size < length:
            squares = tl.where((places < variance_size)[None, :], squares, 0.0)
        total = sum_of_pairs(squares) if paired else tl.sum(squares, 1)
        tile *= inverse_root_mean(total, variance_size, eps)[:, None]
        if has_weight:
            tile = weighted(tile, factor)
        tl.store(out + out_starts + places[None, :], tile.to(out.dtype.element_ty), mask=mask)
    else:
        acc = tl.zeros((rows, block), tl.float32)
        for start in range(0, variance_size, block):
            places = start + tl.arange(0, block)
            mask = inside & (places < variance_size)[None, :]
            tile = _load(x, residual, starts, residual_starts, places, mask, has_residual)
            acc += tile * tile
        scale = inverse_root_mean(tl.sum(acc, 1), variance_size, eps)[:, None]
        for start in range(0, length, block):
            places = start + tl.arange(0, block)
            mask = inside & (places < length)[None, :]
            tile = _load(x, residual, starts, residual_starts, places, mask, has_residual)
            if has_residual:
                tl.store(summed + out_starts + places[None, :], tile.to(summed.dtype.element_ty), mask=mask)
            tile *= scale
            if has_weight:
                tile = weighted(tile, _load_weight(weight, places, mask))
            tl.store(out + out_starts + places[None, :], tile.to(out.dtype.element_ty), mask=mask)


def _indexed(x: torch.Tensor, unit: int) -> tuple[torch.Tensor, int, int, int]:
    """The tensor, or an aligned copy where the kernel cannot take it as it is, and how its rows are reached: the size
    of the inner row index, and the strides of both in units.
    """
    strides = x.stride()
    if strides[-1] == 1 and len(strides) in (2, 3) and x.data_ptr() % ALIGNMENT == 0:
        outer, inner, inner_count = (strides[0], 0, 1) if len(strides) == 2 else (*strides[:2], x.shape[1])
        if outer % unit == 0 and inner % unit == 0:
            return x, inner_count, outer // unit, inner // unit
    return aligned(x), 1, x.shape[-1] // unit, 0


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None, variance_size: int | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package. No copy is made of tensors [rows, N] or [rows, heads, N] that are packed along N and
    start every row at a multiple of 16 bytes.
    """
    for tensor in (x, weight, residual):
        if tensor is not None and tensor.dtype not in _DTYPES:
            raise NotCovered(f"RMSNorm in {tensor.dtype}", "its accumulator is fp32", "use fp32, bf16 or fp16")
    length = x.shape[-1]
    count = x.numel() // length
    if count > _MOST_ROWS:
        raise NotCovered(f"RMSNorm of {count} rows", "the kernel counts them in 32 bits", "normalise them in parts")
    layout = layout_for(length)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = None if residual is None else torch.empty_like(out)
    if count:
        x, *x_rows = _indexed(x, layout.unit)
        residual_rows = [1, 0, 0]
        if residual is not None:
            residual, *residual_rows = _indexed(residual, layout.unit)
        with on_device_of(x):
            _rms_norm_kernel[(-(-count // layout.rows),)](
                x,
                residual,
                None if weight is None else aligned(weight),
                out,
                summed,
                count,
                *x_rows,
                *residual_rows,
                eps,
                length=length,
                variance_size=variance_size or length,
                has_residual=residual is not None,
                has_weight=weight is not None,
                rows=layout.rows,
                block=layout.block,
                unit=layout.unit,
                paired=layout.paired,
                num_warps=layout.warps,
                enable_fp_fusion=False,
            )
    return out if summed is None else (out, summed)
