"""Any matmul by GEMMs that know nothing but ``a @ b``: the weight's matrix decoded, K in slices, and what is behind::

    p[i] = round(a[:, slice i] @ b[slice i])     slices of equal length, each a GEMM like any other
    out = round(round(p[0] + p[1]) + round(p[2] + p[3]))

A slice is read where it lies.
"""

import math
from collections.abc import Callable, Sequence

import torch

from ..dispatch import module_for
from .spec import BIASED, PRODUCT, MatmulSpec

Gemm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Takes a [M, K], b [K, N] and, if it shall not make one, the result [M, N]."""


def in_slices(gemm: Gemm, k_slices: int, workspace: torch.Tensor | None = None) -> Gemm:
    """The same GEMM with K in so many slices; one slice: itself.

    Args:
        gemm: without a bias, unless there is one slice; of several it gets the result to write.
        k_slices: a power of two that divides K.
        workspace: k_slices * M * N elements or more, for what slices give; None: new ones at every call.
    """
    if k_slices == 1:
        return gemm

    def tree(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        add_ranks, shape = module_for("all_reduce", a.device.type).add_ranks, (k_slices, *a.shape[:-1], b.shape[1])
        parts = a.new_empty(shape) if workspace is None else workspace[: math.prod(shape)].view(shape)
        for part, of_a, of_b in zip(parts, a.chunk(k_slices, -1), b.chunk(k_slices), strict=True):
            gemm(of_a, of_b, part)
        return add_ranks(parts, tree=True) if out is None else add_ranks(parts, tree=True, out=out)

    return tree


def by_mm(mm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Every matmul by one that takes a, b, a bias or None, and the result to write or None."""

    def matmul(
        a: torch.Tensor,
        b: torch.Tensor,
        spec: MatmulSpec = PRODUCT,
        bias: torch.Tensor | None = None,
        b_is_constant: bool = False,  # noqa: ARG001 - of some kernels
        scales: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        if spec is PRODUCT or spec is BIASED:
            return mm(a, b, bias, None)

        def gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
            return mm(a, b, bias, out)

        product = in_slices(gemm, spec.k_slices)(a, spec.b_format.matrix(b, scales, a), None)
        behind = spec.epilogue.behind(a.device.type, b.shape[1])
        return product if behind is None else behind(product)

    return matmul
