"""Causal attention of whole sequences with the engine's reduction, with gradients."""

import torch
from torch.autograd.function import once_differentiable

from .. import envs
from ..ops import attention
from ..ops.attention import AttentionReduction, AttentionSpec, PagedAttention, PagedCache
from ..ops.attention_backward import attention_backward
from .packing import Packed


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Packed, scale: float) -> torch.Tensor:
    """Each token's attention to the tokens of its sequence up to itself.

    The forward pass is the engine's operation, which has the same bits by prefill and by decode; keys and values are
    copied into pages for it. The backward pass recomputes each sequence in fp32, so a gradient does not depend on the
    other sequences, and is that of the exact function, not of the rounded one. Its memory grows with the length.

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
        cache = PagedCache(batch.to_pages(key), batch.to_pages(value), batch.pages)
        reduction = AttentionReduction.of_device(query.device.type, implementation)
        call = PagedAttention(query, cache, batch.lengths, batch.cu_seqlens, AttentionSpec(scale), reduction)
        return attention.attend(call, implementation)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        grads = attention_backward(grad, query, key, value, ctx.batch.cu_seqlens.tolist(), scale=ctx.scale)
        return *grads, None, None
