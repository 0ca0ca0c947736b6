"""Activations as the engine's layers compute them, with gradients in fp32 that are rounded once."""

import torch
from torch.autograd.function import once_differentiable

from ..ops import pointwise
from ..ops import silu as silu_op
from ..ops.silu_backward import silu_and_mul_backward


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """:func:`..ops.silu.silu_and_mul` (SwiGLU, Shazeer 2020, arXiv:2002.05202) of x [tokens, 2 * N]."""
    return _SiluAndMul.apply(x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x) of each element, on a CPU: PyTorch's own has other bits, and in the last elements of a thread yet
    others.
    """
    return _Elementwise.apply(x, "silu")


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x) of each element, on a CPU; see :func:`silu`."""
    return _Elementwise.apply(x, "sigmoid")


def silu_slope(x: torch.Tensor) -> torch.Tensor:
    """Of x in fp32 the derivative of SiLU."""
    share = pointwise.elementwise("sigmoid", x)
    return share * (1.0 + x * (1.0 - share))


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return silu_op.silu_and_mul(x)

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
        return pointwise.elementwise(name, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        if ctx.name == "silu":
            slope = silu_slope(x.float())
        else:
            share = pointwise.elementwise("sigmoid", x.float())
            slope = share * (1.0 - share)
        return (grad.float() * slope).to(x.dtype), None
