"""Elementwise functions on the CPU: PyTorch's kernel, given only whole vectors, so that its scalar tail never runs."""

import torch

from ..common.native_kernels import kernel

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
    shape, elements = tensors[0].shape, tensors[0].numel()
    size = padded_size(elements, torch.get_num_threads())
    flat = [tensor.reshape(-1).contiguous() for tensor in tensors]  # one column of several is a view of strides
    if size != elements:
        flat = [torch.nn.functional.pad(tensor, (0, size - elements), value=1.0) for tensor in flat]
    given = (flat[0], *arguments, *flat[1:]) if between else (*flat, *arguments)
    out = kernel(name, flat[0])(*given, **(options or {}))
    return out[:elements].reshape(shape)
