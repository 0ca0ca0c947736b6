"""Functions that stand for PyTorch's operators below autograd, and the table of those that every device gets."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ..ops import devices
from ..ops.common import native_kernels
from ..ops.dispatch import module_for

Tensor = torch.Tensor
Number = int | float
_VECTOR = 16
"""Bytes that PyTorch's kernels for GPUs load at once."""


def _linear(tensor: Tensor) -> ModuleType:
    return module_for("linear", tensor.device.type)


def is_exact(tensor: Tensor) -> bool:
    """Integers and booleans add exactly in any order, so PyTorch's own kernel serves them."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def _combine(accumulated: Tensor, added: Tensor | None, beta: Number, alpha: Number, dtype: torch.dtype) -> Tensor:
    """alpha * accumulated + beta * added in the accumulator's dtype, rounded once; beta = 0 ignores ``added``, as BLAS
    does.
    """
    if alpha != 1:
        accumulated = accumulated * alpha
    if added is not None and beta != 0:
        term = added.to(accumulated.dtype)
        accumulated = accumulated + (term if beta == 1 else term * beta)
    return accumulated.to(dtype)


def _check(a: Tensor, b: Tensor, added: Tensor | None = None) -> None:
    """What PyTorch's kernels check, which an override takes the place of: operands of one dtype and device that fit."""
    if a.dim() != b.dim() or a.dim() < 2 or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise RuntimeError(f"shapes {list(a.shape)} and {list(b.shape)} cannot be multiplied")
    for other in (b, added):
        if other is not None and (other.dtype != a.dtype or (other.device != a.device and other.dim() > 0)):
            raise RuntimeError(
                f"expected operands of one dtype on one device, got {a.dtype} on {a.device} and {other.dtype} on "
                f"{other.device}"
            )


def mm(a: Tensor, b: Tensor) -> Tensor:
    if is_exact(a):
        return native_kernels.kernel("mm", a)(a, b)
    _check(a, b)
    return _linear(a).mm(a, b)


