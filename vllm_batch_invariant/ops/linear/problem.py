"""What tells one kind of matrix product from another, apart from the number of its rows."""

from dataclasses import dataclass

import torch

from .triton_gemm import ALIGNMENT, is_regular, major_stride

_LEAST_DEPTH = 16


@dataclass(frozen=True)
class Signature:
    """The products of [M, K] by one kind of [K, N]."""

    columns: int
    """N"""
    depth: int
    """K"""
    dtype: torch.dtype
    bias: bool
    device: int
    a_by_rows: bool = True
    """Whether K is the inner side of a, rather than M."""
    b_by_columns: bool = True
    """Whether K is the inner side of b, as in a weight [N, K] transposed, rather than N."""

    def a_layout(self, rows: int, stride: int | None = None) -> tuple[int, int, int]:
        """Height, width and stride of a as a column-major matrix: its rows are columns there."""
        height, width = (self.depth, rows) if self.a_by_rows else (rows, self.depth)
        return height, width, height if stride is None else stride

    def b_layout(self, stride: int | None = None) -> tuple[int, int, int]:
        """The same of b."""
        height, width = (self.depth, self.columns) if self.b_by_columns else (self.columns, self.depth)
        return height, width, height if stride is None else stride

    def __str__(self) -> str:
        sides = "" if self.a_by_rows and self.b_by_columns else f" {'NT'[not self.a_by_rows]}{'NT'[self.b_by_columns]}"
        return f"N={self.columns} K={self.depth} {str(self.dtype).removeprefix('torch.')}{sides}{' bias' * self.bias}"


def signature_of(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> Signature | None:
    """The signature of ``a @ b + bias``, or None if only Triton's kernel for any strides and dtypes takes it."""
    if not is_regular(a, b, a.dtype) or a.shape[1] < _LEAST_DEPTH:
        return None
    if bias is not None and (bias.stride(0) != 1 or bias.data_ptr() % ALIGNMENT):
        return None
    return Signature(
        b.shape[1],
        a.shape[1],
        a.dtype,
        bias is not None,
        a.device.index,
        a_by_rows=major_stride(a)[1],
        b_by_columns=not major_stride(b)[1],
    )
