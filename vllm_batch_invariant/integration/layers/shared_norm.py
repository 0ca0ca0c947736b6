"""vLLM's norms of queries and keys over all heads (MiniMax-M2), whose heads workers share, by the sum of the mode."""

from typing import Any

import torch

from ... import envs
from ..parallel import tensor_tree
from ..reviews import patch_points

NAME = "MiniMaxText01RMSNormTP"
"""Of vLLM's class of such a norm."""


def install() -> None:
    """Have models compute both norms by ours; a vLLM that lacks the place has no such model."""
    if patch_points.SHARED_NORM.is_there():
        patch_points.SHARED_NORM.get().forward_qkv = staticmethod(forward_qkv)


def problem() -> str | None:
    """Why such a layer is refused; None if it is not."""
    return f"{envs.TP_TREE.name} has no tree of its workers' means" if tensor_tree.k_slices() > 1 else None


def forward_qkv(
    q_norm: Any, k_norm: Any, qkv: torch.Tensor, q_size: int, kv_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """vLLM's method, which adds by other kernels from a number of tokens on where several workers share the heads.

    Args:
        q_norm: the layer of the queries: their weight, and how many workers there are.
        k_norm: that of the keys.
        qkv: [tokens, q_size + 2 * kv_size], this worker's.

    Returns:
        queries and keys, each x / sqrt(mean(x**2) + eps) * weight in fp32, rounded to their dtype, and the values. The
        mean is that of all workers' heads: of their means, added in the order of the ranks.
    """
    q, k, v = qkv.split([q_size, kv_size, kv_size], dim=-1)
    rows = q.float(), k.float()
    means = torch.cat([row.pow(2).mean(-1, keepdim=True) for row in rows], dim=-1)
    if q_norm.tp_world > 1:
        means = patch_points.TENSOR_PARALLEL.get().all_reduce(means) / q_norm.tp_world
    normed = (
        row * torch.rsqrt(mean + norm.variance_epsilon) * norm.weight
        for row, mean, norm in zip(rows, means.split(1, dim=-1), (q_norm, k_norm), strict=True)
    )
    q, k = (row.to(qkv.dtype) for row in normed)
    return q, k, v
