"""Products of codes of eight bits with a scale for each row and each column, the same bits on every device."""

import torch

from ..dispatch import implementation, module_for
from .reduction import LARGEST_K, ScaledLinearReduction

__all__ = ["LARGEST_K", "ScaledLinearReduction", "prepare", "scaled_linear"]


def scaled_linear(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``(codes * scale) @ (weight * weight_scale).T + bias`` as :class:`ScaledLinearReduction` says.

    Args:
        codes: [..., K] int8, such as :func:`..quantise.quantise` gives.
        scale: [...] fp32, of each row.
        weight: [N, K] int8.
        weight_scale: [N] fp32, of each row of the weight.
        bias: [N] of ``dtype``, or None.
        dtype: of the result: fp32, bf16 or fp16.

    Returns:
        [..., N]. A row's bits depend on that row, its scale, the weight, its scales and the bias.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotCovered: more than :data:`LARGEST_K` elements of K, or a dtype or device without an implementation.
    """
    n, k = weight.shape
    shapes = codes.shape[-1] == k and scale.shape == codes.shape[:-1] and weight_scale.shape == (n,)
    if not shapes or (bias is not None and bias.shape != (n,)):
        given = [list(one.shape) for one in (codes, scale, weight, weight_scale, bias) if one is not None]
        raise ValueError(f"scaled_linear takes [..., K], [...], [N, K], [N] and a bias [N], got {given}")
    dtypes = [codes.dtype, weight.dtype, scale.dtype, weight_scale.dtype, dtype if bias is None else bias.dtype]
    if dtypes != [torch.int8, torch.int8, torch.float32, torch.float32, dtype]:
        raise ValueError(f"scaled_linear takes int8, int8, fp32, fp32 and a bias of {dtype}, got {dtypes}")
    reduction = ScaledLinearReduction.of(k, dtype)
    served = implementation("scaled_linear", codes, scale, weight, weight_scale, bias)
    rows = codes.reshape(scale.numel(), k)
    return served.scaled_linear(rows, scale.reshape(-1), weight, weight_scale, bias, reduction).view(*scale.shape, n)


def prepare(weight: torch.Tensor, dtype: torch.dtype) -> None:
    """See, when a weight [N, K] int8 is loaded, that it can be multiplied with results of ``dtype``, and what
    multiplies it on this machine. Errors as of :func:`scaled_linear`.
    """
    ScaledLinearReduction.of(weight.shape[1], dtype)
    module_for("scaled_linear", weight.device.type).prepare(weight)
