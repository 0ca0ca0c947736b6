"""Puts the batch-invariant operations in PyTorch's place through torch.library, and takes them back.

The overrides sit at the device's dispatch key, below autograd: every spelling of a product or reduction that decomposes
to one of these operators reaches them, and so does every gradient, whose formula PyTorch writes with the same
operators.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch

from ..ops.common import native_kernels
from ..ops.dispatch import DISPATCH_KEYS, IMPLEMENTED, module_for, present
from ..ops.pointwise import BINARY, UNARY, elementwise

Tensor = torch.Tensor
Number = int | float


def _linear(tensor: Tensor) -> ModuleType:
    return module_for("linear", tensor.device.type)


def _exact(tensor: Tensor) -> bool:
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
    if _exact(a):
        return native_kernels.kernel("mm", a)(a, b)
    _check(a, b)
    return _linear(a).mm(a, b)


def addmm(added: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    if _exact(a):
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
    if _exact(a):
        return native_kernels.kernel("bmm", a)(a, b)
    _check(a, b)
    return _linear(a).bmm(a, b)


def baddbmm(added: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    if _exact(a):
        return native_kernels.kernel("baddbmm", a)(added, a, b, beta=beta, alpha=alpha)
    _check(a, b, added)
    return _combine(_linear(a).accumulate_batch(a, b), added, beta, alpha, a.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., K] by [N, K] and [N] as one product, so that the bias is added before the one rounding: PyTorch's own adds
    it to a product that was rounded already, if x has more than two dimensions and is not packed.
    """
    if weight.dim() != 2 or x.dim() == 0 or (bias is not None and bias.dim() != 1):
        out = torch.matmul(x, weight.t())
        return out if bias is None else out + bias
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    out = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return out.reshape(*x.shape[:-1], weight.shape[0])


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
    """The batch is summed over, so this is one product with the batch and K as its inner dimension."""
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
    if _exact(x) and (dtype is None or not dtype.is_floating_point):
        return native_kernels.kernel("sum.dim_IntList", x)(x, dim, keepdim, dtype=dtype)
    return module_for("reduce", x.device.type).sum(x, dim, keepdim, dtype=dtype)


def sum_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return sum(x, None, dtype=dtype)


