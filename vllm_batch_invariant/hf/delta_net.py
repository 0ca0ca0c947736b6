"""The layers of a gated delta net (Qwen3.5) of the engine, with gradients: a short convolution, the rule, and a norm of
heads with a gate.
"""

from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from ..integration.layers.delta_rule import RECURRENCE
from ..integration.layers.recurrence import Sizes
from ..ops import reduce
from ..ops.causal_conv import ConvStates, causal_conv
from ..ops.delta_rule import DeltaRuleReduction, DeltaStates, delta_rule, gdn_inputs
from ..ops.delta_rule_backward import gdn_backward
from ..ops.norm import gated_rms_norm, rms_norm
from ..ops.norm_backward import rms_norm_backward
from ..ops.pointwise import elementwise
from .activation import silu, silu_slope
from .linear import linear
from .packing import Packed


def delta_net_forward(self: torch.nn.Module, hidden: torch.Tensor, batch: Packed) -> torch.Tensor:
    """[tokens, hidden] of [tokens, hidden]."""
    mixed, z = linear(hidden, self.in_proj_qkv.weight, self.in_proj_z.weight).split(
        [self.conv_dim, self.value_dim], dim=-1
    )
    b, a = linear(hidden, self.in_proj_b.weight, self.in_proj_a.weight).chunk(2, dim=-1)
    convolved = silu(convolve(mixed, self.conv1d.weight.flatten(1), batch))
    reduction = sizes_of(self).reduction(hidden.dtype)
    out = gated_delta_net(convolved, a, b, self.A_log, self.dt_bias, self.num_k_heads, batch, reduction)
    normed = gated_norm(out, z.unflatten(-1, (-1, self.head_v_dim)), self.norm.weight, self.norm.variance_epsilon)
    return linear(normed.flatten(1), self.out_proj.weight)


def reductions(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """What an engine says of such layers, by names; nothing where a model has none."""
    nets = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
    return RECURRENCE.reductions_of([sizes_of(net) for net in nets], dtype)


def sizes_of(net: torch.nn.Module) -> Sizes:
    """Of Hugging Face's layer those that the engine's has."""
    heads = net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim
    return Sizes(*heads, width=net.conv_kernel_size, drafts=0, solve=True)


def convolve(x: torch.Tensor, weight: torch.Tensor, batch: Packed) -> torch.Tensor:
    """The convolution of each channel over its sequence, as the engine's operation computes it. Gradients are computed
    in fp32, tap after tap from the token itself back, and rounded once.

    Args:
        x: [tokens, channels] fp32, bf16 or fp16.
        weight: [channels, width] of the same dtype: the last tap is of the token itself.
        batch: which rows belong together.

    Returns:
        [tokens, channels] of x's dtype.
    """
    return _Convolution.apply(x, weight, batch)


def gated_delta_net(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_heads: int,
    batch: Packed,
    reduction: DeltaRuleReduction,
) -> torch.Tensor:
    """The rule over whole sequences, with the bits that the engine has by prefill and by decode. The backward pass
    recomputes each sequence in fp32, so a gradient does not depend on the other sequences, and is that of the exact
    function, not of the rounded one.

    Args:
        mixed, a, b, a_log, dt_bias, key_heads: of :func:`..ops.delta_rule.gdn_inputs`.
        batch: which rows belong together.
        reduction: of the layer.

    Returns:
        [tokens, value_heads, value_size] of mixed's dtype.
    """
    return _Rule.apply(mixed, a, b, a_log, dt_bias, key_heads, batch, reduction)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """:func:`..ops.norm.gated_rms_norm` with SiLU of the gate; gradients are computed in fp32 and rounded once."""
    return _GatedNorm.apply(x, gate, weight, eps)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, weight: torch.Tensor, batch: Packed
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.batch = batch
        held = x.new_zeros(len(batch.lengths), weight.shape[1] - 1, x.shape[1])
        return causal_conv(x, weight, None, ConvStates(held, *batch.states))

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        tokens, positions = len(x), ctx.batch.positions
        grads, inputs, taps = grad.float(), x.float(), weight.float()
        of_x, of_weight = torch.zeros_like(grads), []
        for distance in range(min(weight.shape[1], max(tokens, 1))):
            behind = (positions >= distance)[distance:, None]  # a token so far back is of the same sequence
            reached = torch.where(behind, grads[distance:], 0.0)
            of_x[: tokens - distance] += reached * taps[:, -1 - distance]
            of_weight.append(reduce.sum(reached * inputs[: tokens - distance], 0))
        missing = [torch.zeros_like(taps[:, 0])] * (weight.shape[1] - len(of_weight))
        return of_x.to(x.dtype), torch.stack([*missing, *reversed(of_weight)], 1).to(weight.dtype), None


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        mixed: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        key_heads: int,
        batch: Packed,
        reduction: DeltaRuleReduction,
    ) -> torch.Tensor:
        ctx.save_for_backward(mixed, a, b, a_log, dt_bias)
        ctx.key_heads, ctx.batch, ctx.reduction = key_heads, batch, reduction
        operands = gdn_inputs(mixed, a, b, a_log, dt_bias, key_heads, reduction.key_size)
        rows = reduction.rows(0)
        size = reduction.page_bytes(key_heads, len(a_log), rows)
        held = torch.zeros(len(batch.lengths), size, dtype=torch.uint8, device=mixed.device)
        return delta_rule(*operands, DeltaStates(held, *batch.states, rows), reduction)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mixed, a, b, a_log, dt_bias = ctx.saved_tensors
        cu_seqlens = ctx.batch.cu_seqlens.tolist()
        grads = gdn_backward(grad, mixed, a, b, a_log, dt_bias, ctx.key_heads, cu_seqlens, ctx.reduction)
        return *grads, None, None, None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        return gated_rms_norm(x, weight, eps, gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        wide, grads = gate.float(), grad.float()
        of_x, of_weight = rms_norm_backward(x, weight, ctx.eps, grads * elementwise("silu", wide))
        normed = cast(torch.Tensor, rms_norm(x.float(), weight.float(), ctx.eps))
        of_gate = grads * normed * silu_slope(wide)
        return of_x, of_gate.to(gate.dtype), of_weight.to(weight.dtype), None
