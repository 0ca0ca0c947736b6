"""The definition of the operation, in float64: what every implementation is compared with. And in the order in which a
CPU adds, what its kernels have the bits of.
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch

from .reduction import LinearReduction
from .spec import PRODUCT, MatmulSpec


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    spec: MatmulSpec = PRODUCT,
    bias: torch.Tensor | None = None,
    scales: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """What ``spec`` says in float64, where slices are no other sum; arguments as of :func:`..linear.matmul`."""
    return spec.epilogue.definition(linear(x, spec.b_format.matrix(weight.t(), scales, x).t(), bias))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` in float64. x: [..., K], weight: [N, K], bias: [N]; returns [..., N] float64."""
    product = torch.einsum("...k,nk->...n", x.double(), weight.double())
    return product if bias is None else product + bias.double()


def sums_in_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` as the CPU's reduction says, in NumPy's operations of elements: a chain of fused multiply-adds
    for each element, K ascending from 0. x: [M, K], weight: [N, K] of finite numbers; returns [M, N] in the
    accumulator's dtype.
    """
    wide = LinearReduction.of_device("cpu", *weight.shape, weight.dtype).accumulate
    fma = _fma32 if wide == torch.float32 else _fma64
    a, b = (operand.to(wide).numpy() for operand in (x, weight))
    sums = np.zeros((len(a), len(b)), a.dtype)
    for k in range(a.shape[1]):
        sums = fma(a[:, k, None], b[None, :, k], sums)
    return torch.from_numpy(sums)


def _fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``a * b + c`` of fp32, rounded once: the product is exact in fp64, and their sum, cut to an odd last bit where it
    is not, is rounded as the exact one (Boldo and Melquiond, "When double rounding is odd", 2004).
    """
    product, added = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + added
    of_added = total - product
    error = (product - (total - of_added)) + (added - of_added)
    bits = total.view(np.int64)
    away = (error > 0) == (total > 0)
    odd = np.where((error != 0) & (bits & 1 == 0), np.where(away, bits + 1, bits - 1), bits)
    return odd.view(np.float64).astype(np.float32)


@np.vectorize
def _fma64(a: float, b: float, c: float) -> float:
    return float(Fraction(a) * Fraction(b) + Fraction(c))
