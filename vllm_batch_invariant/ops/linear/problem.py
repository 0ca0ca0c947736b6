"""All that tells one GEMM from another, apart from M, and which operands cuBLASLt and TMA take."""

from dataclasses import dataclass, replace

import torch

from ..common.dtypes import E4M3
from ..formats import PLAIN
from .reduction import LinearReduction
from .spec import NONE, PRODUCT, MatmulSpec, spec_of

ALIGNMENT = 16
"""Bytes: what addresses and strides are multiples of where the tensor memory accelerator (TMA) or cuBLASLt serves."""
LARGEST_SIDE = 2**31 - 1


@dataclass(frozen=True)
class GemmProblem:
    """What a spec makes of a: [M, K] and b: [K, N], for any M."""

    n: int
    k: int
    dtype: torch.dtype
    """Of a and of the result."""
    spec: MatmulSpec
    device: int
    """Index of the GPU."""
    a_k_major: bool = True
    """Whether K is the contiguous side of a, rather than M."""
    b_k_major: bool = True
    """Whether K is the contiguous side of b, as in a weight [N, K] transposed, rather than N."""

    @property
    def operands(self) -> torch.dtype:
        """Of a and of b."""
        return self.dtype

    @property
    def columns(self) -> int:
        """Of the result."""
        return self.spec.epilogue.columns(self.n)

    @property
    def reduction(self) -> LinearReduction:
        return LinearReduction.of_device("cuda", self.n, self.k, self.dtype, self.spec.k_slices)

    @property
    def k_slice(self) -> "GemmProblem":
        """The problem of one slice of the matrix that the weight stands for."""
        return replace(self, k=self.k // self.spec.k_slices, spec=replace(self.spec, k_slices=1, b_format=PLAIN))

    def a_layout(self, m: int, ld: int | None = None) -> tuple[int, int, int]:
        """Rows, columns and leading dimension of a as a column-major matrix, whose rows are columns of ours."""
        rows, columns = (self.k, m) if self.a_k_major else (m, self.k)
        return rows, columns, rows if ld is None else ld

    def b_layout(self, ld: int | None = None) -> tuple[int, int, int]:
        """The same of b."""
        rows, columns = (self.k, self.n) if self.b_k_major else (self.n, self.k)
        return rows, columns, rows if ld is None else ld

    def __str__(self) -> str:
        sides = "" if self.a_k_major and self.b_k_major else f" {'NT'[not self.a_k_major]}{'NT'[self.b_k_major]}"
        name = f"N={self.n} K={self.k} {str(self.dtype).removeprefix('torch.')}{sides}"
        return f"{name} {self.spec.name}".rstrip()


@dataclass(frozen=True)
class ScaledProblem:
    """A product of codes of e4m3 with scales of blocks, [M, K] and a weight [N, K], both packed, for any M."""

    n: int
    k: int
    dtype: torch.dtype
    """Of the result."""
    device: int
    """Index of the GPU."""
    a_k_major: bool = True
    b_k_major: bool = True
    spec: MatmulSpec = PRODUCT
    """Without a bias."""

    @property
    def operands(self) -> torch.dtype:
        """Of both operands."""
        return E4M3

    @property
    def k_slice(self) -> "ScaledProblem":
        """Itself: it has one."""
        return self

    def a_layout(self, m: int, ld: int | None = None) -> tuple[int, int, int]:
        """As :meth:`GemmProblem.a_layout`."""
        return self.k, m, self.k if ld is None else ld

    def b_layout(self, ld: int | None = None) -> tuple[int, int, int]:
        """As :meth:`GemmProblem.b_layout`."""
        return self.k, self.n, self.k if ld is None else ld

    def __str__(self) -> str:
        return f"N={self.n} K={self.k} e4m3 blocks {str(self.dtype).removeprefix('torch.')}"


def problem_of(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, spec: MatmulSpec | None = None
) -> GemmProblem | None:
    """The problem that a matmul is a case of, or None if only Triton's kernel for any strides and dtypes takes it. One
    whose result is not aligned as the epilogue leaves it is a product with the rest behind it.

    Args:
        a: [M, K]
        b: [K / packing, N], the first tensor that the weight's format stores, transposed.
        bias: [N], or None.
        spec: what is computed; None: ``a @ b + bias``.
    """
    spec = spec_of(bias is not None) if spec is None else spec
    b_format = spec.b_format
    if b_format.decode is not None:  # it is read as decoding leaves it
        b = torch.empty(b.shape[1], b.shape[0] * b_format.packing, dtype=a.dtype, device="meta").t()
    if not supports_tma(a, b, a.dtype):
        return None
    if bias is not None and (bias.stride(0) != 1 or bias.data_ptr() % ALIGNMENT):
        return None
    (k, n), size = b.shape, a.element_size()
    if spec.epilogue.columns(n) * size % ALIGNMENT:
        spec = replace(spec, epilogue=NONE)
    slice_k = k // spec.k_slices
    if spec.k_slices > 1 and slice_k * size % ALIGNMENT:
        return None
    problem = GemmProblem(n, k, a.dtype, spec, a.device.index, leading_dim(a)[1], not leading_dim(b)[1])
    return problem if slice_k >= problem.reduction.k_step else None


def leading_dim(matrix: torch.Tensor) -> tuple[int, bool] | None:
    """Elements between neighbouring rows and True, or between columns and False; None if neither side is packed.

    A single row or column may have any stride of its own: it is given as if packed.
    """
    (rows, columns), (stride_row, stride_column) = matrix.shape, matrix.stride()
    if stride_column == 1:
        return (columns if rows == 1 else stride_row), True
    if stride_row == 1:
        return (rows if columns == 1 else stride_column), False
    return None


def supports_tma(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> bool:
    """Whether TMA takes a: [M, K], b: [K, N] and a result [M, N]: 16 bits, packed on a side, and aligned."""
    if a.dtype not in (torch.bfloat16, torch.float16) or b.dtype != a.dtype:
        return False
    if min(*a.shape, b.shape[1]) == 0 or max(*a.shape, b.shape[1]) > LARGEST_SIDE:
        return False
    if b.shape[1] * out_dtype.itemsize % ALIGNMENT:
        return False
    for operand in (a, b):
        found = leading_dim(operand)
        if found is None or found[0] < operand.shape[found[1]]:  # rows that overlap are read by pointers
            return False
        if found[0] * operand.element_size() % ALIGNMENT or operand.data_ptr() % ALIGNMENT:
            return False
    return True
