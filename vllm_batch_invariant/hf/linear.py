"""The matmul of the engine's linear layers, with gradients."""

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from ..integration.layers.fp8 import Source, multiply
from ..ops import linear as linear_op
from ..ops import reduce
from ..ops.formats import FP8, FP8_BLOCK
from ..ops.quantise import E4M3, quantise
from ..ops.quantise.weights import quantise_weight


def linear(
    x: torch.Tensor,
    *weights: torch.Tensor,
    biases: Sequence[torch.Tensor | None] = (),
    skip_zeros: bool = False,
    k_slices: int = 1,
    fp8: Source | None = None,
) -> torch.Tensor:
    """``x @ cat(weights).T + cat(biases)``: one matmul, as in the engine.

    The gradient of x is computed row by row like the output, that of the weights as one matmul over all rows.

    With ``fp8`` both operands are quantised first, as the engine's layer does. The gradients are straight through
    (Bengio et al. 2013, arXiv:1308.3432): those of a product of the numbers that the codes stand for, rounded to x's
    dtype, handed on as if nothing had been quantised. Weights keep their dtype, and codes are made again backward.

    Args:
        x: [..., K] fp32, bf16 or fp16.
        weights: each [N, K] of x's dtype.
        biases: [N] for each weight; none, or None for each, where nothing is added.
        skip_zeros: leave rows whose gradient is zero, such as padding, out of the weights' gradient, whose bits follow
            the number of rows.
        k_slices: that the engine's layer adds K in, where tensor-parallel workers may share it; 1: it is added whole.
        fp8: how the engine's layer holds its weight, with scales of x of its own; None: in x's dtype.

    Returns:
        [..., sum of N] of x's dtype.

    Raises:
        ValueError: biases for some of the weights only.
    """
    added = [bias for bias in biases if bias is not None]
    if added and len(added) != len(weights):
        raise ValueError(f"linear takes a bias for each of its {len(weights)} weights")
    if fp8 is not None and fp8.static:
        raise ValueError("linear in FP8 has scales of x of its own")
    return _Linear.apply(x, skip_zeros, k_slices, fp8, len(weights), *weights, *added)


def _stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor,
        skip_zeros: bool,
        k_slices: int,
        fp8: Source | None,
        count: int,
        *weights_and_biases: torch.Tensor,
    ) -> torch.Tensor:
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        ctx.save_for_backward(x, *weights)
        ctx.skip_zeros, ctx.fp8 = skip_zeros, fp8
        bias = torch.cat(biases) if biases else None
        return product(x, _stacked(weights), [len(one) for one in weights], fp8, bias, k_slices)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wanted, biases_wanted = ctx.needs_input_grad[5 : 5 + len(weights)], ctx.needs_input_grad[5 + len(weights) :]
        rows, grads = x.flatten(0, -2), grad.flatten(0, -2)
        of_x: torch.Tensor | None = None
        of_weights: list[torch.Tensor | None] = [None] * len(weights)
        of_biases: list[torch.Tensor | None] = [None] * len(biases_wanted)
        sizes = [len(weight) for weight in weights]
        if ctx.needs_input_grad[0]:
            of_x = linear_op.mm(grads, matrix_of(_stacked(weights), sizes, ctx.fp8)).reshape(x.shape)
        if any(biases_wanted):
            of_bias = reduce.sum(grads, 0)
            of_biases = _where(of_bias.split(sizes), biases_wanted)
        if any(wanted):
            if ctx.skip_zeros:
                used = grads.any(1)
                rows, grads = rows[used], grads[used]
            whole = linear_op.mm(grads.t(), rows_of(rows, ctx.fp8))
            of_weights = _where(whole.split(sizes), wanted)
        return of_x, None, None, None, None, *of_weights, *of_biases


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    widths: Sequence[int],
    fp8: Source | None,
    bias: torch.Tensor | None = None,
    k_slices: int = 1,
) -> torch.Tensor:
    """:func:`linear` of a weight that is merged of matrices of so many rows, without a gradient."""
    if fp8 is None:
        return linear_op.linear(x, weight, bias, k_slices)
    codes, scale = _quantised(weight, widths, fp8)
    return multiply(x, codes, scale if fp8.shared == "block" else scale[:, 0], bias, fp8, None, k_slices)


def matrix_of(weight: torch.Tensor, widths: Sequence[int], fp8: Source | None) -> torch.Tensor:
    """What is multiplied in the place of such a weight [N, K], rounded to its dtype."""
    if fp8 is None:
        return weight
    form = FP8_BLOCK if fp8.shared == "block" else FP8
    assert form.decode is not None
    return form.decode(_quantised(weight, widths, fp8), torch.empty_like(weight))


def rows_of(x: torch.Tensor, fp8: Source | None) -> torch.Tensor:
    """What is multiplied in the place of x [rows, K], in its dtype."""
    if fp8 is None:
        return x
    codes, scales = quantise(x, codes=E4M3, group=fp8.group)
    by_element = scales[:, None] if fp8.group is None else scales.repeat_interleave(fp8.group, 1)[:, : x.shape[1]]
    return (codes.float() * by_element).to(x.dtype)


def _quantised(weight: torch.Tensor, widths: Sequence[int], fp8: Source) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] of a weight that is merged of matrices of so many rows, and scales: of blocks, or of rows [N, 1]."""
    codes, scale = quantise_weight(weight, fp8.shared, widths)
    if fp8.shared == "tensor":
        scale = scale.repeat_interleave(torch.tensor(widths, device=scale.device))[:, None]
    return codes, scale


def _where(parts: Sequence[torch.Tensor], wanted: Sequence[bool]) -> list[torch.Tensor | None]:
    return [part if wants else None for part, wants in zip(parts, wanted, strict=True)]
