"""The definition of a mixture of experts, token by token in float64."""

from typing import Any

import torch
from torch.nn import functional

from ..quantise import reference as quantising
from ..scaled_linear import reference as scaled_linear
from ..scaled_linear.reduction import E4M3
from .params import ExpertAdapters, Experts, Slices
from .reduction import MoeReduction


def route(
    logits: torch.Tensor, reduction: MoeReduction, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package; weights are float64."""
    scores = logits.double().softmax(-1) if reduction.scoring == "softmax" else logits.double().sigmoid()
    weights, ids = [], []
    for own in scores:
        compared = (own if bias is None else own + bias.double()).view(reduction.groups, -1)
        best = compared.topk(min(1 if bias is None else 2, compared.shape[1]), 1).values.sum(1)
        groups = sorted(range(reduction.groups), key=lambda group: (-best[group].item(), group))
        allowed = set(groups[: reduction.top_groups])
        size = compared.shape[1]
        experts = [expert for expert in range(len(own)) if expert // size in allowed]
        chosen = sorted(experts, key=lambda expert: (-compared.view(-1)[expert].item(), expert))[: reduction.top_k]
        found = own[chosen]
        weights.append((found / found.sum() if reduction.renormalise else found) * reduction.scale)
        ids.append(torch.tensor(chosen))
    return torch.stack(weights), torch.stack(ids)


def moe(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: Experts) -> torch.Tensor:
    """See the operation's package; [tokens, hidden] float64, and nothing is rounded on the way but to codes."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, slot in torch.cartesian_prod(torch.arange(len(x)), torch.arange(experts.reduction.top_k)).tolist():
        expert = int(experts.placed(ids[token, slot]))
        if expert < 0:
            continue
        hidden = _product(x[token].double(), experts.gate_up, expert, experts.reduction, *experts.given[:1])
        if experts.gate_up_bias is not None:
            hidden += experts.gate_up_bias[expert].double()
        if experts.adapters is not None:
            hidden += _adapted(x[token].double(), token, expert, experts.adapters, experts.adapters.gate_up)
        activated = _activated(hidden, experts.reduction.activation)
        made = _product(activated, experts.down, expert, experts.reduction, *experts.given[1:])
        if experts.down_bias is not None:
            made += experts.down_bias[expert].double()
        if experts.adapters is not None:
            made += _adapted(activated, token, expert, experts.adapters, experts.adapters.down)
        out[token] += weights[token, slot].double() * made
    return out


def _product(
    row: torch.Tensor, weight: Any, expert: int, reduction: MoeReduction, scale: torch.Tensor | None = None
) -> torch.Tensor:
    if reduction.products is None:
        return weight[expert].double() @ row
    assert reduction.quantised is not None
    codes, scales = quantising.quantise(row.float(), scale, codes=E4M3, group=reduction.quantised.group)
    return scaled_linear.scaled_linear(codes.to(E4M3), scales, *weight.operand(expert))


def _adapted(
    row: torch.Tensor, token: int, expert: int, adapters: ExpertAdapters, of: tuple[Slices, Slices]
) -> torch.Tensor:
    """What a token's adapter adds to a product."""
    slot = int(adapters.slots[token])
    if slot < 0:
        return torch.zeros(())
    pairs = zip(*of, strict=True)
    return torch.cat([b[slot, expert].double() @ (a[slot, expert].double() @ row) for a, b in pairs])


def _activated(hidden: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "relu2_no_mul":
        return hidden.relu().square()
    if activation == "swigluoai":
        gate, up = hidden[::2].clamp(max=7.0), hidden[1::2].clamp(-7.0, 7.0)
        return gate * (1.702 * gate).sigmoid() * (up + 1)
    gate, up = hidden.chunk(2)
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
