"""CPU computations in the place of the modules of ``ascend.ops``, which need triton-ascend; calls are logged."""

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch

from tests.ascend.dispatch.device import LOG, on_raw
from vllm_batch_invariant.ops.reduce import composed

Tensor = torch.Tensor
PACKAGE = "vllm_batch_invariant.ascend.ops"


def _mm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    out = a.double() @ b.double()
    return (out if bias is None else out + bias.double()).to(a.dtype)


def _accumulate(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() @ b.double()).float()


def _rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, variance_size: int | None
) -> Tensor | tuple[Tensor, Tensor]:
    wide = x.double() if residual is None else x.double() + residual.double()
    out = wide / (wide[..., :variance_size].square().mean(-1, keepdim=True) + eps).sqrt()
    out = out.to(x.dtype) if weight is None else (out * weight.double()).to(x.dtype)
    return out if residual is None else (out, wide.to(x.dtype))


def _softmax(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.softmax(x.double(), dim).to(dtype or x.dtype)


def _log_softmax(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.log_softmax(x.double(), dim).to(dtype or x.dtype)


def _softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return (output * (grad - (grad * output).sum(dim, keepdim=True))).to(dtype)


def _log_softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return (grad - output.exp() * grad.sum(dim, keepdim=True)).to(dtype)


def _reduction(name: str) -> Callable[..., Tensor]:
    def reduce(x: Tensor, dim: object, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        dims = list(range(x.dim())) if dim is None or dim == [] else dim
        return getattr(torch, name)(x.double(), dims, keepdim).to(dtype or x.dtype)

    return reduce


FUNCTIONS: dict[str, dict[str, Callable[..., object]]] = {
    "linear": {"mm": _mm, "accumulate": _accumulate, "accumulate_batch": _accumulate, "bmm": _mm},
    "norm": {"rms_norm": _rms_norm},
    "softmax": {
        "softmax": _softmax,
        "log_softmax": _log_softmax,
        "softmax_backward": _softmax_backward,
        "log_softmax_backward": _log_softmax_backward,
    },
    "reduce": {
        "sum": _reduction("sum"),
        "mean": _reduction("mean"),
        "sum_of": partial(composed.sum_of, _reduction("sum")),
        "moments": partial(composed.moments, _reduction("sum"), _reduction("mean")),
    },
}


def _logged(name: str, function: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        LOG.append(f"ours {name}")
        return on_raw(function)(*args, **kwargs)

    return call


def install() -> None:
    """Let an import of these modules find them."""
    for operation, functions in FUNCTIONS.items():
        module = ModuleType(f"{PACKAGE}.{operation}")
        for name, function in functions.items():
            setattr(module, name, _logged(f"{operation}.{name}", function))
        sys.modules[module.__name__] = module
