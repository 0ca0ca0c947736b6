"""Activations as the engine's layers compute them, with gradients in fp32 that are rounded once."""

from collections.abc import Callable
from functools import partial

import torch
from torch.autograd.function import once_differentiable

from ..ops import pointwise, silu
from ..ops.silu_backward import silu_and_mul_backward


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """:func:`..ops.silu.silu_and_mul` (SwiGLU, Shazeer 2020, arXiv:2002.05202) of x [tokens, 2 * N]."""
    return _SiluAndMul.apply(x)


def elementwise(name: str, x: torch.Tensor) -> torch.Tensor:
    """:func:`..ops.pointwise.elementwise` of x, on a CPU: "silu", "sigmoid", "exp", "gelu" or "gelu of tanh". PyTorch's
    own have other bits, and in the last elements of a thread yet others.
    """
    return _Elementwise.apply(x, name)


def silu_slope(x: torch.Tensor) -> torch.Tensor:
    """The derivative of SiLU at x in fp32."""
    share = pointwise.elementwise("sigmoid", x)
    return share * (1.0 + x * (1.0 - share))


def _sigmoid_slope(x: torch.Tensor) -> torch.Tensor:
    share = pointwise.elementwise("sigmoid", x)
    return share * (1.0 - share)


_GELU = {"gelu": "none", "gelu of tanh": "tanh"}
"""PyTorch's names of approximations."""


def _gelu_slope(approximate: str, x: torch.Tensor) -> torch.Tensor:
    return pointwise.elementwise("gelu_backward", torch.ones_like(x), x, options={"approximate": approximate})


_SLOPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_slope,
    "sigmoid": _sigmoid_slope,
    "exp": partial(pointwise.elementwise, "exp"),
    **{name: partial(_gelu_slope, approximate) for name, approximate in _GELU.items()},
}


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return silu.silu_and_mul(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return silu_and_mul_backward(x, grad)


class _Elementwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        if name in _GELU:
            return pointwise.elementwise("gelu", x, options={"approximate": _GELU[name]})
        return pointwise.elementwise(name, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return (grad.float() * _SLOPES[ctx.name](x.float())).to(x.dtype), None
