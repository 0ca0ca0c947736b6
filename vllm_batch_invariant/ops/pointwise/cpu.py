"""Elementwise functions on the CPU. Those that layers of models have are in numba, from operations that IEEE 754
defines. Of the others it is PyTorch's kernel, whose bits follow the CPU's instructions, given only whole vectors, so
that its scalar tail never runs.
"""

import numpy as np
import torch
from numba import njit, prange

from ..common.native_kernels import kernel
from ..common.numba_exact_math import ln_of_integer, tanh
from ..common.numba_math import erf32, exp32
from ..common.numba_rows import RowKernel

UNARY = (
    "silu", "sigmoid", "gelu", "softplus", "mish", "elu", "exp2", "sinh", "cosh", "rsqrt", "pow.Tensor_Scalar",
    "atanh", "special_i0e",
    "tanh", "exp", "log", "erf", "log1p", "expm1", "sin", "cos",
)  # fmt: skip
"""ATen functions of one tensor. Those of the first two lines were seen to differ; the others reach the same loops."""
BINARY = (
    "silu_backward", "gelu_backward", "softplus_backward", "mish_backward", "sigmoid_backward", "tanh_backward",
    "pow.Tensor_Tensor", "atan2", "logaddexp", "logaddexp2", "igamma", "igammac",
)  # fmt: skip
"""ATen functions of two tensors of one shape."""

_VECTOR = 64
"""Elements of the largest step of the vectorised loop (two 512-bit vectors of bf16), in every dtype."""
_GRAIN = 32768
"""Elements from which ATen's parallel_for shares the loop out to threads (at::internal::GRAIN_SIZE)."""
_PART = 4096
"""Elements of a part of a written function's loop."""
_ONE, _HALF, _TWO = np.float32(1), np.float32(0.5), np.float32(2)
_GELU_SLOPE, _GELU_CUBE = np.float32(0.7978845608028654), np.float32(0.044715)  # sqrt(2 / pi), as PyTorch has it
_SQRT_HALF = np.float32(0.7071067811865476)


@njit(inline="always")
def sigmoid32(x):
    """1 / (1 + exp(-x))."""
    return _ONE / (_ONE + exp32(-x))


@njit(inline="always")
def softplus32(x):
    """ln(1 + exp(x)), as the larger of x and 0 plus a logarithm in fp64."""
    small = np.float64(exp32(-abs(x)))
    rest = small - small * small * 0.5 if small < 1e-6 else ln_of_integer(1.0 + small)
    return np.float32(rest) + (x if x > 0 or x != x else np.float32(0))


def _written_kernel(x, which, out):
    """The function of that place in :data:`WRITTEN`."""
    for part in prange(-(-x.size // _PART)):
        places = range(part * _PART, min((part + 1) * _PART, x.size))
        if which == 0:
            for i in places:
                out[i] = x[i] / (_ONE + exp32(-x[i]))
        elif which == 1:
            for i in places:
                out[i] = sigmoid32(x[i])
        elif which == 2:
            for i in places:
                out[i] = exp32(x[i])
        elif which == 3:
            for i in places:
                out[i] = tanh(x[i])
        elif which == 4:
            for i in places:
                out[i] = softplus32(x[i])
        elif which == 5:
            for i in places:
                out[i] = erf32(x[i])
        elif which == 6:
            for i in places:
                inner = _GELU_SLOPE * (x[i] + _GELU_CUBE * (x[i] * x[i] * x[i]))
                out[i] = _HALF * x[i] * (_ONE + tanh(inner))
        else:
            for i in places:
                out[i] = _HALF * x[i] * (_ONE + erf32(x[i] * _SQRT_HALF))


WRITTEN = ("silu", "sigmoid", "exp", "tanh", "softplus", "erf", "gelu of tanh", "gelu")
_written = RowKernel(_written_kernel)


def _written_name(name: str, arguments: tuple, options: dict | None) -> str | None:
    """In :data:`WRITTEN`; None if a function with such arguments is not there."""
    if name == "gelu":
        given = {"approximate": "none", **(options or {})}
        return {"none": "gelu", "tanh": "gelu of tanh"}.get(given["approximate"]) if not arguments else None
    return name if name in WRITTEN and not arguments and not options else None


def padded_size(elements: int, threads: int) -> int:
    """The least size from ``elements`` up at which each thread's share of the loop is whole vectors."""
    size = -(-elements // _VECTOR) * _VECTOR
    while size % (_VECTOR * max(1, min(threads, -(-size // _GRAIN)))):
        size += _VECTOR
    return size


def elementwise(
    name: str, *tensors: torch.Tensor, arguments: tuple = (), options: dict | None = None, between: bool = False
) -> torch.Tensor:
    """Apply ``aten::name`` to CPU tensors of one shape and dtype; ``arguments`` and ``options`` are passed on.

    Args:
        between: whether ``arguments`` stand between the first tensor and the others, and not behind all.
    """
    shape, elements, dtype = tensors[0].shape, tensors[0].numel(), tensors[0].dtype
    written = None if dtype == torch.float64 else _written_name(name, arguments, options)
    if written is not None:
        x = tensors[0].float().reshape(-1).contiguous()
        out = torch.empty_like(x)
        _written(elements, x, WRITTEN.index(written), out)
        return out.to(dtype).reshape(shape)
    size = padded_size(elements, torch.get_num_threads())
    flat = [tensor.reshape(-1).contiguous() for tensor in tensors]  # one column of several is a view of strides
    if size != elements:
        flat = [torch.nn.functional.pad(tensor, (0, size - elements), value=1.0) for tensor in flat]
    given = (flat[0], *arguments, *flat[1:]) if between else (*flat, *arguments)
    out = kernel(name, flat[0])(*given, **(options or {}))
    return out[:elements].reshape(shape)
