"""What chooses the experts of a token and adds what they make of it, of PyTorch's operations on single elements, which
IEEE 754 defines, and stable sorts; on any device.
"""

from collections.abc import Sequence

import torch

from .reduction import MoeReduction


def route_by(
    scores: torch.Tensor, reduction: MoeReduction, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``route`` of scores [tokens, num_experts] in fp32."""
    compared = scores if bias is None else scores + bias.to(scores.dtype)
    if reduction.groups > 1:
        compared = _in_best_groups(compared, reduction, bias is not None)
    ids = best(compared, reduction.top_k)
    weights = scores.gather(1, ids)
    if reduction.renormalise:
        weights = weights / chain(weights.unbind(1)).unsqueeze(1)
    if reduction.scale != 1:
        weights = weights * reduction.scale
    return weights, ids


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """[rows, count] the places of the highest scores of each row, of equal ones the lowest first: ``torch.topk`` leaves
    open which.
    """
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()


def _in_best_groups(scores: torch.Tensor, reduction: MoeReduction, biased: bool) -> torch.Tensor:
    """[rows, num_experts] with -inf for the experts of groups that are not among the best."""
    grouped = scores.view(len(scores), reduction.groups, -1)
    of_group = chain(grouped.topk(min(2 if biased else 1, grouped.shape[2]), dim=2).values.unbind(2))
    others = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, best(of_group, reduction.top_groups), False)
    return grouped.masked_fill(others.unsqueeze(2), -torch.inf).view(scores.shape)


def chain(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """0 + terms[0] + terms[1] + ..., one after the other. Where a term is 0, it might as well not be there."""
    acc = torch.zeros_like(terms[0])
    for term in terms:
        acc += term
    return acc
