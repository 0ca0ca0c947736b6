"""SiLU times gate (SwiGLU, Shazeer 2020, arXiv:2002.05202) as the engine's layers compute it, with gradients."""

import torch
from torch.autograd.function import once_differentiable

from ..ops import silu
from ..ops.silu_backward import silu_and_mul_backward


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """:func:`..ops.silu.silu_and_mul` of x [tokens, 2 * N]. The gradient is computed in fp32 and rounded once."""
    return _SiluAndMul.apply(x)


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