def addmm(added: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    if is_exact(a):
        return native_kernels.kernel("addmm", a)(added, a, b, beta=beta, alpha=alpha)
    _check(a, b, added)
    if alpha == beta == 1 and added.shape == b.shape[1:] and added.dtype == a.dtype:
        return _linear(a).mm(a, b, added)
    return _combine(_linear(a).accumulate(a, b), added, beta, alpha, a.dtype)


def addmm_activation(
    added: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1, use_gelu: bool = False
) -> Tensor:
    out = addmm(added, a, b, beta=beta, alpha=alpha)
    return torch.nn.functional.gelu(out) if use_gelu else torch.relu(out)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    if is_exact(a):
        return native_kernels.kernel("bmm", a)(a, b)
    _check(a, b)
    return _linear(a).bmm(a, b)


def baddbmm(added: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    if is_exact(a):
        return native_kernels.kernel("baddbmm", a)(added, a, b, beta=beta, alpha=alpha)
    _check(a, b, added)
    return _combine(_linear(a).accumulate_batch(a, b), added, beta, alpha, a.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., K] by [N, K] and [N] as one matmul, so that the bias is added before the one rounding: PyTorch's own adds
    it to a result that was rounded already, if x has more than two dimensions and is not packed.
    """
    if weight.dim() != 2 or x.dim() == 0 or (bias is not None and bias.dim() != 1):
        out = torch.matmul(x, weight.t())
        return out if bias is None else out + bias
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    out = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return out.reshape(*x.shape[:-1], weight.shape[0])


def lstm(x: Tensor, *arguments: object) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's composition of linear layers and elementwise functions also where oneDNN has a kernel, whose matmuls
    follow the batch. A GPU has kernels of its own.
    """
    native: Callable[..., Any] = native_kernels.keep("lstm.input", "CPU")
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return native(x, *arguments)
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def cdist(x: Tensor, y: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    """Distances pair by pair, whatever the numbers of rows: PyTorch's own takes a form of matmuls from 26 rows on.

    With ``compute_mode="use_mm_for_euclid_dist"`` it is that form, faster, less exact, and twice differentiable. bf16
    and fp16, which PyTorch has in that form only, are computed in fp32 and rounded.
    """
    if p == 2 and compute_mode == 1:
        return _cdist_by_matmul(x, y)
    wide = [a.float() if a.dtype in (torch.bfloat16, torch.float16) else a for a in (x, y)]
    return torch.ops.aten._cdist_forward(*wide, p, 2).to(x.dtype)


def _cdist_by_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Distances as |x|^2 - 2 x y + |y|^2, in one matmul."""
    if 0 in (*x.shape, *y.shape):
        return torch.ops.aten._cdist_forward(x, y, 2.0, 1)
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return torch.ops.aten._euclidean_dist(x.expand(*batch, *x.shape[-2:]), y.expand(*batch, *y.shape[-2:]))


def mm_dtype(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    _check(a, b)
    return _linear(a).accumulate(a, b).to(out_dtype)


def bmm_dtype(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    _check(a, b)
    return _linear(a).accumulate_batch(a, b).to(out_dtype)


def addmm_dtype(
    added: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: Number = 1, alpha: Number = 1
) -> Tensor:
    _check(a, b)
    return _combine(_linear(a).accumulate(a, b), added, beta, alpha, out_dtype)


def baddbmm_dtype(
    added: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: Number = 1, alpha: Number = 1
) -> Tensor:
    _check(a, b)
    return _combine(_linear(a).accumulate_batch(a, b), added, beta, alpha, out_dtype)


def addbmm(added: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """The batch is summed over, so this is one matmul with the batch and K as its inner dimension."""
    wide = a.transpose(0, 1).reshape(a.shape[1], -1)
    return addmm(added, wide, b.reshape(-1, b.shape[2]), beta=beta, alpha=alpha)


def mv(a: Tensor, vector: Tensor) -> Tensor:
    return mm(a, vector.unsqueeze(1)).squeeze(1)


def addmv(added: Tensor, a: Tensor, vector: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    return addmm(added.expand(a.shape[0]).unsqueeze(1), a, vector.unsqueeze(1), beta=beta, alpha=alpha).squeeze(1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    if a.dim() != 1 or a.shape != b.shape or a.dtype != b.dtype:
        return native_kernels.kernel("dot", a)(a, b)
    return mm(a.unsqueeze(0), b.unsqueeze(1)).reshape(())


def _trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand_a: list[int],
    expand_b: list[int],
    expand_c: list[int],
    summed: list[int],
    unroll_dim: int = 1,  # noqa: ARG001 - PyTorch's signature
) -> Tensor:
    tensors = [a, b, c]
    for i, dims in enumerate((expand_a, expand_b, expand_c)):
        for dim in dims:
            tensors[i] = tensors[i].unsqueeze(dim)
    return torch.sum(tensors[0] * tensors[1] * tensors[2], summed)


def sum(x: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    if is_exact(x) and (dtype is None or not dtype.is_floating_point):
        return native_kernels.kernel("sum.dim_IntList", x)(x, dim, keepdim, dtype=dtype)
    return module_for("reduce", x.device.type).sum(x, dim, keepdim, dtype=dtype)


def sum_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return sum(x, None, dtype=dtype)


def mean(x: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    if is_exact(x) and dtype is None:
        return native_kernels.kernel("mean.dim", x)(x, dim, keepdim, dtype=dtype)
    return module_for("reduce", x.device.type).mean(x, dim, keepdim, dtype=dtype)


def mean_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return mean(x, None, dtype=dtype)


def _softmax_module(x: Tensor) -> ModuleType | None:
    """The operation, or None for a dtype that PyTorch's row-wise kernel serves."""
    by_pytorch = x.dtype == torch.float64 and devices.get(x.device.type).exact_fp64_softmax
    return None if by_pytorch or is_exact(x) else module_for("softmax", x.device.type)


def _last(native: Callable[..., Tensor], dim: int, *tensors: Tensor, fill: float = 0.0) -> Callable[..., Tensor]:
    """PyTorch's kernel with ``dim`` last and contiguous: where others follow it, they share its vectors. On a GPU with
    rows that begin at whole vectors, because it adds what is before the first one apart.

    Args:
        native: the kernel.
        dim: along which it goes.
        tensors: of one shape.
        fill: of the elements that an odd row is filled up with: of the last tensor. Those of others are 0.
    """
    if tensors[0].dim() == 0:
        return partial(native, *tensors, dim)
    rows = [tensor.movedim(dim, -1).contiguous() for tensor in tensors]
    width = rows[0].shape[-1]
    if rows[0].is_cuda:
        fills = [0.0] * (len(rows) - 1) + [fill]
        rows = [_of_whole_vectors(row, value) for row, value in zip(rows, fills, strict=True)]
    return lambda argument: native(*rows, -1, argument)[..., :width].movedim(-1, dim).contiguous()


def _of_whole_vectors(rows: Tensor, fill: float) -> Tensor:
    """Rows of fp64 that all begin at the same place of a vector of two, with one element more where they are odd."""
    if rows.shape[-1] % 2:
        return torch.nn.functional.pad(rows, (0, 1), value=fill)
    return rows if rows.data_ptr() % _VECTOR == 0 else rows.clone()


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Contiguous, as PyTorch's is, and as the gradient of a cross entropy of maps asks for; so are the next three."""
    module = _softmax_module(x)
    if module is None:
        return _last(native_kernels.kernel("_softmax", x), dim, x, fill=-math.inf)(half_to_float)
    return module.softmax(x, dim, dtype=torch.float32 if half_to_float else None).contiguous()


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    module = _softmax_module(x)
    if module is None:
        return _last(native_kernels.kernel("_log_softmax", x), dim, x, fill=-math.inf)(half_to_float)
    return module.log_softmax(x, dim, dtype=torch.float32 if half_to_float else None).contiguous()


def softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    module = _softmax_module(output)
    if module is None:
        return _last(native_kernels.kernel("_softmax_backward_data", grad), dim, grad, output)(input_dtype)
    return module.softmax_backward(grad, output, dim, input_dtype).contiguous()


def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    module = _softmax_module(output)
    if module is None:
        native = native_kernels.kernel("_log_softmax_backward_data", grad)
        return _last(native, dim, grad, output, fill=-math.inf)(input_dtype)
    return module.log_softmax_backward(grad, output, dim, input_dtype).contiguous()


def _writing_out(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The ``out=`` overload of an operator; the argument's name (``out``, ``grad_input``) follows the operator's
    schema.
    """

    def write(*args: object, **kwargs: Any) -> Tensor:
        name = next(key for key in ("out", "grad_input") if key in kwargs)
        out = kwargs.pop(name)
        result = function(*args, **kwargs)
        if not torch.can_cast(result.dtype, out.dtype):
            raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {out.dtype}")
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return write


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def write(target: Tensor, *args: object, **kwargs: object) -> Tensor:
        return target.copy_(function(target, *args, **kwargs))

    return write


@dataclass(frozen=True)
class Override:
    """One operator replaced: its functional form, and the names that its ``out=`` overload may have."""

    function: Callable[..., Any]
    outs: tuple[str, ...] = ("out", "grad_input")


OVERRIDES: dict[str, Override] = {
    "mm": Override(mm),
    "addmm": Override(addmm),
    "_addmm_activation": Override(addmm_activation),
    "bmm": Override(bmm),
    "baddbmm": Override(baddbmm),
    "addbmm": Override(addbmm),
    "mv": Override(mv),
    "addmv": Override(addmv),
    "dot": Override(dot),
    "vdot": Override(dot),
    "_trilinear": Override(_trilinear),
    "sum.dim_IntList": Override(sum, ("IntList_out",)),
    "sum": Override(sum_all),
    "mean.dim": Override(mean),
    "mean": Override(mean_all, ("dtype_out",)),
    "_softmax": Override(softmax),
    "_log_softmax": Override(log_softmax),
    "_softmax_backward_data": Override(softmax_backward),
    "_log_softmax_backward_data": Override(log_softmax_backward),
}
"""ATen operators that the mode replaces on every device."""


COMPOSITIONS: dict[str, Callable[..., object]] = {"linear": linear, "cdist": cdist, "lstm.input": lstm}
"""Functions that PyTorch composes of other operators, for which the mode has a composition of its own."""
NAMED_DTYPE: dict[str, Callable[..., Tensor]] = {
    "mm": mm_dtype,
    "bmm": bmm_dtype,
    "addmm": addmm_dtype,
    "baddbmm": baddbmm_dtype,
}
"""Overloads ``dtype`` and ``dtype_out``, which name the dtype of the result; the CPU has none."""


Registration = tuple[str, Callable[..., Tensor]]
"""An ATen operator with its overload, and the function that stands for it."""


def registrations(name: str, override: Override) -> Iterator[Registration]:
    """(operator with overload, function) for the functional form and every out and in-place form that PyTorch has."""
    base, _, overload = name.partition(".")
    yield name, override.function
    for out in override.outs:
        if out in getattr(torch.ops.aten, base).overloads():
            yield f"{base}.{out}", _writing_out(override.function)
    in_place = getattr(torch.ops.aten, f"{base}_", None)
    if in_place is not None:
        suffix = {"": "", "Tensor_Scalar": ".Scalar", "Tensor_Tensor": ".Tensor"}[overload]
        yield f"{base}_{suffix}", _in_place(override.function)


def named_dtypes() -> Iterator[Registration]:
    """Those of :data:`NAMED_DTYPE`."""
    for name, function in NAMED_DTYPE.items():
        yield f"{name}.dtype", function
        yield f"{name}.dtype_out", _writing_out(function)


def _nothing(external_ops: frozenset[str]) -> AbstractContextManager[None]:  # noqa: ARG001 - of every device
    return nullcontext()


@dataclass(frozen=True)
class DeviceOverrides:
    """What the mode replaces on one device type; the module that the device's record names has it as ``DEVICE``.

    Attributes:
        operators: those of which every form is replaced.
        has_named_dtypes: whether the device has the overloads of :data:`NAMED_DTYPE`.
        has_external_ops: whether another library may have replaced operators, which then are left to it.
        autograd: operators whose gradient is replaced, too, at the key of autograd; what stands there must record it.
        replaced: a block in which whatever else the device needs is replaced, given the operators of that library.
    """

    operators: dict[str, Override]
    has_named_dtypes: bool = True
    has_external_ops: bool = False
    autograd: dict[str, Callable[..., Tensor]] = field(default_factory=dict)
    replaced: Callable[[frozenset[str]], AbstractContextManager[None]] = _nothing

    def registrations(self, external_ops: frozenset[str]) -> Iterator[Registration]:
        """Whatever is registered at the device's dispatch key."""
        for name, override in self.operators.items():
            for operator, function in registrations(name, override):
                if not (self.has_external_ops and operator in external_ops):
                    yield operator, function
        if self.has_named_dtypes:
            yield from named_dtypes()
