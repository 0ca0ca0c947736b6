"""What is known of a format of weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

CODES, SCALES, ZEROS, GROUPS, GLOBAL = "codes", "scales", "zero points", "group indices", "global scales"
"""Tensors that formats store, in messages."""


@dataclass(frozen=True)
class Format:
    """A way to store a weight, a matrix [N, K] of the dtype of the activations that it is multiplied with. Each element
    is the exact product of its code and its scales, rounded once.
    """

    name: str
    """In names of problems, of which it is a part."""
    storage: tuple[torch.dtype | None, ...] = ()
    """Of the tensors that are stored, the first of which has N rows; None: the activations' dtype; none: one tensor of
    that dtype.
    """
    names: tuple[str, ...] = ()
    """Of these tensors."""
    packing: int = 1
    """Elements of K in an element of the first tensor."""
    group: int = 1
    """Elements of K that are decoded together: where K is cut, parts have whole groups."""
    exponents: int = 0
    """Powers of two that x is spread over in a certificate (:func:`..common.cancelling.cancelling`)."""
    encode: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] | None = None
    """Tensors that stand for a matrix near the given one, equal elements of a row as equal ones, so that sums which
    cancel still do; None: the matrix is stored itself.
    """
    decode: Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor] | None = None
    """Writes the matrix that tensors stand for to its second argument, packed, and returns that: the definition."""
    decode_on_gpu: Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor] | None = None
    """The same by kernels; None: as on any device."""

    def stored(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors that stand for a weight [N, K], or for one near it."""
        return (weight,) if self.encode is None else self.encode(weight)

    def is_stored_as(self, stored: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
        """Whether tensors have the dtypes of this format, for activations of ``dtype``."""
        return [tensor.dtype for tensor in stored] == [wanted or dtype for wanted in self.storage or (None,)]

    def flaw(self, stored: Sequence[torch.Tensor]) -> str:
        """What is wrong with the numbers of tensors of this format, in words, the tensor named; empty: nothing.

        Codes and scales that are NaN or infinite are, and group indices without a scale.
        """
        for name, tensor in zip(self.names, stored, strict=True):
            is_what = "NaN or infinite"
            if name == GROUPS:
                bad, is_what = (tensor < 0) | (tensor >= stored[1].shape[1]), f"outside 0 to {stored[1].shape[1] - 1}"
            elif name == SCALES and tensor.dtype == torch.uint8:  # e8m0
                bad = tensor == 255
            elif tensor.dtype == torch.float8_e4m3fn:  # which has no infinity
                bad = tensor.view(torch.uint8) & 127 == 127
            elif tensor.dtype.is_floating_point:
                bad = ~tensor.isfinite()
            else:
                continue
            if count := int(bad.sum()):
                return f"{name}: {count} of {tensor.numel()} are {is_what}"
        return ""

    def matrix(
        self, b: torch.Tensor, scales: Sequence[torch.Tensor], a: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What a [M, K] is multiplied with, [K, N]; ``b``, the first tensor transposed, where that is stored itself.

        Args:
            b: [K / packing, N], of the first dtype of ``storage``.
            scales: the other tensors.
            a: [M, K], whose dtype the matrix has.
            out: [N, K], for what is decoded; None: new memory.
        """
        if self.decode is None:
            return b
        out = a.new_empty(b.shape[1], b.shape[0] * self.packing) if out is None else out
        return self.write((b.t(), *scales), out).t()

    def write(self, stored: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """Write the matrix that tensors stand for to ``out`` [N, K], packed, on their device; returns that."""
        assert self.decode is not None
        on_gpu = self.decode_on_gpu if out.device.type == "cuda" else None
        return (on_gpu or self.decode)(stored, out)
