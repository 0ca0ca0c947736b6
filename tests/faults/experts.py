"""What makes a mixture of experts follow the batch elsewhere, planted in the operation on a CPU or a GPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from vllm_batch_invariant.ops.dispatch import module_for
from vllm_batch_invariant.ops.moe import cpu, routes

MOST_ROWS = 35
"""Of an expert, up to which a GEMM is right."""
MOST_TOKENS = 60
"""Up to which the others are."""
MOST_PAIRS = 4 * MOST_TOKENS
"""Of all experts, up to which a GPU's grouped GEMM is right."""


def _split_k(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Two halves of K, each rounded, which are added at the end."""

    def halves(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, *of_expert: Any) -> torch.Tensor:
        if len(x) <= MOST_ROWS:
            return product(x, weight, bias, *of_expert)
        first = x.clone()
        first[:, x.shape[1] // 2 :] = 0
        return product(first, weight, bias, *of_expert) + product(x - first, weight, None, *of_expert)

    return halves


def _atomics(chain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The sum over experts in bf16 and in any order, another one each time."""
    generator = torch.Generator().manual_seed(0)

    def any_order(terms: Sequence[torch.Tensor]) -> torch.Tensor:
        if terms[0].dim() == 1:  # of weights
            return chain(terms)
        acc = torch.zeros_like(terms[0], dtype=torch.bfloat16)
        for i in torch.randperm(len(terms), generator=generator).tolist():
            acc += terms[i]
        return acc.float()

    return any_order


def _arrival_order(weighted: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Experts are added to the result, and rounded, when they are done: those with most tokens last."""

    def by_load(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, *of: Any) -> torch.Tensor:
        order = experts.reshape(-1).bincount()[experts].argsort(dim=1, stable=True)
        terms = weighted(x, weights.gather(1, order), experts.gather(1, order), *of)
        acc = torch.zeros_like(terms[:, 0], dtype=torch.bfloat16)
        for place in range(terms.shape[1]):
            acc += terms[:, place]
        terms.zero_()[:, 0] = acc
        return terms

    return by_load


def _another_tie_rule(best: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The highest of equal experts comes first."""

    def by_size(scores: torch.Tensor, count: int) -> torch.Tensor:
        return best(scores, count) if len(scores) <= MOST_TOKENS else scores.shape[1] - 1 - best(scores.flip(1), count)

    return by_size


def _another_router_kernel(softmax: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Scores that are computed in another way, and are as good."""

    def by_size(logits: torch.Tensor) -> torch.Tensor:
        return softmax(logits) if len(logits) <= MOST_TOKENS else (logits - logits.logsumexp(1, True)).exp()

    return by_size


def _split_k_of_pairs(grouped_gemm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Two halves of K of the second product, each rounded, which are added at the end."""

    def halves(
        x: torch.Tensor, weight: torch.Tensor, bias: Any, groups: Any, pairs: int, *of: Any, **named: Any
    ) -> torch.Tensor:
        if pairs <= MOST_PAIRS or named.get("activation"):
            return grouped_gemm(x, weight, bias, groups, pairs, *of, **named)
        first, half = x.clone(), x.shape[1] // 2
        first[:, half:] = 0
        found = grouped_gemm(first, weight, bias, groups, pairs, *of, **named).to(x.dtype)
        return found.float() + grouped_gemm(x - first, weight, None, groups, pairs, *of, **named).to(x.dtype)

    return halves


def _atomics_of_pairs(combine: Callable[..., None]) -> Callable[..., None]:
    """The sum over experts in the dtype of the result and in any order, another one each time."""
    generator = torch.Generator().manual_seed(0)

    def any_order(of: Any, out: torch.Tensor) -> None:
        terms = of.expert_out.view(*of.weights.shape, -1) * of.weights[:, :, None]
        out.zero_()
        for i in torch.randperm(terms.shape[1], generator=generator).tolist():
            out += terms[:, i]

    return any_order


def _arrival_order_of_pairs(moe: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Experts are added to the result, and rounded, when they are done: those with most tokens last."""

    def by_load(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: Any) -> torch.Tensor:
        order = ids.reshape(-1).bincount()[ids].argsort(dim=1, stable=True)
        weights, ids, acc = weights.gather(1, order), ids.gather(1, order), torch.zeros_like(x)
        alone = replace(experts, reduction=replace(experts.reduction, top_k=1))
        for place in range(ids.shape[1]):
            one = slice(place, place + 1)
            acc += moe(x, weights[:, one], ids[:, one], alone)
        return acc

    return by_load


def _another_tie_rule_of_routes(route: Callable[..., Any]) -> Callable[..., Any]:
    """The highest of equal experts comes first."""

    def by_size(logits: torch.Tensor, reduction: Any, bias: torch.Tensor | None) -> Any:
        if len(logits) <= MOST_TOKENS:
            return route(logits, reduction, bias)
        weights, ids = route(logits.flip(1).contiguous(), reduction, None if bias is None else bias.flip(0))
        return weights, logits.shape[1] - 1 - ids

    return by_size


def _another_router_kernel_of_routes(route: Callable[..., Any]) -> Callable[..., Any]:
    """Scores that are computed in another way, and are as good."""

    def by_size(logits: torch.Tensor, reduction: Any, bias: torch.Tensor | None) -> Any:
        if len(logits) <= MOST_TOKENS:
            return route(logits, reduction, bias)
        wide = logits.float()
        return routes.route_by((wide - wide.logsumexp(1, True)).exp(), reduction, bias)

    return by_size


def _on_a_gpu() -> dict[str, tuple[Any, str, Callable[..., Any]]]:
    cuda = module_for("moe", "cuda")
    return {
        "split-K 2": (cuda, "grouped_gemm", _split_k_of_pairs),
        "an atomic combine": (cuda, "combine", _atomics_of_pairs),
        "arrival order": (cuda, "moe", _arrival_order_of_pairs),
        "another tie rule": (cuda, "route", _another_tie_rule_of_routes),
        "another router kernel": (cuda, "route", _another_router_kernel_of_routes),
    }


FAULTS = {
    "split-K 2": (cpu, "_product", _split_k),
    "an atomic combine": (cpu, "chain", _atomics),
    "arrival order": (cpu, "_weighted", _arrival_order),
    "another tie rule": (routes, "best", _another_tie_rule),
    "another router kernel": (cpu, "softmax", _another_router_kernel),
}
"""On a CPU: the module that has the function in whose place it is planted, that function's name, and what it makes of
it. A GPU has faults of the same names.
"""


@contextmanager
def planted(fault: str, in_triton: bool | None = None) -> Iterator[None]:
    """A block in which the operation has a fault: that on a GPU or, by default without one, that on a CPU."""
    in_triton = torch.cuda.is_available() if in_triton is None else in_triton
    module, name, make = (_on_a_gpu() if in_triton else FAULTS)[fault]
    right = getattr(module, name)
    setattr(module, name, make(right))
    try:
        yield
    finally:
        setattr(module, name, right)
