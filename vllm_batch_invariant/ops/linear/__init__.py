"""GEMMs whose rows have the same bits however many rows there are.

Inside ``batch_invariant_mode()`` PyTorch's own functions (``@``, ``F.linear``, ``torch.mm``, ...) come here, with
autograd.
"""

from collections.abc import Iterable

import torch

from ..dispatch import implementation, module_for
from ..silu import silu_and_mul
from .reduction import LinearReduction

__all__ = ["LinearReduction", "bmm", "gated_linear", "linear", "mm", "prepare"]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    leaves: int = 1,
    weight_is_constant: bool = False,
) -> torch.Tensor:
    """``x @ weight.T + bias``, rounded once; or with K in leaves, each rounded and added to its neighbour, and their
    sums to their neighbours, until there is one, to which the bias is added.

    Args:
        x: [..., K] fp32, bf16, fp16 or fp64, any strides.
        weight: [N, K] of the same dtype, any strides.
        bias: [N], or None.
        leaves: of K, of equal length: a power of two.
        weight_is_constant: whether the kernel that was launched before does not write the weight, which a GPU may then
            read while that kernel ends.

    Returns:
        [..., N] of x's dtype. A row's bits depend on that row, the weight, the bias and the number of leaves.

    Raises:
        ValueError: shapes or dtypes that do not fit, or K cannot be cut into the leaves.
        NotCovered: a dtype or device without an implementation.
    """
    if (
        weight.dim() != 2
        or x.dim() == 0
        or x.shape[-1] != weight.shape[1]
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        shapes = [list(tensor.shape) for tensor in (x, weight, bias) if tensor is not None]
        raise ValueError(f"linear takes x [..., K], weight [N, K] and bias [N], got {shapes}")
    if x.dim() == 2:
        return _mm(x, weight.t(), bias, leaves, weight_is_constant)
    out = _mm(x.reshape(x.shape[:-1].numel(), x.shape[-1]), weight.t(), bias, leaves, weight_is_constant)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def gated_linear(x: torch.Tensor, weight: torch.Tensor, weight_is_constant: bool = False) -> torch.Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` (SwiGLU), with the bits of :func:`linear` and of ``silu_and_mul`` behind it.

    Args:
        x: [..., K] fp32, bf16 or fp16, any strides.
        weight: [gate, up], [2 * N, K] of the same dtype, any strides.
        weight_is_constant: as in :func:`linear`.

    Returns:
        [..., N] of x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotCovered: as in :func:`linear`.
    """
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1] or weight.shape[0] % 2:
        raise ValueError(
            f"gated_linear takes x [..., K] and weight [2 * N, K], got {list(x.shape)} and {list(weight.shape)}"
        )
    if not x.is_cuda:
        return silu_and_mul(linear(x, weight))
    _same_dtype(x, weight)
    rows = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    out = implementation("linear", rows, weight).gated_mm(rows, weight.t(), weight_is_constant)
    return out if x.dim() == 2 else out.reshape(*x.shape[:-1], weight.shape[0] // 2)


def mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``a @ b + bias``. a: [M, K], b: [K, N], bias: [N] or None; returns [M, N]. Errors as in :func:`linear`."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"mm takes [M, K] and [K, N], got {list(a.shape)} and {list(b.shape)}")
    if bias is not None and bias.shape != b.shape[1:]:
        raise ValueError(f"mm takes a bias of [N], got {list(bias.shape)} for {list(b.shape)}")
    return _mm(a, b, bias, 1, False)


def _mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, leaves: int, b_is_constant: bool) -> torch.Tensor:
    _same_dtype(a, b, bias)
    served = implementation("linear", a, b, bias)
    of_device = {"b_is_constant": True} if b_is_constant and a.is_cuda else {}
    if leaves == 1:
        return served.mm(a, b, bias, **of_device)
    if leaves & (leaves - 1) or b.shape[0] % leaves:
        raise ValueError(f"a tree has a power of two of leaves of equal length, got {leaves} of K = {b.shape[0]}")
    module_for("all_reduce", a.device.type)  # adds the leaves
    out = served.mm_in_leaves(a, b, leaves, **of_device)
    return out if bias is None else out + bias


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` for each batch entry. a: [B, M, K], b: [B, K, N]; returns [B, M, N]. Errors as in :func:`linear`."""
    if a.dim() != 3 or b.dim() != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise ValueError(f"bmm takes [B, M, K] and [B, K, N], got {list(a.shape)} and {list(b.shape)}")
    _same_dtype(a, b)
    return implementation("linear", a, b).bmm(a, b)


def prepare(
    weight: torch.Tensor,
    max_m: int,
    bias: bool = False,
    sizes: Iterable[int] = (),
    leaves: int = 1,
    gated: bool = False,
) -> None:
    """Measure now what :func:`linear` needs to know about such a weight, instead of at its first calls.

    Args:
        weight: [N, K]; only its shape, layout and dtype matter.
        max_m: the most rows of x to expect.
        bias: whether a bias is added.
        sizes: values of M that will be common, such as those of CUDA graphs.
        leaves: that K is added in; with several the bias is added afterwards.
        gated: whether it is for :func:`gated_linear`, which has neither bias nor leaves.

    Raises:
        NotCovered: as in :func:`linear`.
    """
    served = module_for("linear", weight.device.type)
    if gated and weight.is_cuda:
        served.prepare_gated(weight, max_m, sizes)
    elif leaves == 1:
        served.prepare(weight, max_m, bias, sizes)
    else:
        served.prepare_in_leaves(weight, max_m, sizes, leaves)


def _same_dtype(*operands: torch.Tensor | None) -> None:
    dtypes = {operand.dtype for operand in operands if operand is not None}
    if len(dtypes) > 1:
        raise ValueError(f"a matmul needs operands of one dtype, got {' and '.join(sorted(map(str, dtypes)))}")
