"""Reductions written with the mode's own sums, for a device whose PyTorch has a kernel of its own for each.

Everything beside the sums is elementwise, or a maximum, which is exact in any order. All is computed in fp32 (fp64 for
fp64) and rounded once.
"""

import math

import torch

from ..ops.common.native_kernels import kernel
from ..ops.common.rows import normalise_dims

Tensor = torch.Tensor
Number = int | float
Dims = int | list[int] | None


def _wide(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x in ``dtype``, and from there in the dtype in which sums are accumulated."""
    x = x.to(dtype or (x.dtype if x.is_floating_point() else torch.get_default_dtype()))
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def logsumexp(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    wide, dims = _wide(x), normalise_dims(dim, x.dim())
    top = wide.amax(dims, keepdim=True)
    top = top.masked_fill(top.isinf(), 0.0)  # inf - inf is no number
    total = torch.sum((wide - top).exp(), dims, keepdim=True).log() + top
    total = total if keepdim else total.squeeze(dims)
    return total.to(x.dtype if x.is_floating_point() else total.dtype)


def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Sums of doubling length: element i of a row is added in an order that follows from i alone."""
    if not (dtype or x.dtype).is_floating_point:
        return kernel("cumsum", x)(x, dim, dtype=dtype)
    if x.dim() == 0:
        return x.to(dtype or x.dtype, copy=True)
    sums, length, step = _wide(x, dtype).clone(), x.shape[dim], 1
    while step < length:
        rest = length - step
        later = sums.narrow(dim, step, rest) + sums.narrow(dim, 0, rest)
        sums = torch.cat([sums.narrow(dim, 0, step), later], dim)
        step *= 2
    return sums.to(dtype or x.dtype)


def nansum(x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.sum(x.masked_fill(x.isnan(), 0), dim, keepdim, dtype=dtype)


def trace(x: Tensor) -> Tensor:
    return torch.sum(x.diagonal())


def _moments(x: Tensor, dim: Dims, correction: Number | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Variance and mean over ``dim``, not yet rounded."""
    wide, dims = _wide(x), normalise_dims(dim, x.dim())
    count = math.prod(x.shape[dim] for dim in dims)
    mean = torch.mean(wide, dims, keepdim=True)
    squares = torch.sum((wide - mean).square(), dims, keepdim=keepdim)
    variance = squares / max(count - (1 if correction is None else correction), 0)
    return variance, mean if keepdim else mean.reshape(variance.shape)


def var(x: Tensor, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False) -> Tensor:
    return _moments(x, dim, correction, keepdim)[0].to(x.dtype)


def std(x: Tensor, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False) -> Tensor:
    return _moments(x, dim, correction, keepdim)[0].sqrt().to(x.dtype)


def var_mean(
    x: Tensor, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    variance, mean = _moments(x, dim, correction, keepdim)
    return variance.to(x.dtype), mean.to(x.dtype)


def std_mean(
    x: Tensor, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    variance, mean = _moments(x, dim, correction, keepdim)
    return variance.sqrt().to(x.dtype), mean.to(x.dtype)


def vector_norm(
    x: Tensor, ord: Number = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    sizes = (x if x.is_complex() else _wide(x, dtype)).abs()
    dims = normalise_dims(dim, x.dim())
    if math.isinf(ord):
        norm = (sizes.amax if ord > 0 else sizes.amin)(dims, keepdim)
    elif ord == 0:
        norm = torch.sum((sizes != 0).to(sizes.dtype), dims, keepdim)
    elif ord == 1:
        norm = torch.sum(sizes, dims, keepdim)
    elif ord == 2:
        norm = torch.sum(sizes.square(), dims, keepdim).sqrt()
    else:
        norm = torch.sum(sizes.pow(ord), dims, keepdim).pow(1 / ord)
    return norm.to(dtype or (norm if x.is_complex() else x).dtype)


def layer_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows normalised, with their means and their 1 / sqrt(variance + eps)."""
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    variance, mean = _moments(x, dims, 0, True)
    scale = 1 / (variance + eps).sqrt()
    out = (_wide(x) - mean) * scale
    if weight is not None:
        out = out * weight.to(out.dtype)
    if bias is not None:
        out = out + bias.to(out.dtype)
    return out.to(x.dtype), mean, scale


COMPOSED = {
    "logsumexp": logsumexp,
    "cumsum": cumsum,
    "nansum": nansum,
    "trace": trace,
    "var.correction": var,
    "std.correction": std,
    "var_mean.correction": var_mean,
    "std_mean.correction": std_mean,
    "linalg_vector_norm": vector_norm,
    "native_layer_norm": layer_norm,
}
"""ATen operators, and what computes them here."""
OUTS = {
    "var.correction": ("correction_out",),
    "std.correction": ("correction_out",),
    "var_mean.correction": (),
    "std_mean.correction": (),
    "native_layer_norm": (),
}
"""Names of their ``out=`` overloads where that is not "out"; none where there are several results."""
