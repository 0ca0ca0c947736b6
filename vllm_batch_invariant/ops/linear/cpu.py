"""GEMMs on the CPU: chains of fused multiply-adds over K (:mod:`.cpu_kernel`), whose bits no machine moves."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ..all_reduce.cpu import add_ranks
from ..common.numba_rows import ELEMENTS, threads, use_threads
from . import cpu_kernel
from .cpu_kernel import has_fma
from .k_slices import by_mm
from .reduction import LinearReduction
from .spec import PRODUCT, MatmulSpec

__all__ = [
    "Panels",
    "accumulate",
    "accumulate_batch",
    "bmm",
    "has_fma",
    "matmul",
    "mm",
    "prepare",
    "prepare_weight",
    "prepared_linear",
]

_SERIAL_BELOW = 1 << 18
"""Products under which waking threads costs more than they save."""


@dataclass(frozen=True, eq=False)
class Panels:
    """A weight [N, K] as GEMMs read it, in as many bits: see :mod:`.cpu_kernel`.

    Attributes:
        data: [panels, K, columns of a panel] of the weight's dtype; columns behind N are 0.
        n: rows of the weight.
    """

    data: torch.Tensor
    n: int

    @classmethod
    def of(cls, weight: torch.Tensor) -> "Panels":
        """Those of a weight [N, K] of any strides.

        Raises:
            NotCovered: a dtype without a reduction.
        """
        n, k = weight.shape
        width = cpu_kernel.PANEL_BYTES // LinearReduction.of_device("cpu", n, k, weight.dtype).accumulate.itemsize
        panels = cls(torch.empty(-(-n // width), k, width, dtype=weight.dtype), n)
        if panels.data.numel():
            strides = weight.stride()
            span = weight.as_strided((1 + (n - 1) * strides[0] + (k - 1) * strides[1],), (1,))
            use_threads(_threads(panels.data.numel()))
            cpu_kernel.fill_panels(_array(span), *strides, n, k, panels.array, width)
        return panels

    @cached_property
    def array(self) -> np.ndarray:
        """The data as the kernels know it."""
        return _array(self.data.view(-1))

    def weight(self) -> torch.Tensor:
        """The weight [N, K], packed, in new memory."""
        half = self.data.shape[2] // 2
        if self.data.itemsize == 2:
            by_column = self.data.unflatten(2, (half, 2)).permute(0, 3, 2, 1)
        else:
            by_column = self.data.unflatten(2, (2, half)).permute(0, 2, 3, 1)
        return by_column.flatten(0, 2)[: self.n].contiguous()


_KNOWN_AS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


def _array(flat: torch.Tensor) -> np.ndarray:
    """Elements that lie side by side, with the dtype that the kernels know them by."""
    known = _KNOWN_AS.get(flat.dtype)
    return (flat.detach() if known is None else flat.detach().view(known)).numpy()


def _threads(work: int) -> int:
    return 1 if work < _SERIAL_BELOW else threads()


_NONE = {torch.float32: np.empty(0, np.float32), torch.float64: np.empty(0, np.float64)}
"""No bias."""


def _product(
    a: torch.Tensor, weight: Panels, bias: torch.Tensor | None, dtype: torch.dtype, first_k: int = 0
) -> torch.Tensor:
    """a [M, K] by the weight's K from ``first_k`` on, plus the bias [N]: packed [M, N], rounded once to ``dtype``."""
    (m, k), held_k = a.shape, weight.data.shape[1]
    n, wide = weight.n, LinearReduction.of_device("cpu", weight.n, held_k, weight.data.dtype).accumulate
    if 0 in (m, k, n):
        none = torch.zeros(m, n, dtype=wide)
        return (none if bias is None else none + bias.to(wide)).to(dtype)
    if a.dtype != wide and (a.dtype != torch.bfloat16 or wide != torch.float32):
        a = a.to(wide)
    if a.stride(1) != 1:
        a = a.contiguous()
    used, lda = _threads(m * n * k), a.stride(0)
    out = torch.empty(m, n, dtype=dtype if (dtype, wide) == (torch.bfloat16, torch.float32) else wide)
    added = _NONE[wide] if bias is None else _array(bias.to(wide).contiguous())
    like = ELEMENTS[a.dtype], ELEMENTS[out.dtype]
    use_threads(used)
    cpu_kernel.multiply(a.data_ptr(), lda, weight.array, added, out.data_ptr(), *like, m, n, k, held_k, first_k, used)
    return out.to(dtype)


def mm(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[M, K] @ [K, N] + bias; see the operation's package for the contract. ``out`` is written if there is one."""
    found = _product(a, Panels.of(b.t()), bias, a.dtype)
    return found if out is None else out.copy_(found)


matmul = by_mm(mm)


def accumulate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[M, K] @ [K, N], not yet rounded: the result is in the reduction's accumulator dtype."""
    weight = Panels.of(b.t())
    return _product(a, weight, None, LinearReduction.of_device("cpu", *b.shape[::-1], b.dtype).accumulate)


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, M, K] @ [B, K, N], one entry after the other."""
    return accumulate_batch(a, b).to(a.dtype)


def accumulate_batch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B, M, K] @ [B, K, N], not yet rounded."""
    wide = LinearReduction.of_device("cpu", b.shape[2], b.shape[1], a.dtype).accumulate
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=wide)
    for entry in range(a.shape[0]):
        out[entry] = accumulate(a[entry], b[entry])
    return out


def prepare(
    weight: torch.Tensor,
    max_m: int,  # noqa: ARG001
    spec: MatmulSpec = PRODUCT,  # noqa: ARG001
    sizes: Iterable[int] = (),  # noqa: ARG001
    dtype: torch.dtype | None = None,
    repeats: bool = False,  # noqa: ARG001
) -> None:
    """Refuse what has no reduction; there is nothing to measure."""
    LinearReduction.of_device("cpu", *weight.shape, dtype or weight.dtype)


def prepare_weight(weight: torch.Tensor) -> Panels:
    """A weight [N, K] as GEMMs want it, turned once instead of at every call."""
    return Panels.of(weight)


def prepared_linear(x: torch.Tensor, prepared: Panels, bias: torch.Tensor | None, k_slices: int = 1) -> torch.Tensor:
    """``linear`` with a weight from :func:`prepare_weight`: same bits, without the conversion.

    Args:
        x: [..., K].
        prepared: of the weight [N, K].
        bias: [N], or None.
        k_slices: parts of equal length that K is added in, each rounded, and their sums as a tree; the bias is added
            last.
    """
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    if k_slices == 1:
        out = _product(rows, prepared, bias, x.dtype)
    else:
        length = rows.shape[1] // k_slices
        firsts = range(0, rows.shape[1], length)
        slices = [_product(rows[:, first : first + length], prepared, None, x.dtype, first) for first in firsts]
        out = add_ranks(torch.stack(slices), tree=True)
        out = out if bias is None else out + bias
    return out.reshape(*x.shape[:-1], prepared.n)
