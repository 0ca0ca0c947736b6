"""Mixtures of experts on the CPU: tokens are grouped by expert, and each expert's rows go through the GEMMs of
``ops/linear/cpu.py`` or, as codes, of ``ops/scaled_linear/cpu.py``, where a row's bits do not depend on how many there
are or in which order.

The additions and multiplications beside the GEMMs are PyTorch's of single elements, which IEEE 754 defines.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..linear import cpu as linear
from ..pointwise import elementwise
from ..quantise import cpu as quantising
from ..scaled_linear import cpu as scaled_linear
from ..softmax import softmax
from .params import Codes, Experts
from .reduction import MoeReduction
from .routes import chain, route_by

_TOKENS_AT_ONCE = 2048
"""Whose products are held in memory, top_k rows each in fp32, until they are added."""
_SWIGLUOAI_ALPHA, _SWIGLUOAI_LIMIT = 1.702, 7.0


def route(
    logits: torch.Tensor, reduction: MoeReduction, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    logits = logits.to(reduction.accumulate)
    scores = softmax(logits) if reduction.scoring == "softmax" else elementwise("sigmoid", logits)
    return route_by(scores, reduction, bias)


def _activated(hidden: torch.Tensor, activation: str) -> torch.Tensor:
    """[rows, intermediate] of [rows, 2 * intermediate], or of as many without a gate."""
    if activation == "relu2_no_mul":
        return hidden.float().relu().square().to(hidden.dtype)
    if activation == "swigluoai":
        gate = hidden[:, ::2].float().clamp(max=_SWIGLUOAI_LIMIT)
        up = hidden[:, 1::2].float().clamp(-_SWIGLUOAI_LIMIT, _SWIGLUOAI_LIMIT)
        return ((up + 1) * (gate * elementwise("sigmoid", gate * _SWIGLUOAI_ALPHA))).to(hidden.dtype)
    gate, up = hidden.chunk(2, dim=1)
    if activation == "silu":
        return elementwise("silu", gate) * up
    return elementwise("gelu", gate, options={"approximate": "tanh" if activation == "gelu_tanh" else "none"}) * up


def moe(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: Experts) -> torch.Tensor:
    """See the operation's package."""
    if experts.reduction.products is not None:
        return prepared_moe(x, weights, ids, experts)
    used = set(experts.placed(ids).unique().tolist())
    gate_up, down = (
        [linear.prepare_weight(one) if expert in used else one for expert, one in enumerate(weight)]
        for weight in (experts.gate_up, experts.down)
    )
    return prepared_moe(x, weights, ids, replace(experts, gate_up=gate_up, down=down))


def prepare_experts(weight: torch.Tensor) -> tuple[linear.Panels, ...]:
    """The weights [experts, N, K] of one GEMM as they are wanted, each for itself."""
    return tuple(linear.prepare_weight(of_expert) for of_expert in weight)


def prepared_moe(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: Experts) -> torch.Tensor:
    """``moe`` with weights from :func:`prepare_experts`: same bits, without the conversion. Those whose products are of
    codes need none.
    """
    reduction, adapters = experts.reduction, experts.adapters

    def expert(number: int, rows: Rows, tokens: torch.Tensor) -> torch.Tensor:
        hidden = _product(rows, experts.gate_up, experts.gate_up_bias, number, reduction)
        if adapters is not None and isinstance(rows, torch.Tensor):
            adapters.add_gate_up(hidden, rows, tokens, torch.full_like(tokens, number))
        activated = _operand(_activated(hidden, reduction.activation), reduction, *experts.given[1:])
        made = _product(activated, experts.down, experts.down_bias, number, reduction)
        if adapters is not None and isinstance(activated, torch.Tensor):
            adapters.add_down(made, activated, tokens, torch.full_like(tokens, number))
        return made

    given = _operand(x, reduction, *experts.given[:1]), weights, experts.placed(ids), len(experts.down)
    return sum_of_experts(*given, expert, experts.exchange)


Rows = torch.Tensor | Codes
"""[rows, K]"""


def _operand(rows: torch.Tensor, reduction: MoeReduction, scale: torch.Tensor | None = None) -> Rows:
    """Rows as a product takes them, of a given scale or with their own."""
    how = reduction.quantised
    return rows if how is None else Codes(*quantising.quantise(rows, scale, how), rows.dtype)


def _product(rows: Rows, weight: Any, bias: torch.Tensor | None, number: int, reduction: MoeReduction) -> torch.Tensor:
    """That of rows with the weight of the expert of a number."""
    bias = None if bias is None else bias[number]
    if isinstance(rows, torch.Tensor):
        return linear.prepared_linear(rows, weight[number], bias)
    assert reduction.products is not None
    return scaled_linear.scaled_linear(rows.codes, rows.scales, *weight.operand(number), bias, reduction.products)


Expert = Callable[[int, Any, torch.Tensor], torch.Tensor]
"""Gives what the expert of a number makes of rows [tokens, hidden], which are those of these tokens [tokens]."""


def sum_of_experts(
    x: Rows,
    weights: torch.Tensor,
    experts: torch.Tensor,
    count: int,
    expert: Expert,
    exchange: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Each token's weighted sum over its experts, from the first on, rounded once: [tokens, hidden] of x's dtype.

    Args:
        x: [tokens, hidden].
        weights: [tokens, top_k] fp32.
        experts: [tokens, top_k], which of the ``count`` experts that are there; -1 for one that is not.
        count: of experts.
        expert: what is called for each of them that has tokens.
        exchange: see :class:`.params.Experts`.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    for start in range(0, len(x), _TOKENS_AT_ONCE):
        part = slice(start, start + _TOKENS_AT_ONCE)
        terms = _weighted(x[part], weights[part], experts[part], count, expert, start)
        terms = terms if exchange is None else exchange(terms)
        out[part] = chain(terms.unbind(1)).to(out.dtype)
    return out


def _weighted(
    x: Rows, weights: torch.Tensor, experts: torch.Tensor, count: int, expert: Expert, start: int
) -> torch.Tensor:
    """[tokens, top_k, hidden] fp32: what each expert makes of its tokens, from ``start`` on, times the weight; 0 where
    it is not there.
    """
    tokens, top_k = experts.shape
    terms = torch.zeros(tokens * top_k, x.shape[1], dtype=weights.dtype)
    weights, experts = weights.reshape(-1, 1), experts.reshape(-1)
    by_expert = experts.argsort(stable=True)
    absent, *counts = (experts + 1).bincount(minlength=count + 1).tolist()
    for number, slots in enumerate(by_expert[absent:].split(counts)):
        if len(slots):
            tokens_of = slots // top_k
            terms[slots] = expert(number, x[tokens_of], start + tokens_of) * weights[slots]
    return terms.view(tokens, top_k, -1)
