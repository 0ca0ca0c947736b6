"""Gradients of attention over whole sequences that lie one after the other.

    p = softmax(scale * q k^T),  dp = do v^T,  delta = sum(p * dp),  ds = scale * p * (dp - delta)
    dq = ds k,  dk = ds^T q,  dv = p^T do

It is the gradient of exact attention: scores are computed again in fp32, and nothing is rounded on the way. Tiles as in
FlashAttention-2 (Dao 2023, arXiv:2307.08691), so memory grows with the number of tokens and not with its square.
"""

from collections.abc import Sequence

import torch

from ...errors import NotCovered
from ..dispatch import implementation
from .reduction import AttentionBackwardReduction

__all__ = ["AttentionBackwardReduction", "attention_backward"]


def attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: Sequence[int],
    *,
    scale: float,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value.

    Those at a sequence's tokens depend on that sequence alone, not on the others or on where in the batch it lies.

    Args:
        grad: [tokens, heads, head_size] fp32, bf16 or fp16, the gradient of the output.
        query: of the same shape and dtype.
        key: [tokens, kv_heads, head_size] of the same dtype; heads a multiple of kv_heads.
        value: as ``key``.
        cu_seqlens: the first token of each sequence, ascending from 0, and the number of tokens.
        scale: factor of the scores.
        causal: whether a query sees no key after itself; else it sees all of its sequence.

    Returns:
        Three tensors like query, key and value, each rounded once.

    Raises:
        ValueError: shapes, dtypes or sequences that do not fit.
        NotCovered: a device without an implementation, and keys of both directions on another device than a CPU.
    """
    tensors = (grad, query, key, value)
    fits = (
        grad.shape == query.shape
        and query.dim() == key.dim() == 3
        and key.shape == value.shape
        and query.shape[::2] == key.shape[::2]
        and query.shape[1] % max(key.shape[1], 1) == 0
        and len({tensor.dtype for tensor in tensors}) == 1
    )
    if not fits:
        given = ", ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor in tensors)
        raise ValueError(f"attention_backward takes a gradient, query, key and value that fit, got {given}")
    bounds = list(cu_seqlens)
    if bounds[:1] != [0] or bounds != sorted(bounds) or bounds[-1] != len(query):
        raise ValueError(f"sequences of {len(query)} tokens cannot begin at {bounds}")
    given = [tensor.detach() for tensor in tensors]
    module = implementation("attention_backward", *given)
    if causal:
        return module.attention_backward(*given, bounds, scale)
    if not query.is_cpu:
        raise NotCovered(
            f"gradients of attention to keys of both directions on device '{query.device.type}'",
            "its kernels compute those of causal attention alone",
            "train on a CPU, or freeze what attends so",
        )
    return module.attention_backward(*given, bounds, scale, causal=False)
