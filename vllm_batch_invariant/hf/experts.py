"""A mixture of experts of the engine's layers, with gradients."""

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from ..integration.layers.fp8 import Source
from ..ops import linear as linear_op
from ..ops import moe as moe_op
from ..ops import reduce, softmax
from ..ops.dispatch import module_for
from ..ops.formats import FP8_BLOCK
from ..ops.moe import ExpertAdapters, MoeReduction, StoredExperts
from ..ops.quantise.weights import quantise_weight
from ..ops.silu_backward import silu_and_mul_backward
from . import adapters
from .activation import silu_and_mul
from .linear import matrix_of, product, rows_of


def experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    reduction: MoeReduction,
    matrices: Sequence[torch.Tensor] = (),
    fp8: Source | None = None,
) -> torch.Tensor:
    """Each token's sum over its experts, as :mod:`..ops.moe` computes it.

    With ``fp8`` both products quantise what they are given and their weights, whose gradients are straight through, as
    :func:`.linear.linear` says.

    Gradients are computed expert by expert, by the operations of dense layers, in the dtype; those of a token's experts
    are added in fp32 from the best expert on. That of the logits is of the weights of the chosen experts alone: the
    choice has none.

    Args:
        x: [tokens, hidden] of the reduction's dtype.
        logits: [tokens, num_experts] of the router.
        gate_up: [num_experts, 2 * intermediate, hidden], gate first.
        down: [num_experts, hidden, intermediate].
        reduction: with softmax scores and SiLU, without groups or a scale.
        matrices: of adapters, as :func:`.adapters.of_experts` gives them; none with ``fp8``.
        fp8: how the engine's layer holds its weights, in blocks; None: in x's dtype.

    Returns:
        [tokens, hidden] of x's dtype.

    Raises:
        ValueError: adapters with ``fp8``.
    """
    if fp8 is not None and matrices:
        raise ValueError("experts in FP8 have no adapters")
    weights, ids = _Route.apply(logits, reduction)
    return _Experts.apply(x, weights, ids, gate_up, down, reduction, fp8, *matrices)


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
        fp8: Source | None,
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weights, ids, gate_up, down, *matrices)
        ctx.fp8 = fp8
        if fp8 is not None:
            stored = _in_blocks(gate_up), _in_blocks(down)
            return moe_op.moe(
                x, weights, ids, moe_op.Experts(*stored, moe_op.of_codes(reduction, stored[0].tensors[0]))
            )
        of_adapters = _in_one_slot(len(x), *matrices) if matrices else None
        return moe_op.moe(x, weights, ids, moe_op.Experts(gate_up, down, reduction, adapters=of_adapters))

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights, ids, gate_up, down, *matrices = ctx.saved_tensors
        added = _in_one_slot(len(x), *matrices) if matrices else None
        stored, needed = (gate_up, down, *matrices), (*ctx.needs_input_grad[3:5], *ctx.needs_input_grad[7:])
        of_stored = [
            torch.zeros_like(one) if is_needed else None for one, is_needed in zip(stored, needed, strict=True)
        ]
        of_gate_up, of_down, *of_matrices = of_stored
        tokens, top_k = ids.shape
        halves, whole = (gate_up.shape[1] // 2,) * 2, down.shape[1:2]
        of_weights = torch.zeros(tokens * top_k, device=x.device)
        of_x = torch.zeros(tokens * top_k, x.shape[1], device=x.device)  # fp32, a row for each expert of a token
        by_expert = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=len(down)).tolist()
        for expert, slots in enumerate(by_expert.split(counts)):
            if not len(slots):
                continue
            pairs = slots // top_k, torch.full_like(slots, expert)
            rows, of_out = x[pairs[0]], grad[pairs[0]].float()
            hidden = product(rows, gate_up[expert], halves, ctx.fp8)
            if added is not None:
                added.add_gate_up(hidden, rows, *pairs)
            activated = silu_and_mul(hidden)
            made = product(activated, down[expert], whole, ctx.fp8)
            if added is not None:
                added.add_down(made, activated, *pairs)
            of_weights[slots] = reduce.sum(of_out * made.float(), 1)
            of_made = (of_out * weights.flatten()[slots].unsqueeze(1)).to(x.dtype)
            of_activated = linear_op.mm(of_made, matrix_of(down[expert], whole, ctx.fp8))
            if added is not None:
                of_activated += _of_rows(expert, of_made, activated, matrices[2:], of_matrices[2:])
            of_hidden = silu_and_mul_backward(hidden, of_activated)
            of_x[slots] = linear_op.mm(of_hidden, matrix_of(gate_up[expert], halves, ctx.fp8)).float()
            if added is not None:
                of_x[slots] += _of_rows(expert, of_hidden, rows, matrices[:2], of_matrices[:2]).float()
            if of_down is not None:
                of_down[expert] = linear_op.mm(of_made.t(), rows_of(activated, ctx.fp8))
            if of_gate_up is not None:
                of_gate_up[expert] = linear_op.mm(of_hidden.t(), rows_of(rows, ctx.fp8))
        of_tokens = reduce.sum(of_x.view(tokens, top_k, -1), 1).to(x.dtype)
        return of_tokens, of_weights.view(tokens, top_k), None, of_gate_up, of_down, None, None, *of_matrices


def _in_blocks(weight: torch.Tensor) -> StoredExperts:
    """Experts' weights [experts, N, K] as the engine's layer holds them in FP8."""
    codes, scales = zip(*(quantise_weight(of_expert, "block") for of_expert in weight), strict=True)
    return StoredExperts(FP8_BLOCK, (torch.stack(codes), torch.stack(scales)), weight.dtype)


def _in_one_slot(
    tokens: int, a: torch.Tensor, of_gate_up: torch.Tensor, of_inner: torch.Tensor, of_down: torch.Tensor
) -> ExpertAdapters:
    """Adapters of all of so many tokens as an engine has them: of one rank in both products, and for gate and up one A
    each.
    """
    rank = max(a.shape[1], of_inner.shape[1])
    a, of_inner = (pad(one, (0, 0, 0, rank - one.shape[1]))[None] for one in (a, of_inner))
    of_gate_up, of_down = (pad(one, (0, rank - one.shape[2]))[None] for one in (of_gate_up, of_down))
    halves = tuple(half.contiguous() for half in of_gate_up.chunk(2, 2))
    slots = torch.zeros(tokens, dtype=torch.int64, device=a.device)
    return ExpertAdapters(slots, ((a, a), halves), ((of_inner,), (of_down,)))


def _of_rows(
    expert: int,
    grad: torch.Tensor,
    rows: torch.Tensor,
    pair: Sequence[torch.Tensor],
    of_pair: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """What an expert's adapter adds to the gradient of rows [pairs, K], of a product's whose own is grad [pairs, N].
    Those of A and B of the pair are written where they are wanted.
    """
    a, b = (of_all[expert] for of_all in pair)
    of_u, *found = adapters.gradients(grad, rows, a, b, [one is not None for one in of_pair])
    for one, of_expert in zip(of_pair, found, strict=True):
        if one is not None and of_expert is not None:
            one[expert] = of_expert
    return linear_op.mm(of_u, a)
