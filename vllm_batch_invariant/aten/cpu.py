"""A CPU: elementwise functions beside what every device gets, because PyTorch's round the last elements of each thread
otherwise. Devices that run one scalar code for every element need none of these.
"""

from collections.abc import Callable

import torch

from ..ops.common import native_kernels
from ..ops.pointwise import BINARY, UNARY, elementwise
from .overrides import OVERRIDES, DeviceOverrides, Number, Override, Tensor, is_exact


def _unary(name: str) -> Callable[..., Tensor]:
    def function(x: Tensor, *arguments: Number, **options: object) -> Tensor:
        if not x.is_floating_point():
            x = x.to(torch.get_default_dtype()) if is_exact(x) else x
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


DEVICE = DeviceOverrides(
    OVERRIDES | {name: Override(_unary(name)) for name in UNARY} | {name: Override(_binary(name)) for name in BINARY},
    has_named_dtypes=False,
)
