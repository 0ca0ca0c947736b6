"""Exact arithmetic on a CPU: rows become integers in numba, and a product is numba's loop or one call of the BLAS."""

from dataclasses import dataclass

import numpy as np
import torch

from ..attention.params import PagedAttention
from ..common.native_kernels import kernel
from ..common.numba_rows import RowKernel
from ..top_k_top_p.cpu import top_k_top_p as top_k_top_p_of_floats
from . import cpu_kernels
from .definition import LOG2_E, SPLITS, THREE_DIGITS, TWO_DIGITS
from .limits import check_k, check_whole_rows

SERVES = ("sliding_window", "logits_soft_cap")
"""Of attention: what the definition has."""
BLAS_FROM = 8
"""Rows of x from which a product is the BLAS's: a weight is then worth being widened to fp64."""
BLOCK_N = 1024
"""Rows of a weight that are widened at a time."""
BLOCK_ROWS = 32
"""Query rows of a work item of attention, whose keys are put on their grids once."""


@dataclass(frozen=True)
class ExactWeight:
    """A weight on its rows' grids.

    Attributes:
        integers: [N, segments, K / segments] int16.
        scale: [N, segments] fp32, powers of two.
    """

    integers: torch.Tensor
    scale: torch.Tensor


def prepare(weight: torch.Tensor, parts: int = 1) -> ExactWeight:
    """Put a weight [N, K] bf16 on its rows' grids, in ``parts`` equal segments of K (:func:`.definition.segments`).

    Raises:
        NotCovered: a segment of more than :data:`.definition.LARGEST_K`.
    """
    n, k = weight.shape
    check_k(k // parts)
    integers = torch.empty(n * parts, k // parts, dtype=torch.int16)
    scale = torch.empty(n * parts, dtype=torch.float32)
    for rows in torch.arange(n).split(BLOCK_N):
        of = slice(int(rows[0]) * parts, (int(rows[-1]) + 1) * parts)
        held = weight[rows].float().reshape(-1, k // parts)
        cpu_kernels.to_weights(held.numel(), held, integers[of], scale[of])
    return ExactWeight(integers.view(n, parts, -1), scale.view(n, parts))


def linear(x: torch.Tensor, weight: ExactWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias as :func:`.definition.linear`: [..., K] bf16 to [..., N] bf16; bias [N] bf16."""
    return finish(partial_linear(x, weight), bias)


def partial_linear(x: torch.Tensor, weight: ExactWeight) -> torch.Tensor:
    """[..., N] fp32, the sum of those segments of K that this worker has, a power of two: a subtree of
    :func:`.definition.linear`'s tree. Arguments as for :func:`linear`.
    """
    n, parts, length = weight.integers.shape
    rows = x.float().reshape(-1, length)
    m = len(rows) // parts
    integers, scale = torch.empty(rows.shape, dtype=torch.int32), torch.empty(len(rows), dtype=torch.float32)
    cpu_kernels.to_activations(rows.numel(), rows, integers, scale)
    integers, scale = integers.view(m, parts, length), scale.view(m, parts)
    sums = []
    for part in range(parts):
        t = _products(integers[:, part], weight.integers[:, part])
        sums.append(t.to(torch.float32).mul_(weight.scale[:, part]).mul_(scale[:, part, None]))
    while len(sums) > 1:
        sums = [left.add_(right) for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0].view(*x.shape[:-1], n)


def finish(total: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The whole sum [..., N] fp32, which may be overwritten, plus the bias [N] bf16, in bf16."""
    return (total if bias is None else total.add_(bias.float())).to(torch.bfloat16)


def _products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, K] int32 @ weight [N, K] int16 transposed, exact: int64, or integers in fp64."""
    m, n = len(x), len(weight)
    if m < BLAS_FROM:
        out = torch.empty(m, n, dtype=torch.int64)
        cpu_kernels.products(m * n * x.shape[1], x.contiguous(), weight, out)
        return out
    out, wide = torch.empty(m, n, dtype=torch.float64), x.to(torch.float64)
    for block, into in zip(weight.split(BLOCK_N), out.split(BLOCK_N, dim=1), strict=True):
        into.copy_(kernel("mm", wide)(wide, block.to(torch.float64).t()))
    return out


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    variance_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As :func:`.definition.rms_norm`, of [..., N] bf16; with a residual, also x + residual in bf16.

    Raises:
        NotCovered: another ``variance_size`` than N.
    """
    check_whole_rows(variance_size, x.shape[-1])
    z = x.float() if residual is None else x.float() + residual.float()
    rows = z.reshape(-1, z.shape[-1])
    out = torch.empty_like(rows)
    cpu_kernels.normalise(rows.numel(), rows, out, eps)
    if weight is not None:
        out *= weight.float()
    normalised = out.to(torch.bfloat16).view(x.shape)
    return normalised if residual is None else (normalised, z.to(torch.bfloat16))


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """As :func:`.definition.silu_and_mul`: [..., 2 N] bf16 to [..., N] bf16."""
    return _gated(cpu_kernels.silu_and_mul, x)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """As :func:`.definition.gelu_and_mul`: [..., 2 N] bf16 to [..., N] bf16."""
    return _gated(cpu_kernels.gelu_and_mul, x)


def _gated(row_kernel: RowKernel, x: torch.Tensor) -> torch.Tensor:
    rows = x.float().reshape(-1, x.shape[-1])
    out = rows.new_empty(len(rows), x.shape[-1] // 2)
    row_kernel(out.numel(), rows, out)
    return out.to(torch.bfloat16).view(*x.shape[:-1], -1)


def capped(x: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """As :func:`.definition.capped`, of [..., N] bf16 and rounded to bf16."""
    rows = x.float().reshape(-1, x.shape[-1])
    out = torch.empty_like(rows)
    cpu_kernels.cap(rows.numel(), rows, out, soft_cap)
    return out.to(torch.bfloat16).view(x.shape)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """As :func:`.definition.rotate`: x [tokens, heads, head_size] bf16, table [tokens, head_size] bf16."""
    (a, b), (cosine, sine) = x.float().chunk(2, dim=-1), table.float().unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1).to(torch.bfloat16)


def softmax(x: torch.Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """As :func:`.definition.softmax`, computed in fp32 and rounded to ``dtype`` or x's own."""
    return _over_rows(cpu_kernels.softmax, x, dim, dtype)


def log_softmax(x: torch.Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """As :func:`.definition.log_softmax`; arguments as for :func:`softmax`."""
    return _over_rows(cpu_kernels.log_softmax, x, dim, dtype)


def _over_rows(row_kernel: RowKernel, x: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    turned = x.float().movedim(dim, -1)
    rows = turned.reshape(-1, turned.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    row_kernel(rows.numel(), rows, out)
    return out.view(turned.shape).movedim(-1, dim).to(dtype or x.dtype)


def top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """As :func:`.definition.top_k_top_p`, in place: logits [rows, vocabulary] fp32, k and p [rows] or None."""
    return top_k_top_p_of_floats(logits, k, p, exact=True)


def draw(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[rows] int64, the tokens with the largest logit and noise of :func:`.definition.gumbel`.

    Args:
        logits: [rows, vocabulary] fp32, -inf for tokens that cannot be drawn.
        keys: [rows] int64, the bits of :func:`.definition.key_of`.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64)
    cpu_kernels.draw(logits.numel(), logits.contiguous(), keys, tokens)
    return tokens


def paged_attention(params: PagedAttention, out: torch.Tensor) -> None:
    """Write the attention of ``params`` to ``out``, as :func:`.definition.attention` for each request."""
    (_, heads, head_size), kv_heads = params.query.shape, params.cache.kv_heads
    spec, cache, group = params.spec, params.cache, heads // kv_heads
    query = params.query[: params.tokens].float().reshape(-1, head_size)
    integers, scale = torch.empty(query.shape, dtype=torch.int32), torch.empty(len(query), dtype=torch.float32)
    cpu_kernels.to_weights(query.numel(), query, integers, scale)
    soft_cap = spec.logits_soft_cap or 0.0
    factor = np.float32(spec.scale) if soft_cap else np.float32(spec.scale) * LOG2_E
    result = torch.empty(params.tokens, heads, head_size, dtype=torch.float32)
    tokens = max(1, BLOCK_ROWS // group)
    work = np.array(
        [
            (request, kv_head, first, min(first + tokens, rows.stop), positions[0] + first - rows.start, positions.stop)
            for request, rows, positions in params.requests()
            for first in range(rows.start, rows.stop, tokens)
            for kv_head in range(kv_heads)
        ]
    )
    cpu_kernels.attend(
        int((work[:, 3] - work[:, 2]) @ work[:, 5]) * group * head_size,
        integers.view(result.shape), scale.view(result.shape[:2]), result,
        cache.keys.view(torch.int16), cache.values.view(torch.int16), torch.from_numpy(cache.table),
        cache.page_size, torch.from_numpy(work), factor, np.float32(soft_cap), spec.sliding_window or 0, group,
        torch.tensor(SPLITS),
    )  # fmt: skip
    out[: params.tokens] = result


def certify() -> None:
    """Compare the products of this machine with Python's integers, at their bounds.

    Raises:
        ArithmeticError: the BLAS or the compiled loop has another integer: it is no engine of exact arithmetic.
    """
    k = 4096
    signs = torch.where(torch.arange(k) % 3 == 0, -1, 1)
    x = torch.stack([torch.full((k,), THREE_DIGITS), THREE_DIGITS * signs, torch.arange(k) - 17] * 3).to(torch.int32)
    w = torch.stack([torch.full((k,), -TWO_DIGITS), TWO_DIGITS * signs, torch.arange(k) - 4000]).to(torch.int16)
    right = [[sum(a * b for a, b in zip(left, row, strict=True)) for row in w.tolist()] for left in x.tolist()]
    for rows in (1, len(x)):
        if _products(x[:rows], w).tolist() != right[:rows]:
            raise ArithmeticError(f"products of {rows} rows of integers are not exact on this machine")
