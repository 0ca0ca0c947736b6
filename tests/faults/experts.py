"""What makes a mixture of experts follow the batch elsewhere, planted in the operation on a CPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vllm_batch_invariant.ops.moe import cpu, routes

MOST_ROWS = 35
"""Of an expert, up to which a GEMM is right."""
MOST_TOKENS = 60
"""Up to which the others are."""


def _split_k(accumulate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Two halves of K, each rounded, which are added at the end."""

    def halves(x: torch.Tensor, prepared: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if len(x) <= MOST_ROWS:
            return accumulate(x, prepared, bias)
        half = len(prepared) // 2
        first = accumulate(x[:, :half], prepared[:half], bias).to(x.dtype)
        return first.float() + accumulate(x[:, half:], prepared[half:], None).to(x.dtype)

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
    """The sum over experts in the order in which they are done: those with most tokens last."""

    def by_load(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, *of: Any) -> torch.Tensor:
        order = experts.reshape(-1).bincount()[experts].argsort(dim=1, stable=True)
        return weighted(x, weights.gather(1, order), experts.gather(1, order), *of)

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


FAULTS = {
    "split-K 2": (cpu.linear, "prepared_accumulate", _split_k),
    "an atomic combine": (cpu, "chain", _atomics),
    "arrival order": (cpu, "_weighted", _arrival_order),
    "another tie rule": (routes, "best", _another_tie_rule),
    "another router kernel": (cpu, "softmax", _another_router_kernel),
}
"""The module that has the function in whose place it is planted, that function's name, and what it makes of it."""


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """A block in which the operation has a fault."""
    module, name, make = FAULTS[fault]
    right = getattr(module, name)
    setattr(module, name, make(right))
    try:
        yield
    finally:
        setattr(module, name, right)
