"""Gradients of attention on the CPU: tile after tile of a sequence's queries, each with all its keys, by the chains of
``ops/linear/cpu.py``.
"""

from itertools import pairwise

import torch

from ..linear.cpu import accumulate_batch
from ..reduce import sum as row_sum
from ..softmax import softmax
from .reduction import AttentionBackwardReduction


@torch.no_grad()
def attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: list[int],
    scale: float,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    reduction = AttentionBackwardReduction.of_device("cpu", query.shape[-1], query.dtype)
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for start, stop in pairwise(cu_seqlens):
        rows = slice(start, stop)
        _of_sequence(
            *(tensor[rows] for tensor in (grad, query, key, value)),
            scale,
            causal,
            reduction,
            *(tensor[rows] for tensor in grads),
        )
    return grads


def _of_sequence(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    reduction: AttentionBackwardReduction,
    of_query: torch.Tensor,
    of_key: torch.Tensor,
    of_value: torch.Tensor,
) -> None:
    """Write the gradients of one sequence to the last three."""
    length, kv_heads, _ = key.shape
    group = query.shape[1] // kv_heads
    keys, values = _of_heads(key, kv_heads, reduction), _of_heads(value, kv_heads, reduction)
    all_of_key, all_of_value = torch.zeros_like(keys), torch.zeros_like(values)
    for start in range(0, length, reduction.block_m):
        stop = min(start + reduction.block_m, length)
        q, do = (_of_heads(tensor[start:stop], kv_heads, reduction) for tensor in (query, grad))
        seen = stop if causal else length
        k, v = keys[:, :seen], values[:, :seen]
        scores = accumulate_batch(q, k.transpose(1, 2)).mul_(scale)  # [kv_heads, group * queries, keys]
        if causal:
            later = torch.ones(stop - start, stop - start, dtype=torch.bool).triu_(1).repeat(group, 1)
            scores[:, :, start:].masked_fill_(later, -torch.inf)
        p = softmax(scores)
        ds = accumulate_batch(do, v.transpose(1, 2))  # dp, until delta is taken off
        ds = ds.sub_(row_sum(p * ds, -1, keepdim=True)).mul_(p).mul_(scale)
        of_query[start:stop] = accumulate_batch(ds, k).unflatten(1, (group, -1)).permute(2, 0, 1, 3).flatten(1, 2)
        all_of_key[:, :seen] += accumulate_batch(ds.transpose(1, 2), q)
        all_of_value[:, :seen] += accumulate_batch(p.transpose(1, 2), do)
    of_key.copy_(all_of_key.transpose(0, 1))
    of_value.copy_(all_of_value.transpose(0, 1))


def _of_heads(tensor: torch.Tensor, kv_heads: int, reduction: AttentionBackwardReduction) -> torch.Tensor:
    """[kv_heads, heads of a KV head * rows, head_size] of [rows, heads, head_size], in memory of its own."""
    grouped = tensor.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    return grouped.to(reduction.accumulate, memory_format=torch.contiguous_format, copy=True).flatten(1, 2)
