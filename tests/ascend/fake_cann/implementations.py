"""Results of the right shape in the place of the modules ``ascend.ops.<operation>``; each call is logged."""

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch

from vllm_batch_invariant.ops.common.rows import normalise_dims
from vllm_batch_invariant.ops.reduce import composed

Tensor = torch.Tensor
CALLS: list[str] = []
"""The functions called since the last clear."""


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def _accumulated(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1], dtype=torch.float32)


def _reduced(x: Tensor, dim: object, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    dims = normalise_dims(dim, x.dim())
    kept = [1 if place in dims else size for place, size in enumerate(x.shape) if keepdim or place not in dims]
    return x.new_empty(kept, dtype=dtype or x.dtype)


def _like(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _gradient(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(grad, dtype=dtype)


def _rms_norm(x: Tensor, weight: object, eps: float, residual: Tensor | None, variance_size: int | None) -> object:
    return torch.empty_like(x) if residual is None else (torch.empty_like(x), torch.empty_like(x))


FUNCTIONS: dict[str, dict[str, Callable[..., object]]] = {
    "linear": {"mm": _product, "bmm": _product, "accumulate": _accumulated, "accumulate_batch": _accumulated},
    "norm": {"rms_norm": _rms_norm},
    "softmax": {
        "softmax": _like,
        "log_softmax": _like,
        "softmax_backward": _gradient,
        "log_softmax_backward": _gradient,
    },
    "reduce": {
        "sum": _reduced,
        "mean": _reduced,
        "sum_of": partial(composed.sum_of, _reduced),
        "moments": partial(composed.moments, _reduced, _reduced),
    },
}


def _logged(name: str, function: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        CALLS.append(name)
        return function(*args, **kwargs)

    return call


def install() -> None:
    """Let an import of ``ascend.ops.<operation>`` find these."""
    for operation, functions in FUNCTIONS.items():
        module = ModuleType(f"vllm_batch_invariant.ascend.ops.{operation}")
        for name, function in functions.items():
            setattr(module, name, _logged(f"{operation}.{name}", function))
        sys.modules[module.__name__] = module
