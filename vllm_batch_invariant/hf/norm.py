"""RMSNorm and LayerNorm of the engine's layers, with gradients that are computed in fp32 and rounded once."""

from typing import cast

import torch
from torch.autograd.function import once_differentiable

from ..ops import norm, reduce
from ..ops.norm_backward import rms_norm_backward
from ..ops.pointwise import elementwise
from .activation import silu_slope


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, adds_one: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As :func:`vllm_batch_invariant.ops.norm.rms_norm`: x + residual enters the norm unrounded."""
    if residual is None:
        return _Norm.apply(x, weight, eps, adds_one)
    return _AddedNorm.apply(x, residual, weight, eps, adds_one)


def gated_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, gate: torch.Tensor, norm_before_gate: bool = True
) -> torch.Tensor:
    """As :func:`vllm_batch_invariant.ops.norm.gated_rms_norm` with SiLU of the gate, on a CPU."""
    return _GatedNorm.apply(x, weight, eps, gate, norm_before_gate)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """PyTorch's, which takes rows one by one on a CPU, and which vLLM calls."""
    return _LayerNorm.apply(x, weight, bias, eps)


def _multiplied(weight: torch.Tensor, adds_one: bool) -> torch.Tensor:
    """What rows are multiplied with."""
    return weight.float() + 1.0 if adds_one else weight


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, weight: torch.Tensor, eps: float, adds_one: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.adds_one = eps, adds_one
        return cast(torch.Tensor, norm.rms_norm(x, weight, eps, adds_one=adds_one))

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = rms_norm_backward(x, _multiplied(weight, ctx.adds_one), ctx.eps, grad)
        return of_x, of_weight.to(weight.dtype), None, None


class _AddedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        adds_one: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, residual, weight)
        ctx.eps, ctx.adds_one = eps, adds_one
        return cast(tuple[torch.Tensor, torch.Tensor], norm.rms_norm(x, weight, eps, residual, adds_one=adds_one))

    @staticmethod
    @once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor, grad_of_sum: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, residual, weight = ctx.saved_tensors
        multiplied = _multiplied(weight, ctx.adds_one)
        of_summed, of_weight = rms_norm_backward(x, multiplied, ctx.eps, grad, residual, grad_of_sum)
        return of_summed, of_summed, of_weight.to(weight.dtype), None, None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        gate: torch.Tensor,
        norm_before_gate: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.eps, ctx.norm_before_gate = eps, norm_before_gate
        return norm.gated_rms_norm(x, weight, eps, gate, norm_before_gate=norm_before_gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, gate = ctx.saved_tensors
        wide, scaled, gates = x.float(), weight.float(), gate.float()
        opened, before = elementwise("silu", gates), ctx.norm_before_gate
        normed, of_normed = (wide, grad.float() * opened) if before else (wide * opened, grad.float())
        normalised = cast(torch.Tensor, norm.rms_norm(normed, None, ctx.eps))
        of_input, _ = rms_norm_backward(normed, scaled.new_ones(scaled.shape[-1]), ctx.eps, of_normed * scaled)
        of_opened = grad.float() * normalised * scaled if before else of_input * wide
        of_x = of_input if before else of_input * opened
        of_weight = reduce.sum((of_normed * normalised).flatten(0, -1 - weight.dim()), 0)
        of_gate = of_opened * silu_slope(gates)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None, of_gate.to(gate.dtype), None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide, of_out = x.float(), grad.float()
        centred = wide - reduce.mean(wide, -1, keepdim=True)
        deviation = (reduce.mean(centred * centred, -1, keepdim=True) + ctx.eps).sqrt()
        normalised, of_normalised = centred / deviation, of_out * weight.float()
        along = reduce.mean(of_normalised * normalised, -1, keepdim=True)
        of_x = (of_normalised - reduce.mean(of_normalised, -1, keepdim=True) - normalised * along) / deviation
        of_weight, of_bias = reduce.sum(of_out * normalised, 0), reduce.sum(of_out, 0)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), of_bias.to(weight.dtype), None
