"""RMSNorm of the engine's layers, with gradients."""

import torch
from torch.autograd.function import once_differentiable

from ..ops import norm, reduce


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As :func:`vllm_batch_invariant.ops.norm.rms_norm`: x + residual enters the norm unrounded.

    The gradient is computed in fp32 from x and the residual, and rounded once.
    """
    return _Norm.apply(x, weight, eps) if residual is None else _AddedNorm.apply(x, residual, weight, eps)


def _backward(
    summed: torch.Tensor, weight: torch.Tensor, eps: float, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``summed`` [..., N] and of ``weight``, in fp32."""
    scale = 1 / (reduce.mean(summed.square(), -1, keepdim=True) + eps).sqrt()
    normalised = summed * scale
    weighted = grad.float() * weight.float()
    of_summed = scale * (weighted - normalised * reduce.mean(weighted * normalised, -1, keepdim=True))
    of_weight = reduce.sum((grad.float() * normalised).flatten(0, -2), 0)
    return of_summed, of_weight


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return norm.rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = _backward(x.float(), weight, ctx.eps, grad)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None


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
        return norm.rms_norm(x, weight, eps, residual)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor, grad_of_sum: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, residual, weight = ctx.saved_tensors
        of_summed, of_weight = _backward(x.float() + residual.float(), weight, ctx.eps, grad)
        of_summed = (of_summed + grad_of_sum.float()).to(x.dtype)
        return of_summed, of_summed, of_weight.to(weight.dtype), None
