"""What layers with states have in common: a short convolution, and a gated delta rule or a state space of Mamba-2, over
whole sequences, with gradients.
"""

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from ..ops import reduce
from ..ops.causal_conv import ConvStates, causal_conv
from ..ops.delta_rule import DeltaRuleReduction, DeltaStates, delta_rule, gdn_inputs, mamba2_inputs
from ..ops.delta_rule_backward import delta_rule_backward
from .packing import Packed


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, batch: Packed, gated: bool = False
) -> torch.Tensor:
    """The convolution of each channel over its sequence, as the engine's operation computes it. Gradients are those of
    the exact function, computed in fp32, tap after tap from the token itself back, and rounded once.

    Args:
        x: [tokens, channels] fp32, bf16 or fp16; gated [tokens, 3 * channels], see
            :func:`..ops.causal_conv.causal_conv`.
        weight: [channels, width] of the same dtype: the last tap is of the token itself.
        bias: [channels] of the same dtype, or None.
        batch: which rows belong together.
        gated: whether x has gates.

    Returns:
        [tokens, channels] of x's dtype.
    """
    return _Convolution.apply(x, weight, bias, batch, gated)


def recur(
    operands: Sequence[torch.Tensor], key_heads: int, batch: Packed, reduction: DeltaRuleReduction
) -> torch.Tensor:
    """The rule over whole sequences, with the bits that the engine has by prefill and by decode. The backward pass
    recomputes each sequence in fp32, so a gradient does not depend on the other sequences, and is that of the exact
    function, not of the rounded one.

    Args:
        operands: of :func:`..ops.delta_rule_backward.delta_rule_backward`.
        key_heads: of queries and keys; of a state space its groups.
        batch: which rows belong together.
        reduction: of the layer.

    Returns:
        [tokens, value_heads, value_size] of the first operand's dtype.
    """
    return _Recurrence.apply(key_heads, batch, reduction, *operands)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        batch: Packed,
        gated: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.batch, ctx.gated = batch, gated
        held = x.new_zeros(len(batch.lengths), weight.shape[1] - 1, len(weight))
        return causal_conv(x, weight, bias, ConvStates(held, *batch.states), gated)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        tokens, positions = len(x), ctx.batch.positions
        grads, given, taps = grad.float(), x.float(), weight.float()
        of_sum, inputs = grads, given
        if ctx.gated:
            before, after, given = given.chunk(3, 1)
            of_sum, inputs = grads * after, before * given
        summed = torch.zeros_like(grads) if bias is None else bias.float().expand_as(grads).clone()
        of_inputs, of_weight = torch.zeros_like(grads), []
        for distance in range(min(weight.shape[1], max(tokens, 1))):
            behind = (positions >= distance)[distance:, None]  # a token so far back is of the same sequence
            reached, tap = torch.where(behind, of_sum[distance:], 0.0), taps[:, -1 - distance]
            of_inputs[: tokens - distance] += reached * tap
            of_weight.append(reduce.sum(reached * inputs[: tokens - distance], 0))
            if ctx.gated:
                summed[distance:] += torch.where(behind, inputs[: tokens - distance], 0.0) * tap
        missing = [torch.zeros_like(taps[:, 0])] * (weight.shape[1] - len(of_weight))
        of_weights = torch.stack([*missing, *reversed(of_weight)], 1).to(weight.dtype)
        of_bias = None if bias is None else reduce.sum(of_sum, 0).to(bias.dtype)
        of_x = torch.cat((of_inputs * given, grads * summed, of_inputs * before), 1) if ctx.gated else of_inputs
        return of_x.to(x.dtype), of_weights, of_bias, None, None


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        key_heads: int,
        batch: Packed,
        reduction: DeltaRuleReduction,
        *operands: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(*operands)
        ctx.key_heads, ctx.batch, ctx.reduction = key_heads, batch, reduction
        skip: torch.Tensor | None = None
        if reduction.solve:
            mixed, a, b, a_log, dt_bias = operands
            given = gdn_inputs(mixed, a, b, a_log, dt_bias, key_heads, reduction.key_size)
        else:
            mixed, dt, a, dt_bias, skip = operands
            given = mamba2_inputs(mixed, dt, a, dt_bias, key_heads, reduction.key_size)
        rows = reduction.rows(0)
        size = reduction.page_bytes(key_heads, len(dt_bias), rows)
        held = torch.zeros(len(batch.lengths), size, dtype=torch.uint8, device=mixed.device)
        return delta_rule(*given, DeltaStates(held, *batch.states, rows), reduction, skip)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cu_seqlens = ctx.batch.cu_seqlens.tolist()
        grads = delta_rule_backward(grad, ctx.saved_tensors, ctx.key_heads, cu_seqlens, ctx.reduction)
        return None, None, None, *grads
