"""Products of codes on a CPU: by PyTorch's int8 matmul where this machine's sums are exact, else by the BLAS in fp32.

oneDNN multiplies int8 by pairs that are added in 16 bits where the CPU has no VNNI, and those saturate: on a Zen 4 that
was told to do without (ONEDNN_MAX_CPU_ISA=AVX512_CORE or AVX2) sums of random codes were wrong. Hence the test of
:func:`multiplies_exactly`, for every weight shape.
"""

from functools import cache

import torch

from ...errors import NotCovered
from ..common.native_kernels import kernel
from . import cpu_e4m3
from .reduction import E4M3, EXACT, ScaledLinearReduction

EXACT_K = 2**24 // 128**2
"""Elements of K whose products have exact sums in fp32, in any order."""
BLOCK_N = 256
"""Rows of a weight that are widened to fp32 at a time."""
_TRIED_MS = (1, 2, 5, 16, 33)
"""Rows of the products that are compared: oneDNN has other kernels for one and for few."""


def scaled_linear(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: ScaledLinearReduction,
    weight_is_constant: bool = False,  # noqa: ARG001 - of some kernels
) -> torch.Tensor:
    """See the operation's package; codes [M, K] and scales [M], or [M, groups] of blocks.

    Raises:
        NotCovered: the sums of a tensor core that has no model.
    """
    if reduction.codes == E4M3:
        if reduction.mma not in cpu_e4m3.SUMS:
            raise NotCovered(
                f"sums of e4m3 of {reduction.mma} on a CPU",
                f"it has those of {', '.join(cpu_e4m3.SUMS)}",
                "use one of them",
            )
        return cpu_e4m3.scaled_linear(codes, scale, weight, weight_scale, bias, reduction)
    by_int8_here = codes.numel() and multiplies_exactly(*weight.shape, torch.get_num_threads())
    multiply = by_int8 if by_int8_here else by_blas
    out = multiply(codes, weight).to(torch.float32).mul_(weight_scale).mul_(scale[:, None])
    if bias is not None:
        out += bias.to(torch.float32)
    return out.to(reduction.dtype)


def by_int8(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """codes [M, K] @ weight [N, K] transposed, int32, exact where :func:`multiplies_exactly` says so."""
    return torch._int_mm(codes.contiguous(), weight.t())


def by_blas(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same, exact on every machine: sums of :data:`EXACT_K` elements in fp32, added as integers."""
    out = torch.zeros(len(codes), len(weight), dtype=torch.int32)
    if codes.numel() == 0:
        return out
    x = codes.to(torch.float32)
    for block, into in zip(weight.split(BLOCK_N), out.split(BLOCK_N, 1), strict=True):
        wide = block.to(torch.float32).t()
        for part, of_block in zip(x.split(EXACT_K, 1), wide.split(EXACT_K), strict=True):
            into += kernel("mm", x)(part, of_block).to(torch.int32)
    return out


@cache
def multiplies_exactly(n: int, k: int, threads: int) -> bool:  # noqa: ARG001 - another number is measured again
    """Whether PyTorch's int8 matmul gives the exact sums for a weight [N, K] here; measured once a process, with codes
    of which many are the largest and the smallest.
    """
    if 0 in (n, k):
        return False
    draw = torch.Generator().manual_seed(0)

    def operand(rows: int) -> torch.Tensor:
        codes = torch.randint(-128, 128, (rows, k), generator=draw)
        signs = torch.randint(-1, 2, (rows, k), generator=draw)
        return torch.where(signs == 0, codes, signs * 1000).clamp(-128, 127).to(torch.int8)

    weight = operand(n)
    weight[: n // 4] = 127
    for m in _TRIED_MS:
        codes = operand(m)
        codes[0] = 127
        try:
            found = by_int8(codes, weight)
        except RuntimeError:  # a build of PyTorch that has none
            return False
        if not torch.equal(found, by_blas(codes, weight)):
            return False
    return True


def mma_of(codes: torch.Tensor) -> str:  # noqa: ARG001 - as of every device
    """What adds products of e4m3 here."""
    return EXACT


def prepare(weight: torch.Tensor, *_: object) -> None:
    """Find out what multiplies a weight [N, K] of int8; of e4m3 that is known."""
    if weight.dtype == E4M3:
        return
    multiplies_exactly(*weight.shape, torch.get_num_threads())
