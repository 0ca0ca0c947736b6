"""Causal attention of whole sequences with the engine's reduction, with gradients."""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import envs
from ..ops.attention import AttentionReduction, paged_attention
from ..ops.attention_backward import attention_backward
from .packing import Packed


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Packed, scale: float) -> torch.Tensor:
    """Each token's attention to the tokens of its sequence up to itself.

    The forward pass is the engine's operation, which has the same bits by prefill and by decode; keys and values are
    copied into pages for it. The backward pass recomputes one sequence after the other in fp32, so a gradient does not
    depend on the other sequences, and is that of the exact function, not of the rounded one. On a CPU its memory grows
    with a sequence's length, on a GPU with the square.

    Args:
        query: [tokens, heads, head_size] fp32, bf16 or fp16.
        key: [tokens, kv_heads, head_size] of the same dtype.
        value: as ``key``.
        batch: which rows belong together.
        scale: factor of the scores.

    Returns:
        [tokens, heads, head_size] of query's dtype.
    """
    return _Attention.apply(query, key, value, batch, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: Packed,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.batch, ctx.scale = batch, scale
        implementation = envs.ATTENTION.read()
        return paged_attention(
            query,
            batch.to_pages(key),
            batch.to_pages(value),
            batch.pages,
            batch.lengths,
            batch.cu_seqlens,
            scale=scale,
            reduction=AttentionReduction.of_device(query.device.type, implementation),
            implementation=implementation,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_BACKWARD[grad.device.type](grad, *ctx.saved_tensors, ctx.batch, ctx.scale), None, None


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _by_operation(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Packed, scale: float
) -> Gradients:
    return attention_backward(grad, query, key, value, batch.cu_seqlens.tolist(), scale=scale)


def _by_pytorch(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Packed, scale: float
) -> Gradients:
    """By scaled_dot_product_attention as plain matmuls, with memory for heads * length**2 scores."""
    tensors = (query, key, value)
    grads = tuple(torch.zeros_like(tensor) for tensor in tensors)
    for rows in batch.sequences:
        inputs = [tensor[rows].float().transpose(0, 1)[None].requires_grad_() for tensor in tensors]
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=scale, enable_gqa=True)
            parts = torch.autograd.grad(out, inputs, grad[rows].float().transpose(0, 1)[None])
        for whole, part in zip(grads, parts, strict=True):
            whole[rows] = part[0].transpose(0, 1).to(whole.dtype)
    return grads


# The operation's kernels for a GPU are interpreted and compiled by tests, and have not run on one.
_BACKWARD = {"cpu": _by_operation, "cuda": _by_pytorch}
