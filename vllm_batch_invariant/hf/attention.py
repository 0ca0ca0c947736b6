"""Attention of whole sequences with the engine's reduction, with gradients: causal, and of both directions."""

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

from .. import envs
from ..integration.layers.encoders import attend_within
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

    def by_pages(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        implementation = envs.ATTENTION.read()
        cache = PagedCache(batch.to_pages(key), batch.to_pages(value), batch.pages)
        reduction = AttentionReduction.of_device(query.device.type, implementation)
        call = PagedAttention(query, cache, batch.lengths, batch.cu_seqlens, AttentionSpec(scale), reduction)
        return attention.attend(call, implementation)

    return _Attention.apply(query, key, value, batch.cu_seqlens, scale, True, by_pages)


def attend_both_ways(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, scale: float
) -> torch.Tensor:
    """The same of each row to all rows of its sequence, which an encoder has: [rows, heads, head_size].

    Args:
        starts: [sequences + 1] int32, where each begins.
    """
    return _Attention.apply(query, key, value, starts, scale, False, lambda *qkv: attend_within(qkv, starts, scale))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor,
        scale: float,
        causal: bool,
        attended: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, starts)
        ctx.scale, ctx.causal = scale, causal
        return attended(query, key, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, starts = ctx.saved_tensors
        grads = attention_backward(grad, query, key, value, starts.tolist(), scale=ctx.scale, causal=ctx.causal)
        return *grads, None, None, None, None
