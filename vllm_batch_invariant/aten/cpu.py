"""A CPU: reductions beside what every device gets, and elementwise functions, because PyTorch's round the last elements
of each thread otherwise. Devices that run one scalar code for every element need none of the latter.
"""

from collections.abc import Callable

import torch

from ..ops.common import native_kernels
from ..ops.pointwise import BINARY, UNARY, elementwise
from .overrides import OVERRIDES, DeviceOverrides, Number, Override, Tensor, is_exact
from .reductions import AUTOGRAD, COMPOSED, FURTHER, OUTS


def _unary(name: str) -> Callable[..., Tensor]:
    def function(x: Tensor, *arguments: Number, **options: object) -> Tensor:
        if not x.is_floating_point():
            x = x.to(torch.get_default_dtype()) if is_exact(x) else x
        if x.is_complex():
            return native_kernels.kernel(name, x)(x, *arguments, **options)
        return elementwise(name, x, arguments=arguments, options=options)

    return function


def _binary(name: str) -> Callable[..., Tensor]:
    def function(a: Tensor | Number, b: Tensor | Number, *arguments: Number, **options: object) -> Tensor:
        """An operand is a number where PyTorch has made a tensor of one, as in ``2**x``."""
        dtype = torch.result_type(a, b)
        if not dtype.is_floating_point:
            a, b = (operand if isinstance(operand, Tensor) else torch.tensor(operand) for operand in (a, b))
            return native_kernels.kernel(name, a)(a, b, *arguments, **options)
        pair = torch.broadcast_tensors(*(torch.as_tensor(operand, dtype=dtype) for operand in (a, b)))
        return elementwise(name, *pair, arguments=arguments, options=options)

    return function


def _elementwise(name: str, function: Callable[..., Tensor]) -> Override:
    _, _, overload = name.partition(".")
    return Override(function, (f"{overload}_out",)) if overload else Override(function)


def elu_backward(
    grad: Tensor, alpha: Number, scale: Number, input_scale: Number, is_result: bool, known: Tensor
) -> Tensor:
    arguments = (alpha, scale, input_scale, is_result)
    if grad.shape != known.shape or grad.dtype != known.dtype:
        return native_kernels.kernel("elu_backward", grad)(grad, *arguments, known)
    return elementwise("elu_backward", grad, known, arguments=arguments, between=True)


def glu(x: Tensor, dim: int = -1) -> Tensor:
    """Computed in fp32 (fp64 for fp64), of its parts, and rounded once."""
    if x.dim() == 0 or x.shape[dim] % 2 or not x.is_floating_point():
        return native_kernels.kernel("glu", x)(x, dim)
    wide, gate = (x if x.dtype == torch.float64 else x.float()).chunk(2, dim)
    return (wide * gate.sigmoid()).to(x.dtype)


def _in_one_thread(name: str) -> Callable[..., Tensor]:
    """An operator that adds what falls on one element, in the order of the indices: with several threads PyTorch's adds
    fp32 in the order in which they come.
    """

    def function(target: Tensor, *arguments: object, **options: object) -> Tensor:
        native, before = native_kernels.kernel(name, target), torch.is_deterministic_algorithms_warn_only_enabled()
        asked = torch.are_deterministic_algorithms_enabled()
        torch._C._set_deterministic_algorithms(True, warn_only=before)
        try:
            return native(target, *arguments, **options)
        finally:
            torch._C._set_deterministic_algorithms(asked, warn_only=before)

    return function


LEFT = ("logsumexp", "cumsum", "trace", "native_layer_norm")
"""Left of what is composed elsewhere: PyTorch makes logsumexp of the mode's sums, and others a row at a time."""

DEVICE = DeviceOverrides(
    OVERRIDES
    | {
        name: Override(function, OUTS.get(name, ("out",)))
        for name, function in (COMPOSED | FURTHER).items()
        if name not in LEFT
    }
    | {name: Override(_in_one_thread(name), ()) for name in ("_index_put_impl_", "put_")}
    | {"glu": Override(glu), "elu_backward": Override(elu_backward)}
    | {name: _elementwise(name, _unary(name)) for name in UNARY}
    | {name: _elementwise(name, _binary(name)) for name in BINARY},
    has_named_dtypes=False,
    autograd=AUTOGRAD,
)
