"""GEMMs whose rows have the same bits however many rows there are.

Inside ``batch_invariant_mode()`` PyTorch's own functions (``@``, ``F.linear``, ``torch.mm``, ...) come here, with
autograd.
"""

from collections.abc import Iterable, Sequence

import torch

from ..dispatch import arithmetic, implementation, module_for
from ..formats import Format
from .reduction import LinearReduction
from .spec import GATED, PRODUCT, MatmulSpec, spec_of

__all__ = [
    "GATED",
    "LinearReduction",
    "MatmulSpec",
    "bmm",
    "gated_linear",
    "linear",
    "matmul",
    "mm",
    "prepare",
    "reads_as_stored",
]


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    spec: MatmulSpec = PRODUCT,
    bias: torch.Tensor | None = None,
    weight_is_constant: bool = False,
    scales: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """What ``spec`` says of x and a weight that stands for a matrix [N, K] (:mod:`..formats`).

    Args:
        x: [..., K] fp32, bf16, fp16 or fp64, any strides.
        weight: the first tensor of its format: of a plain one [N, K] of the same dtype, any strides.
        spec: what is computed.
        bias: [N] of x's dtype where the epilogue has one, else None.
        weight_is_constant: whether the weight is as it was when a launch last waited for all before it: then a GPU may
            read it while kernels before this one run.
        scales: the other tensors of the weight's format.

    Returns:
        [..., N] of x's dtype, or as many columns as the epilogue leaves. A row's bits depend on that row, the weight,
        the bias and the spec.

    Raises:
        ValueError: shapes or dtypes that do not fit, or K cannot be cut into the spec's slices.
        NotCovered: a dtype or device without an implementation.
    """
    if (
        weight.dim() != 2
        or x.dim() == 0
        or x.shape[-1] != weight.shape[1] * spec.b_format.packing
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        shapes = [list(tensor.shape) for tensor in (x, weight, bias) if tensor is not None]
        raise ValueError(f"linear takes x [..., K], weight [N, K] and bias [N], got {shapes}")
    if x.dim() == 2:
        return _matmul(x, weight.t(), spec, bias, weight_is_constant, scales)
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    out = _matmul(rows, weight.t(), spec, bias, weight_is_constant, scales)
    return out.reshape(*x.shape[:-1], out.shape[1])


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    k_slices: int = 1,
    weight_is_constant: bool = False,
) -> torch.Tensor:
    """``x @ weight.T + bias``, rounded once; or with K in slices as :class:`MatmulSpec` says, and the bias added to
    their sum. Arguments and errors as of :func:`matmul`.
    """
    if k_slices == 1 or bias is None:
        return matmul(x, weight, spec_of(bias is not None, k_slices), bias, weight_is_constant)
    return matmul(x, weight, spec_of(False, k_slices), None, weight_is_constant) + bias


def gated_linear(x: torch.Tensor, weight: torch.Tensor, weight_is_constant: bool = False) -> torch.Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` (SwiGLU) for a weight [gate, up], [2 * N, K], with the bits of :func:`linear`
    and of ``silu_and_mul`` behind it; returns [..., N]. Arguments and errors as of :func:`matmul`.
    """
    return matmul(x, weight, GATED, None, weight_is_constant)


def mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``a @ b + bias``. a: [M, K], b: [K, N], bias: [N] or None; returns [M, N]. Errors as in :func:`linear`."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"mm takes [M, K] and [K, N], got {list(a.shape)} and {list(b.shape)}")
    if bias is not None and bias.shape != b.shape[1:]:
        raise ValueError(f"mm takes a bias of [N], got {list(bias.shape)} for {list(b.shape)}")
    _same_dtype(a, b, bias)
    return implementation("linear", a, b, bias).mm(a, b, bias)


def _matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    spec: MatmulSpec,
    bias: torch.Tensor | None,
    b_is_constant: bool,
    scales: Sequence[torch.Tensor],
) -> torch.Tensor:
    dtype, storage = a.dtype, spec.b_format.storage
    if storage or b.dtype != dtype or (bias is not None and bias.dtype != dtype):
        if storage and not spec.b_format.is_stored_as((b, *scales), dtype):
            wanted, stored = (tuple(one or dtype for one in storage), tuple(one.dtype for one in (b, *scales)))
            raise ValueError(f"{spec.b_format.name} is stored as {wanted}, got {stored}")
        _same_dtype(a, None if storage else b, bias)
    if spec.epilogue.has_bias is (bias is None):
        raise ValueError(
            f"a bias is for a spec with one, got {spec}{' with' if bias is not None else ' without'} a bias"
        )
    served = implementation("linear", a, b, bias, *scales)
    if spec.cuts_k:
        spec.check_k(a.shape[1])
    return served.matmul(a, b, spec, bias, b_is_constant, scales)


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` for each batch entry. a: [B, M, K], b: [B, K, N]; returns [B, M, N]. Errors as in :func:`linear`."""
    if a.dim() != 3 or b.dim() != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise ValueError(f"bmm takes [B, M, K] and [B, K, N], got {list(a.shape)} and {list(b.shape)}")
    _same_dtype(a, b)
    return implementation("linear", a, b).bmm(a, b)


def reads_as_stored(b_format: Format, k: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel for few rows reads such weights as they are stored; if not, the matrix in their place is faster.

    Args:
        b_format: of the weight.
        k: elements of a row.
        dtype: of the activations.
        device: that multiplies.
    """
    is_float = device.type == "cuda" and arithmetic() == "float"
    return is_float and module_for("linear", "cuda").reads_as_stored(b_format, k, dtype, device)


def prepare(
    weight: torch.Tensor,
    max_m: int,
    spec: MatmulSpec = PRODUCT,
    sizes: Iterable[int] = (),
    dtype: torch.dtype | None = None,
    repeats: bool = False,
) -> None:
    """Measure now what :func:`matmul` needs to know about such a weight, instead of at its first calls.

    Args:
        weight: the first tensor of its format; only its shape, layout and dtype matter.
        max_m: the most rows of x to expect.
        spec: what will be computed.
        sizes: values of M that will be common, such as those of CUDA graphs.
        dtype: of x; None: the weight's.
        repeats: whether it is of a layer, of which a model has many: what :func:`settle` looks at.

    Raises:
        NotCovered: as in :func:`matmul`.
    """
    module_for("linear", weight.device.type).prepare(weight, max_m, spec, sizes, dtype, repeats)


def settle(device: torch.device) -> None:
    """Choose once more among the schedules of layers that were prepared for a kind of device, as these follow one
    another: when a model is loaded. No bit depends on it.
    """
    module_for("linear", device.type).settle()


def _same_dtype(*operands: torch.Tensor | None) -> None:
    dtypes = {operand.dtype for operand in operands if operand is not None}
    if len(dtypes) > 1:
        raise ValueError(f"a matmul needs operands of one dtype, got {' and '.join(sorted(map(str, dtypes)))}")
