"""Products on the CPU: the platform's BLAS, called on row tiles of a few fixed heights.

A BLAS picks its kernel and its blocking of K from the number of rows, so the bits of a row follow the batch. At a fixed
height they do not. Several heights often agree, which is speed for free, but that is a measurement:
:func:`certified_heights` makes it for each shape on this machine, and a height that disagrees with :data:`BASE_HEIGHT`
is not used for that shape.
"""

import logging
from collections.abc import Iterable
from functools import cache

import torch

from ..common.native_kernels import kernel
from .reduction import LinearReduction

logger = logging.getLogger("vllm.batch_invariant")

BASE_HEIGHT = 32
"""The tile height that defines the bits; every other height must reproduce it."""
CANDIDATE_HEIGHTS = (2, 4, 8, 16, 64, 128, 256)
"""Not 1: a product of one row is a matrix-vector kernel's."""
_ALIGNMENT = 64


def _blas(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return kernel("mm", a)(a, b)


def _operand(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in ``dtype``, packed by rows and aligned: BLAS kernels may differ on anything else, and by columns few
    heights agree.
    """
    tensor = tensor.contiguous().to(dtype)  # in this order half the bytes are turned
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def _tile_heights(rows: int, heights: tuple[int, ...]) -> list[int]:
    """Cover ``rows`` with tiles of the given heights (ascending): few calls, less than half of the last one padding."""
    cover: list[int] = []
    while rows > 0:
        holding = next((height for height in heights if rows <= height < 2 * rows), None)
        height = holding or next((height for height in reversed(heights) if height <= rows), heights[0])
        cover.append(height)
        rows -= height
    return cover


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[M, K] @ [K, N] in the operands' dtype, tile by tile. b as :func:`_operand` leaves it."""
    rows, depth = a.shape
    columns = b.shape[1]
    if depth == 0 or rows == 0 or columns == 0:
        return a.new_zeros(rows, columns)
    out = a.new_empty(rows, columns)
    start = 0
    for height in _tile_heights(rows, certified_heights(depth, columns, b.dtype, torch.get_num_threads())):
        stop = min(start + height, rows)
        tile = a[start:stop]
        if stop - start < height or not tile.is_contiguous() or tile.data_ptr() % _ALIGNMENT:
            tile = a.new_zeros(height, depth)
            tile[: stop - start] = a[start:stop]
        out[start:stop] = _blas(tile, b)[: stop - start]
        start = stop
    return out


@cache
def certified_heights(depth: int, columns: int, dtype: torch.dtype, threads: int) -> tuple[int, ...]:
    """The tile heights that give the bits of :data:`BASE_HEIGHT` for a [depth, columns] operand, ascending; measured
    once a process.

    Also measured: a row has the same bits at every place of the base tile that the two orders compared put it at.

    Args:
        threads: how many BLAS threads run; a part of the measurement, because the blocking may follow it.

    Raises:
        RuntimeError: not even the base tile is independent of a row's place, so this BLAS cannot be used.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2 * BASE_HEIGHT, depth, generator=generator, dtype=dtype)
    operand = torch.randn(depth, columns, generator=generator, dtype=dtype)
    base = torch.cat([_blas(tile.clone(), operand) for tile in rows.split(BASE_HEIGHT)])

    def agrees(height: int) -> bool:
        order = torch.randperm(max(height, 2 * BASE_HEIGHT), generator=generator) % len(rows)
        tiles = [_blas(rows[places], operand) for places in order.split(height)]
        return torch.equal(torch.cat(tiles), base[order])

    if not agrees(BASE_HEIGHT):
        raise RuntimeError(
            f"the BLAS of this machine gives a row of a {BASE_HEIGHT} x {depth} by {depth} x {columns} product other "
            "bits at another place in the tile: batch-invariant products are not possible with it"
        )
    heights = tuple(sorted([BASE_HEIGHT, *(height for height in CANDIDATE_HEIGHTS if agrees(height))]))
    logger.debug("product %d x %d, %d threads: tiles of %s rows agree", depth, columns, threads, heights)
    return heights


def mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[M, K] @ [K, N] + bias; see the operation's package for the contract."""
    reduction = LinearReduction(b.shape[1], b.shape[0], a.dtype)
    out = accumulate(a, b)
    if bias is not None:
        out += bias.to(reduction.accumulate)
    return out.to(a.dtype)


def accumulate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[M, K] @ [K, N], not yet rounded: the result is in the reduction's accumulator dtype."""
    dtype = LinearReduction(b.shape[1], b.shape[0], a.dtype).accumulate
    return _product(a.to(dtype), _operand(b, dtype))


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, M, K] @ [B, K, N], one entry after the other: a batched BLAS call may follow the number of entries."""
    return accumulate_batch(a, b).to(a.dtype)


def accumulate_batch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, M, K] @ [B, K, N], not yet rounded."""
    dtype = LinearReduction(b.shape[2], b.shape[1], a.dtype).accumulate
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=dtype)
    for entry in range(a.shape[0]):
        out[entry] = accumulate(a[entry], b[entry])
    return out


def prepare(weight: torch.Tensor, rows: int, bias: bool, sizes: Iterable[int]) -> None:  # noqa: ARG001
    """Certify the tile heights for products with a weight [N, K]; they do not depend on the rest."""
    dtype = LinearReduction(weight.shape[0], weight.shape[1], weight.dtype).accumulate
    certified_heights(weight.shape[1], weight.shape[0], dtype, torch.get_num_threads())


def prepare_weight(weight: torch.Tensor) -> torch.Tensor:
    """A weight [N, K] as products want it, [K, N] and in the accumulator's dtype, converted once instead of at every
    call (fp32 for bf16 and fp16: twice the memory).
    """
    dtype = LinearReduction(weight.shape[0], weight.shape[1], weight.dtype).accumulate
    certified_heights(weight.shape[1], weight.shape[0], dtype, torch.get_num_threads())
    return _operand(weight.detach().t(), dtype)


def prepared_linear(x: torch.Tensor, prepared: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``linear`` with a weight from :func:`prepare_weight`: same bits, without the conversion."""
    rows = _product(x.reshape(x.shape[:-1].numel(), x.shape[-1]).to(prepared.dtype), prepared)
    if bias is not None:
        rows += bias.to(prepared.dtype)
    return rows.to(x.dtype).reshape(*x.shape[:-1], prepared.shape[1])
