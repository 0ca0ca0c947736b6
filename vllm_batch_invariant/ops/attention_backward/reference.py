"""The definition, sequence by sequence, in float64 by PyTorch's autograd."""

from collections.abc import Sequence
from itertools import pairwise

import torch


def attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: Sequence[int],
    scale: float,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the operation's package; the results are float64."""
    tensors = [tensor.double() for tensor in (query, key, value)]
    grads = [torch.zeros_like(tensor) for tensor in tensors]
    queries_per_kv = query.shape[1] // key.shape[1]
    for start, stop in pairwise(cu_seqlens):
        parts = [tensor[start:stop].clone().requires_grad_() for tensor in tensors]
        with torch.enable_grad():
            q, k, v = (part.transpose(0, 1) for part in parts)  # [heads, length, head_size]
            k, v = (part.repeat_interleave(queries_per_kv, dim=0) for part in (k, v))
            hidden = torch.full((stop - start, stop - start), causal, device=q.device).triu(1)
            weights = (scale * (q @ k.transpose(1, 2))).masked_fill(hidden, -torch.inf).softmax(-1)
            found = torch.autograd.grad((weights @ v).transpose(0, 1), parts, grad[start:stop].double())
        for whole, part in zip(grads, found, strict=True):
            whole[start:stop] = part
    return grads[0], grads[1], grads[2]
