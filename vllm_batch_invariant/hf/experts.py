"""A mixture of experts of the engine's layers, with gradients."""

import torch
from torch.autograd.function import once_differentiable

from ..ops import linear as linear_op
from ..ops import moe as moe_op
from ..ops import reduce, softmax
from ..ops.dispatch import module_for
from ..ops.moe import MoeReduction
from ..ops.silu_backward import silu_and_mul_backward
from .activation import silu_and_mul


def experts(
    x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, reduction: MoeReduction
) -> torch.Tensor:
    """Each token's sum over its experts, as :mod:`..ops.moe` computes it.

    Gradients are computed expert by expert, by the operations of dense layers, in the dtype; those of a token's experts
    are added in fp32 from the best expert on. That of the logits is of the weights of the chosen experts alone: the
    choice has none.

    Args:
        x: [tokens, hidden] of the reduction's dtype.
        logits: [tokens, num_experts] of the router.
        gate_up: [num_experts, 2 * intermediate, hidden], gate first.
        down: [num_experts, hidden, intermediate].
        reduction: with softmax scores and SiLU, without groups or a scale.

    Returns:
        [tokens, hidden] of x's dtype.
    """
    weights, ids = _Route.apply(logits, reduction)
    return _Experts.apply(x, weights, ids, gate_up, down, reduction)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, logits: torch.Tensor, reduction: MoeReduction
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = moe_op.route(logits, reduction)
        ctx.mark_non_differentiable(ids)
        ctx.save_for_backward(logits, weights, ids)
        ctx.renormalise = reduction.renormalise
        return weights, ids

    @staticmethod
    @once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        logits, weights, ids = ctx.saved_tensors
        scores = softmax.softmax(logits, dtype=torch.float32)
        if ctx.renormalise:
            total = reduce.sum(scores.gather(1, ids), 1, keepdim=True)
            grad = (grad - reduce.sum(grad * weights, 1, keepdim=True)) / total
        of_scores = torch.zeros_like(scores).scatter_(1, ids, grad)
        module = module_for("softmax", logits.device.type)
        return module.softmax_backward(of_scores, scores, -1, logits.dtype), None


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        reduction: MoeReduction,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weights, ids, gate_up, down)
        return moe_op.moe(x, weights, ids, moe_op.Experts(gate_up, down, reduction))

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights, ids, gate_up, down = ctx.saved_tensors
        tokens, top_k = ids.shape
        of_gate_up, of_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        of_weights = torch.zeros(tokens * top_k, device=x.device)
        of_x = torch.zeros(tokens * top_k, x.shape[1], device=x.device)  # fp32, a row for each expert of a token
        by_expert = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=len(down)).tolist()
        for expert, slots in enumerate(by_expert.split(counts)):
            if not len(slots):
                continue
            rows, of_out = x[slots // top_k], grad[slots // top_k].float()
            hidden = linear_op.linear(rows, gate_up[expert])
            activated = silu_and_mul(hidden)
            made = linear_op.linear(activated, down[expert])
            of_weights[slots] = reduce.sum(of_out * made.float(), 1)
            of_made = (of_out * weights.flatten()[slots].unsqueeze(1)).to(x.dtype)
            of_hidden = silu_and_mul_backward(hidden, linear_op.mm(of_made, down[expert]))
            of_x[slots] = linear_op.mm(of_hidden, gate_up[expert]).float()
            of_down[expert] = linear_op.mm(of_made.t(), activated)
            of_gate_up[expert] = linear_op.mm(of_hidden.t(), rows)
        of_tokens = reduce.sum(of_x.view(tokens, top_k, -1), 1).to(x.dtype)
        return of_tokens, of_weights.view(tokens, top_k), None, of_gate_up, of_down, None
