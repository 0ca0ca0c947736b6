"""The definition of top-k and top-p, by a stable sort and sums in float64."""

import torch


def kept(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """[rows, length] bool: the candidates that stay."""
    rows, length = logits.shape
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    ranks = torch.arange(length, device=logits.device).expand(rows, length)
    stays = torch.ones_like(ranks, dtype=torch.bool)
    if k is not None:
        limits = torch.where((k > 0) & (k < length), k, length)
        stays &= ranks < limits.unsqueeze(-1)
    if p is not None:
        values = logits.double().gather(-1, order)
        weights = torch.where(stays, (values - values[:, :1]).exp(), 0.0)
        before = weights.cumsum(-1) - weights
        wanted = p.double().unsqueeze(-1) * weights.sum(-1, keepdim=True)
        stays &= (before < wanted) | (ranks == 0) | (p >= 1).unsqueeze(-1)
    return torch.zeros_like(stays).scatter_(-1, order, stays)
