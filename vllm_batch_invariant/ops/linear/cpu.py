"""GEMMs on the CPU: the platform's BLAS, called on tiles of a few fixed numbers of rows.

A BLAS picks its kernel and its blocking of K from M, so the bits of a row follow the batch. At a fixed M they do not.
The reduction is what the BLAS does for tiles of ``LinearReduction.block_m`` rows. Tiles of other sizes often give the
same bits, which is speed for free, but that is a measurement: :func:`verified_block_ms` makes it for each shape on this
machine, and a size that disagrees is not used for that shape.
"""

import logging
from collections.abc import Iterable
from functools import cache

import torch

from ..common.native_kernels import kernel
from .reduction import LinearReduction

logger = logging.getLogger("vllm.batch_invariant")

OTHER_BLOCK_MS = (2, 4, 8, 16, 64, 128, 256)
"""A schedule may have these where they reproduce the reduction's. Not 1: one row is for a matrix-vector kernel."""


def _blas(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return kernel("mm", a)(a, b)


def _reduction(a: torch.Tensor, b: torch.Tensor) -> LinearReduction:
    return LinearReduction.of_device("cpu", b.shape[-1], b.shape[-2], a.dtype)


def _operand(tensor: torch.Tensor, reduction: LinearReduction) -> torch.Tensor:
    """The matrix in the accumulator's dtype, packed by rows and aligned: BLAS kernels may differ on anything else, and
    packed by columns few sizes of tiles agree.
    """
    tensor = tensor.contiguous().to(reduction.accumulate)  # in this order half the bytes are turned
    return tensor if tensor.data_ptr() % reduction.alignment == 0 else tensor.clone()


def _tiles(m: int, block_ms: tuple[int, ...]) -> list[int]:
    """Cover ``m`` rows with tiles of the given sizes (ascending): few calls, less than half of the last one padding."""
    cover: list[int] = []
    while m > 0:
        holding = next((block_m for block_m in block_ms if m <= block_m < 2 * m), None)
        block_m = holding or next((block_m for block_m in reversed(block_ms) if block_m <= m), block_ms[0])
        cover.append(block_m)
        m -= block_m
    return cover


def _gemm(a: torch.Tensor, b: torch.Tensor, reduction: LinearReduction) -> torch.Tensor:
    """[M, K] @ [K, N], tile by tile, in the accumulator's dtype, which a has. b is as :func:`_operand` leaves it."""
    (m, k), n = a.shape, b.shape[1]
    if 0 in (m, k, n):
        return a.new_zeros(m, n)
    out = a.new_empty(m, n)
    start = 0
    for block_m in _tiles(m, verified_block_ms(reduction)):
        stop = min(start + block_m, m)
        tile = a[start:stop]  # [block_m, K]
        if stop - start < block_m or not tile.is_contiguous() or tile.data_ptr() % reduction.alignment:
            tile = a.new_zeros(block_m, k)
            tile[: stop - start] = a[start:stop]
        out[start:stop] = _blas(tile, b)[: stop - start]
        start = stop
    return out


@cache
def verified_block_ms(reduction: LinearReduction) -> tuple[int, ...]:
    """The sizes of tiles that give the bits of ``reduction.block_m`` for an operand [K, N], ascending; measured once a
    process.

    Also measured: a row has the same bits at every place of the tile that the two orders compared put it at. The number
    of threads is a part of the reduction, because the BLAS may choose its blocking by it.

    Raises:
        RuntimeError: not even the reduction's tile is independent of a row's place, so this BLAS cannot be used.
    """
    base, k, n, dtype = reduction.block_m, reduction.k, reduction.n, reduction.accumulate
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2 * base, k, generator=generator, dtype=dtype)
    operand = torch.randn(k, n, generator=generator, dtype=dtype)
    expected = torch.cat([_blas(tile.clone(), operand) for tile in rows.split(base)])

    def verify_bitwise(block_m: int) -> bool:
        order = torch.randperm(max(block_m, 2 * base), generator=generator) % len(rows)
        tiles = [_blas(rows[part], operand) for part in order.split(block_m)]
        return torch.equal(torch.cat(tiles), expected[order])

    if not verify_bitwise(base):
        raise RuntimeError(
            f"the BLAS of this machine gives a row of a {base} x {k} by {k} x {n} matmul other bits at another place "
            "in the tile: batch-invariant matmuls are not possible with it"
        )
    block_ms = tuple(sorted([base, *(block_m for block_m in OTHER_BLOCK_MS if verify_bitwise(block_m))]))
    logger.debug("GEMM N=%d K=%d, %d threads: tiles of %s rows agree", n, k, reduction.threads, block_ms)
    return block_ms


def mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[M, K] @ [K, N] + bias; see the operation's package for the contract."""
    out = accumulate(a, b)
    if bias is not None:
        out += bias.to(out.dtype)
    return out.to(a.dtype)


def accumulate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[M, K] @ [K, N], not yet rounded: the result is in the reduction's accumulator dtype."""
    reduction = _reduction(a, b)
    return _gemm(a.to(reduction.accumulate), _operand(b, reduction), reduction)


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, M, K] @ [B, K, N], one entry after the other: a batched BLAS call may follow the number of entries."""
    return accumulate_batch(a, b).to(a.dtype)


def accumulate_batch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, M, K] @ [B, K, N], not yet rounded."""
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=_reduction(a, b).accumulate)
    for entry in range(a.shape[0]):
        out[entry] = accumulate(a[entry], b[entry])
    return out


def prepare(weight: torch.Tensor, max_m: int, bias: bool, sizes: Iterable[int]) -> None:  # noqa: ARG001
    """Measure the sizes of tiles for a weight [N, K]; they do not depend on the rest."""
    verified_block_ms(_reduction(weight, weight.t()))


def prepare_weight(weight: torch.Tensor) -> torch.Tensor:
    """A weight [N, K] as GEMMs want it, [K, N] and in the accumulator's dtype, converted once instead of at every call
    (fp32 for bf16 and fp16: twice the memory).
    """
    reduction = _reduction(weight, weight.t())
    verified_block_ms(reduction)
    return _operand(weight.detach().t(), reduction)


def prepared_linear(x: torch.Tensor, prepared: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``linear`` with a weight from :func:`prepare_weight`: same bits, without the conversion."""
    return prepared_accumulate(x, prepared, bias).to(x.dtype)


def prepared_accumulate(x: torch.Tensor, prepared: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same, not yet rounded: in the accumulator's dtype."""
    a = x.reshape(x.shape[:-1].numel(), x.shape[-1]).to(prepared.dtype)
    out = _gemm(a, prepared, _reduction(x, prepared))
    if bias is not None:
        out += bias.to(prepared.dtype)
    return out.reshape(*x.shape[:-1], prepared.shape[1])