def mean(x: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    if _exact(x) and dtype is None:
        return native_kernels.kernel("mean.dim", x)(x, dim, keepdim, dtype=dtype)
    return module_for("reduce", x.device.type).mean(x, dim, keepdim, dtype=dtype)


def mean_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return mean(x, None, dtype=dtype)


def _softmax_module(x: Tensor) -> ModuleType | None:
    """The operation, or None for a dtype that PyTorch's row-wise kernel serves; nothing is known of an NPU's."""
    by_pytorch = x.dtype == torch.float64 and x.device.type != "npu"
    return None if by_pytorch or _exact(x) else module_for("softmax", x.device.type)


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    module = _softmax_module(x)
    if module is None:
        return native_kernels.kernel("_softmax", x)(x, dim, half_to_float)
    return module.softmax(x, dim, dtype=torch.float32 if half_to_float else None)


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    module = _softmax_module(x)
    if module is None:
        return native_kernels.kernel("_log_softmax", x)(x, dim, half_to_float)
    return module.log_softmax(x, dim, dtype=torch.float32 if half_to_float else None)


def softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    module = _softmax_module(output)
    if module is None:
        return native_kernels.kernel("_softmax_backward_data", grad)(grad, output, dim, input_dtype)
    return module.softmax_backward(grad, output, dim, input_dtype)


def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    module = _softmax_module(output)
    if module is None:
        return native_kernels.kernel("_log_softmax_backward_data", grad)(grad, output, dim, input_dtype)
    return module.log_softmax_backward(grad, output, dim, input_dtype)


def _unary(name: str) -> Callable[..., Tensor]:
    def function(x: Tensor, *arguments: Number, **options: object) -> Tensor:
        if not x.is_floating_point():
            x = x.to(torch.get_default_dtype()) if _exact(x) else x
        if x.is_complex():
            return native_kernels.kernel(name, x)(x, *arguments, **options)
        return elementwise(name, x, arguments=arguments, options=options)

    return function


def _binary(name: str) -> Callable[..., Tensor]:
    def function(a: Tensor, b: Tensor, *arguments: Number, **options: object) -> Tensor:
        if a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point():
            return native_kernels.kernel(name, a)(a, b, *arguments, **options)
        return elementwise(name, a, b, arguments=arguments, options=options)

    return function


def _writing_out(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The ``out=`` overload of an operator; the argument's name (``out``, ``grad_input``) follows the operator's
    schema.
    """

    def write(*args: object, **kwargs: object) -> Tensor:
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

    function: Callable[..., Tensor]
    outs: tuple[str, ...] = ("out", "grad_input", "Tensor_Scalar_out")
    cpu_only: bool = False
    """Whether other devices need no override: a GPU's elementwise kernels run one scalar code for every element."""


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
    **{name: Override(_unary(name), cpu_only=True) for name in UNARY},
    **{name: Override(_binary(name), cpu_only=True) for name in BINARY},
}
"""Every ATen operator that the mode replaces."""


def _composed() -> dict[str, Override]:
    """Reductions that a GPU computes with the mode's sums, because its own kernels choose their order by the number of
    rows; that of layer norm does not.
    """
    from .reductions import COMPOSED, OUTS

    return {
        name: Override(function, OUTS.get(name, ("out",)))
        for name, function in COMPOSED.items()
        if name != "native_layer_norm"
    }


NAMED_DTYPE = {"mm": mm_dtype, "bmm": bmm_dtype, "addmm": addmm_dtype, "baddbmm": baddbmm_dtype}
"""The overloads that name the dtype of the result, which a CPU has not."""


def registrations(name: str, override: Override) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """(operator with overload, function) for the functional form and every out and in-place form that PyTorch has."""
    base, _, overload = name.partition(".")
    yield name, override.function
    for out in override.outs:
        if out in getattr(torch.ops.aten, base).overloads():
            yield f"{base}.{out}", _writing_out(override.function)
    in_place = getattr(torch.ops.aten, f"{base}_", None)
    if in_place is not None:
        suffix = {"": "", "Tensor_Scalar": ".Scalar"}[overload]
        yield f"{base}_{suffix}", _in_place(override.function)


@dataclass
class _Enabled:
    """What has to be put back."""

    library: torch.library.Library
    of_devices: ExitStack
    flash: bool
    memory_efficient: bool
    cudnn: bool
    fast_path: bool
    stance: torch.compiler.set_stance


_enabled: _Enabled | None = None


def is_batch_invariant_mode_enabled() -> bool:
    """Whether PyTorch's operators are replaced in this process."""
    return _enabled is not None


def enable_batch_invariant_mode(external_ops: Iterable[str] = ()) -> None:
    """Replace PyTorch's products, reductions and elementwise functions by batch-invariant ones, for the whole process.

    Besides the operators in :data:`OVERRIDES`: scaled_dot_product_attention takes its path of plain products,
    nn.MultiheadAttention its slow one, and compiled functions run eagerly, because a compiled graph has no operators
    left to replace.

    Args:
        external_ops: operators that another library has made batch-invariant on NPUs, and that are left to it.
    """
    global _enabled
    if _enabled is not None:
        return
    external_ops = frozenset(external_ops)
    library = torch.library.Library("aten", "IMPL")
    of_devices = ExitStack()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for device_type in filter(present, IMPLEMENTED):
            key = DISPATCH_KEYS[device_type]
            overrides = OVERRIDES | (_composed() if device_type == "cuda" else {})
            for name, override in overrides.items():
                if override.cpu_only and device_type != "cpu":
                    continue
                native_kernels.keep(name, key)
                for operator, function in registrations(name, override):
                    if device_type == "npu" and operator in external_ops:
                        continue
                    library.impl(operator, function, key, allow_override=True)
            if device_type != "cpu":
                for name, function in NAMED_DTYPE.items():
                    library.impl(f"{name}.dtype", function, key, allow_override=True)
                    library.impl(f"{name}.dtype_out", _writing_out(function), key, allow_override=True)
            if device_type == "npu":
                from .npu import replaced

                of_devices.enter_context(replaced(external_ops))
        library.impl("linear", linear, "CompositeImplicitAutograd", allow_override=True)
    _enabled = _Enabled(
        library,
        of_devices,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.compiler.set_stance("force_eager"),
    )
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.mha.set_fastpath_enabled(False)


def disable_batch_invariant_mode() -> None:
    """Give PyTorch its operators back."""
    global _enabled
    if _enabled is None:
        return
    before, _enabled = _enabled, None
    before.of_devices.close()
    before.library._destroy()
    torch.backends.cuda.enable_flash_sdp(before.flash)
    torch.backends.cuda.enable_mem_efficient_sdp(before.memory_efficient)
    torch.backends.cuda.enable_cudnn_sdp(before.cudnn)
    torch.backends.mha.set_fastpath_enabled(before.fast_path)
    before.stance.__exit__(None, None, None)


@contextmanager
def set_batch_invariant_mode(enabled: bool = True) -> Iterator[None]:
    """Switch the mode on (or off) for a block, and back to what it was at the end."""
    before = is_batch_invariant_mode_enabled()
    (enable_batch_invariant_mode if enabled else disable_batch_invariant_mode)()
    try:
        yield
    finally:
        (enable_batch_invariant_mode if before else disable_batch_invariant_mode)()


def batch_invariant_mode() -> Iterator[None]:
    """The mode for one block: ``with batch_invariant_mode(): ...``."""
    return set_batch_invariant_mode(True)


__all__ = [
    "OVERRIDES",
    "batch_invariant_mode",
    "disable_batch_invariant_mode",
    "enable_batch_invariant_mode",
    "is_batch_invariant_mode_enabled",
    "set_batch_invariant_mode",
]
