"""GEMMs on the CPU: the platform's BLAS, called on tiles of a few fixed numbers of rows.

A BLAS picks its kernel and its blocking of K from M, so the bits of a row follow the batch. At a fixed M they do not.
The reduction is what the BLAS does for tiles of ``LinearReduction.block_m`` rows. Tiles of other sizes often give the
same bits, which is speed for free, but that is a measurement: :func:`verified_block_ms` makes it for each shape on this
machine, and a size that disagrees is not used for that shape.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import cache

import torch

from ..common.native_kernels import kernel
from .k_slices import by_mm, in_slices
from .reduction import LinearReduction
from .spec import PRODUCT, MatmulSpec

logger = logging.getLogger("vllm.batch_invariant")

OTHER_BLOCK_MS = (2, 4, 8, 16, 64, 128, 256)
"""A schedule may have these where they reproduce the reduction's. Not 1: one row is for a matrix-vector kernel."""


def _blas(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return kernel("mm", a)(a, b)


def _reduction(a: torch.Tensor, b: torch.Tensor) -> LinearReduction:
    return LinearReduction.of_device("cpu", b.shape[-1], b.shape[-2], a.dtype)


def _operand(tensor: torch.Tensor, reduction: LinearReduction) -> torch.Tensor:
    """The matrix [K, N] in the accumulator's dtype, packed by rows that are aligned, with zeros behind N: BLAS kernels
    may differ on anything else, and packed by columns few sizes of tiles agree.
    """
    (k, n), width, dtype = tensor.shape, reduction.columns, reduction.accumulate
    packed = tensor.stride() == (width, 1) and len(_storage(tensor)) >= k * width
    if packed and tensor.dtype == dtype and tensor.data_ptr() % reduction.alignment == 0:
        return tensor
    tensor = tensor.contiguous().to(dtype)  # in this order half the bytes are turned
    if n == width and tensor.data_ptr() % reduction.alignment == 0:
        return tensor
    out = tensor.new_zeros(k, width)[:, :n]
    return out.copy_(tensor)


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """What lies in memory from a tensor's first element on."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset(),), (1,))


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
    b = _storage(b)[: k * reduction.columns].view(k, reduction.columns)
    out = a.new_empty(m, n)
    start = 0
    for block_m in _tiles(m, verified_block_ms(reduction)):
        stop = min(start + block_m, m)
        tile = a[start:stop]  # [block_m, K]
        if stop - start < block_m or not tile.is_contiguous() or tile.data_ptr() % reduction.alignment:
            tile = a.new_zeros(block_m, k)
            tile[: stop - start] = a[start:stop]
        out[start:stop] = _blas(tile, b)[: stop - start, :n]
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
    base, k, n, dtype = reduction.block_m, reduction.k, reduction.columns, reduction.accumulate
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


def mm(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[M, K] @ [K, N] + bias; see the operation's package for the contract. ``out`` is written if there is one."""
    total = accumulate(a, b)
    if bias is not None:
        total += bias.to(total.dtype)
    return total.to(a.dtype) if out is None else out.copy_(total)


matmul = by_mm(mm)


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


def prepare(
    weight: torch.Tensor,
    max_m: int,  # noqa: ARG001
    spec: MatmulSpec = PRODUCT,
    sizes: Iterable[int] = (),  # noqa: ARG001
    dtype: torch.dtype | None = None,
) -> None:
    """Measure the sizes of tiles for a weight; they do not depend on M."""
    slice_k = weight.shape[1] * spec.b_format.packing // spec.k_slices
    verified_block_ms(LinearReduction.of_device("cpu", len(weight), slice_k, dtype or weight.dtype))


def prepare_weight(weight: torch.Tensor) -> torch.Tensor:
    """A weight [N, K] as GEMMs want it, [K, N] and in the accumulator's dtype, converted once instead of at every call
    (fp32 for bf16 and fp16: twice the memory).
    """
    reduction = _reduction(weight, weight.t())
    verified_block_ms(reduction)
    return _operand(weight.detach().t(), reduction)


def prepare_parts(weight: torch.Tensor, block_n: int | None) -> list[torch.Tensor]:
    """The same where a column shall have the bits that it has in a matrix of ``block_n`` columns, a divisor of N: the
    whole weight if that is so on this machine, else so many columns of it each. None: the whole weight.
    """
    if block_n is None or columns_agree(_reduction(weight, weight.t()), block_n):
        return [prepare_weight(weight)]
    return [prepare_weight(part) for part in weight.split(block_n)]


@cache
def columns_agree(reduction: LinearReduction, block_n: int) -> bool:
    """Whether a GEMM gives a column the bits that it has in a matrix of ``block_n`` columns; measured once a process.

    Args:
        reduction: of the whole matrix.
        block_n: a divisor of its N.
    """
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(reduction.block_m, reduction.k, generator=generator, dtype=reduction.accumulate)
    b = torch.randn(reduction.k, reduction.n, generator=generator, dtype=reduction.accumulate)
    return torch.equal(accumulate(a, b), torch.cat([accumulate(a, part) for part in b.split(block_n, 1)], 1))


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


def prepared_linear_of_parts(
    x: torch.Tensor, parts: Sequence[torch.Tensor], bias: torch.Tensor | None, k_slices: int = 1
) -> torch.Tensor:
    """``linear`` with a weight from :func:`prepare_parts`.

    Args:
        x: [..., K].
        parts: [K, N], or its columns in several.
        bias: [N], or None.
        k_slices: parts of equal length that K is added in, each rounded, and their sums as a tree; the bias is added
            last. Above 1 of one part.
    """
    if k_slices == len(parts) == 1:
        return prepared_linear(x, parts[0], bias)
    if k_slices == 1:
        out = torch.cat([prepared_accumulate(x, part, None) for part in parts], -1)
    else:
        [whole] = parts

        def of_slice(x: torch.Tensor, part: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return out.copy_(prepared_linear(x, part, None))

        out = in_slices(of_slice, k_slices)(x, whole)
    return out.to(x.dtype) if bias is None else (out + bias.to(parts[0].dtype)).to(x.dtype)
