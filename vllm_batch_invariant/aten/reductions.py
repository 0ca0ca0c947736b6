"""Reductions written with the mode's own sums, in the place of kernels whose order of additions follows the number of
rows, their layout or, in a row alone, the number of threads.

Everything beside the sums is elementwise, or a maximum, which is exact in any order. All is computed in fp32 (fp64 for
fp64) and rounded once.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from ..ops.common.native_kernels import kernel
from ..ops.common.rows import normalise_dims
from ..ops.dispatch import module_for

Tensor = torch.Tensor
Number = int | float
Dims = int | list[int] | None


def _wide(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x in ``dtype``, and from there in the dtype in which sums are accumulated."""
    x = x.to(dtype or (x.dtype if _is_inexact(x) else torch.get_default_dtype()))
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _is_inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _sum_of(term: str, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return module_for("reduce", x.device.type).sum_of(term, x, dims, keepdim)


def logsumexp(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    wide, dims = _wide(x), normalise_dims(dim, x.dim())
    top = wide.amax(dims, keepdim=True)
    top = top.masked_fill(top.isinf(), 0.0)  # inf - inf is no number
    total = torch.sum((wide - top).exp(), dims, keepdim=True).log() + top
    total = total if keepdim else total.squeeze(dims)
    return total.to(x.dtype if x.is_floating_point() else total.dtype)


def _scan(x: Tensor, dim: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Element i combined with all before it in an order that follows from i alone: those of doubling length."""
    length, step = x.shape[dim], 1
    while step < length:
        rest = length - step
        later = combine(x.narrow(dim, step, rest), x.narrow(dim, 0, rest))
        x = torch.cat([x.narrow(dim, 0, step), later], dim)
        step *= 2
    return x


def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    if not (dtype or x.dtype).is_floating_point:
        return kernel("cumsum", x)(x, dim, dtype=dtype)
    if x.dim() == 0:
        return x.to(dtype or x.dtype, copy=True)
    return _scan(_wide(x, dtype).clone(), dim, torch.add).to(dtype or x.dtype)


def cumprod_below_autograd(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    if not (dtype or x.dtype).is_floating_point:
        return kernel("cumprod", x)(x, dim, dtype=dtype)
    if x.dim() == 0:
        return x.to(dtype or x.dtype, copy=True)
    return _scan(_wide(x, dtype).clone(), dim, torch.mul).to(dtype or x.dtype)


def _shifted(x: Tensor, dim: int, by: int, value: float) -> Tensor:
    """Element i of a row is element i + ``by``, and ``value`` where there is none; as long as before."""
    length = x.shape[dim]
    edge = torch.full_like(x.narrow(dim, 0, min(abs(by), length)), value)
    rest = x.narrow(dim, max(by, 0), length - edge.shape[dim])
    return torch.cat([rest, edge] if by > 0 else [edge, rest], dim)


class _CumulativeProduct(torch.autograd.Function):
    """cumprod with a gradient that follows the row alone: PyTorch's divides by the elements, unless an element of any
    row is zero.

    The gradient of element k is the product of those before it, times r[k] = grad[k] + x[k + 1] * r[k + 1], of which
    runs of doubling length are joined.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x)
        ctx.dim = dim
        with torch._C._AutoDispatchBelowAutograd():
            return torch.cumprod(x, dim, dtype=dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        [x], dim = ctx.saved_tensors, ctx.dim
        wide, total, step = _wide(x, grad.dtype).conj(), _wide(grad), 1
        before = _shifted(torch.cumprod(wide, dim), dim, -1, 1.0)
        factor = _shifted(wide, dim, 1, 0.0)
        while step < x.shape[dim]:
            total = total + factor * _shifted(total, dim, step, 0.0)
            factor = factor * _shifted(factor, dim, step, 0.0)
            step *= 2
        product = before * total
        return (product if x.is_complex() or not product.is_complex() else product.real).to(x.dtype), None, None


def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """At the key of autograd: see :class:`_CumulativeProduct`."""
    if x.requires_grad and torch.is_grad_enabled():
        return _CumulativeProduct.apply(x if x.dim() else x.reshape(1), dim, dtype).reshape(x.shape)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.cumprod(x, dim, dtype=dtype)


def prod(x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The halves of a row are multiplied, element by element, until one element is left.

    At the key of autograd, so that the products record the gradient: PyTorch's own divides by the elements, unless an
    element of any row is zero.
    """
    if not (_is_inexact(x) or (dtype is not None and dtype.is_floating_point)):
        return kernel("prod.dim_int", x)(x, dim, keepdim, dtype=dtype)
    [dim] = normalise_dims(dim, x.dim()) or [0]
    wide = _wide(x, dtype)
    row = wide.reshape(1) if x.dim() == 0 else wide.movedim(dim, -1)
    while row.shape[-1] != 1:
        length, half = row.shape[-1], row.shape[-1] // 2
        products = row.narrow(-1, 0, half) * row.narrow(-1, length - half, half)
        middle = row.narrow(-1, half, length % 2) if length else row.new_ones(*row.shape[:-1], 1)
        row = torch.cat([products, middle], -1) if length % 2 or not length else products
    out = row.squeeze(-1).to(dtype or x.dtype)
    return out.unsqueeze(dim) if keepdim and x.dim() else out


def prod_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return prod(x.reshape(-1), 0, dtype=dtype)


def nansum(x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    if not x.is_floating_point():
        return kernel("nansum", x)(x, dim, keepdim, dtype=dtype)
    total = _sum_of("numbers", _wide(x, dtype), normalise_dims(dim, x.dim()), keepdim)
    return total.to(dtype or x.dtype)


def trace(x: Tensor) -> Tensor:
    return torch.sum(x.diagonal())


def _moments(x: Tensor, dim: Dims, correction: Number | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Variance and mean over ``dim``, not yet rounded. Of complex numbers the variances of both parts are added."""
    if x.is_complex():
        (real, real_mean), (imaginary, imaginary_mean) = (
            _moments(y, dim, correction, keepdim) for y in (x.real, x.imag)
        )
        return real + imaginary, torch.complex(real_mean, imaginary_mean)
    if not x.is_floating_point():
        raise RuntimeError(f"std and var only support floating point and complex dtypes, got {x.dtype}")
    dims = normalise_dims(dim, x.dim())
    count = math.prod(x.shape[dim] for dim in dims)
    squares, mean = module_for("reduce", x.device.type).moments(_wide(x), dims, keepdim)
    return squares / max(count - (1 if correction is None else correction), 0), mean


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def var(x: Tensor, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False) -> Tensor:
    return _moments(x, dim, correction, keepdim)[0].to(_real(x.dtype))


def std(x: Tensor, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False) -> Tensor:
    return _moments(x, dim, correction, keepdim)[0].sqrt().to(_real(x.dtype))


def var_mean(
    x: Tensor, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    variance, mean = _moments(x, dim, correction, keepdim)
    return variance.to(_real(x.dtype)), mean.to(x.dtype)


def std_mean(
    x: Tensor, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    variance, mean = _moments(x, dim, correction, keepdim)
    return variance.sqrt().to(_real(x.dtype)), mean.to(x.dtype)


def vector_norm(
    x: Tensor, ord: Number = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if not _is_inexact(x) or (x.numel() == 0 and (ord < 0 or math.isinf(ord))):
        return kernel("linalg_vector_norm", x)(x, ord, dim, keepdim, dtype=dtype)  # which says what is wrong
    wide = x.to(dtype or x.dtype).abs() if x.is_complex() else _wide(x, dtype)
    dims = normalise_dims(dim, x.dim())
    if math.isinf(ord):
        norm = (wide.abs().amax if ord > 0 else wide.abs().amin)(dims, keepdim)
    elif ord == 0:
        norm = torch.sum((wide != 0).to(wide.dtype), dims, keepdim)
    elif ord == 1:
        norm = _sum_of("sizes", wide, dims, keepdim)
    elif ord == 2:
        norm = _sum_of("squares", wide, dims, keepdim).sqrt()
    else:
        norm = torch.sum(wide.abs().pow(ord), dims, keepdim).pow(1 / ord)
    return norm.to(_real(dtype or x.dtype))


def norm(
    x: Tensor,
    p: Number | None = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """What ``torch.norm`` was before ``linalg.vector_norm``."""
    return vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


def norm_dtype(x: Tensor, p: Number | None, *, dtype: torch.dtype) -> Tensor:
    return norm(x, p, dtype=dtype)


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


def powsum(
    x: Tensor, ord: Number = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The sum of which a vector norm is the root."""
    wide, dims = _wide(x, dtype).abs(), normalise_dims(dim, x.dim())
    terms: dict[float, str] = {1: "sizes", 2: "squares"}
    term = terms.get(ord)
    total = _sum_of(term, wide, dims, keepdim) if term else torch.sum(wide.pow(ord), dims, keepdim)
    return total.to(_real(dtype or x.dtype))


COMPOSED: dict[str, Callable[..., Any]] = {
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
    "prod.dim_int": ("int_out",),
    "norm.Scalar": ("Scalar_out",),
    "norm.ScalarOpt_dim_dtype": ("dtype_out",),
    "norm.ScalarOpt_dtype": ("ScalarOpt_dtype_out",),
}
"""Names of their ``out=`` overloads where that is not "out"; none where there are several results."""
FURTHER: dict[str, Callable[..., Tensor]] = {
    "prod": prod_all,
    "prod.dim_int": prod,
    "norm.Scalar": norm,
    "norm.ScalarOpt_dim": norm,
    "norm.ScalarOpt_dim_dtype": norm,
    "norm.ScalarOpt_dtype": norm,
    **({"linalg__powsum": powsum} if hasattr(torch.ops.aten, "linalg__powsum") else {}),
}
"""The same for operators that a device may refuse instead."""
AUTOGRAD: dict[str, Callable[..., Tensor]] = {"prod": prod_all, "prod.dim_int": prod, "cumprod": cumprod}
"""Those of them whose gradient is replaced, too."""
