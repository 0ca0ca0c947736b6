"""A GEMM whose K is added in leaves, as a tree, by GEMMs that know nothing of it::

    p[i] = round(a[:, leaf i] @ b[leaf i])     leaves of equal length, each a GEMM like any other
    out = round(round(p[0] + p[1]) + round(p[2] + p[3]))

A leaf is read where it lies.
"""

from collections.abc import Callable

import torch

from ..all_reduce.cuda import add_ranks

Gemm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Takes a [M, K], b [K, N] and, if it shall not make one, the result [M, N]."""


def in_leaves(gemm: Gemm, leaves: int, workspace: torch.Tensor | None = None) -> Gemm:
    """The same GEMM with K in so many leaves; one leaf: itself.

    Args:
        gemm: without a bias, unless there is one leaf.
        leaves: a power of two that divides K.
        workspace: leaves * M * N elements or more, for what leaves give; None: new ones at every call.
    """
    if leaves == 1:
        return gemm

    def tree(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        shape = leaves, a.shape[0], b.shape[1]
        size = shape[0] * shape[1] * shape[2]
        parts = a.new_empty(shape) if workspace is None else workspace[:size].view(shape)
        for part, of_a, of_b in zip(parts, a.chunk(leaves, 1), b.chunk(leaves), strict=True):
            gemm(of_a, of_b, part)
        return add_ranks(parts, tree=True, out=out)

    return tree
