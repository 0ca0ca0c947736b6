"""RMSNorm of the engine's layers, with gradients."""

from typing import cast

import torch
from torch.autograd.function import once_differentiable

from ..ops import norm
from ..ops.norm_backward import rms_norm_backward


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As :func:`vllm_batch_invariant.ops.norm.rms_norm`: x + residual enters the norm unrounded.

    The gradient is computed in fp32 from x and the residual, and rounded once.
    """
    return _Norm.apply(x, weight, eps) if residual is None else _AddedNorm.apply(x, residual, weight, eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return cast(torch.Tensor, norm.rms_norm(x, weight, eps))

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = rms_norm_backward(x, weight, ctx.eps, grad)
        return of_x, of_weight.to(weight.dtype), None


class _AddedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, residual, weight)
        ctx.eps = eps
        return cast(tuple[torch.Tensor, torch.Tensor], norm.rms_norm(x, weight, eps, residual))

    @staticmethod
    @once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor, grad_of_sum: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, residual, weight = ctx.saved_tensors
        of_summed, of_weight = rms_norm_backward(x, weight, ctx.eps, grad, residual, grad_of_sum)
        return of_summed, of_summed, of_weight.to(weight.dtype), None
