"""The matmul of the engine's linear layers, with gradients."""

import torch
from torch.autograd.function import once_differentiable

from ..ops import linear as linear_op

_ALIGNMENT = 64
"""Bytes: at another address the BLAS gets the weight in another layout, which may have other bits."""


def linear(
    x: torch.Tensor, *weights: torch.Tensor, columns: int | None = None, skip_zeros: bool = False
) -> torch.Tensor:
    """``x @ cat(weights).T``: one matmul, as in the engine, because on a CPU its bits follow the weight's shape.

    The gradient of x is computed row by row like the output, that of the weights as one matmul over all rows.

    Args:
        x: [..., K] fp32, bf16 or fp16.
        weights: each [N, K] of x's dtype.
        columns: the weights are extended with rows of zeros to this many; None for as they are.
        skip_zeros: leave rows whose gradient is zero, such as padding, out of the weights' gradient, whose bits follow
            the number of rows.

    Returns:
        [..., columns] of x's dtype.
    """
    return _Linear.apply(x, columns, skip_zeros, *weights)


def _stacked(weights: tuple[torch.Tensor, ...], columns: int | None) -> torch.Tensor:
    padding = (columns or 0) - sum(len(weight) for weight in weights)
    parts = [*weights, weights[0].new_zeros(padding, weights[0].shape[1])] if padding > 0 else list(weights)
    if len(parts) == 1 and parts[0].is_contiguous() and parts[0].data_ptr() % _ALIGNMENT == 0:
        return parts[0]
    return torch.cat(parts)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor,
        columns: int | None,
        skip_zeros: bool,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.columns, ctx.skip_zeros = columns, skip_zeros
        return linear_op.linear(x, _stacked(weights, columns))

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        rows, grads = x.flatten(0, -2), grad.flatten(0, -2)
        of_x: torch.Tensor | None = None
        of_weights: list[torch.Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            of_x = linear_op.mm(grads, _stacked(weights, ctx.columns)).reshape(x.shape)
        if any(wanted):
            if ctx.skip_zeros:
                used = grads.any(1)
                rows, grads = rows[used], grads[used]
            sizes = [len(weight) for weight in weights]
            whole = linear_op.mm(grads[:, : sum(sizes)].t(), rows)
            of_weights = [part if wants else None for part, wants in zip(whole.split(sizes), wanted, strict=True)]
        return of_x, None, None, *of_weights
