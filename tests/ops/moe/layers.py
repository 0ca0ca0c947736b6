"""Small layers of experts, and tokens that are routed to them in every way."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from vllm_batch_invariant.ops.moe import Experts, MoeReduction, cpu, route

HIDDEN, INTERMEDIATE = 256, 192
EXPERTS = 8


@dataclass(frozen=True)
class Layer:
    """Weights of a layer, with what decides its bits."""

    reduction: MoeReduction
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    score_bias: torch.Tensor | None = None

    @property
    def experts(self) -> Experts:
        """What ``moe`` is given of the layer."""
        return Experts(self.gate_up, self.down, self.reduction, self.gate_up_bias, self.down_bias)

    @cached_property
    def prepared(self) -> Experts:
        """With the weights as an engine keeps them."""
        prepared = cpu.prepare_experts(self.gate_up), cpu.prepare_experts(self.down)
        return replace(self.experts, gate_up=prepared[0], down=prepared[1])

    def __call__(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        weights, ids = route(logits, self.reduction, self.score_bias)
        return cpu.prepared_moe(x, weights, ids, self.prepared)


def layer(dtype: torch.dtype = torch.bfloat16, biased: bool = False, **fields: object) -> Layer:
    """A layer of 8 experts, of which a token has 3."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    reduction = replace(MoeReduction(EXPERTS, 3, dtype), **fields)
    rows = INTERMEDIATE * (1 + reduction.is_gated)
    made = Layer(
        reduction,
        draw(EXPERTS, HIDDEN),
        draw(EXPERTS, rows, HIDDEN),
        draw(EXPERTS, HIDDEN, INTERMEDIATE),
    )
    if not biased:
        return made
    return replace(
        made,
        gate_up_bias=draw(EXPERTS, rows),
        down_bias=draw(EXPERTS, HIDDEN),
        score_bias=torch.randn(EXPERTS, generator=generator) * 0.2,
    )


def tokens(count: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """[count, HIDDEN]"""
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def uniform(x: torch.Tensor, of: Layer) -> torch.Tensor:
    """Logits of the layer's router: every expert gets about as many tokens."""
    return torch.nn.functional.linear(x.double(), of.router.double()).to(x.dtype)


def skewed(x: torch.Tensor, of: Layer) -> torch.Tensor:
    """The first experts get most tokens, the last ones few."""
    return (uniform(x, of).float() - torch.arange(EXPERTS)).to(x.dtype)


def one_expert(x: torch.Tensor, of: Layer) -> torch.Tensor:
    """Expert 5 gets every token, with nearly all of its weight."""
    logits = uniform(x, of)
    logits[:, 5] += 20
    return logits


def tied(x: torch.Tensor, of: Layer) -> torch.Tensor:
    """Two values for all logits: every choice is one among equals."""
    return (uniform(x, of) > 0.5).to(x.dtype)


ROUTINGS = {function.__name__: function for function in (uniform, skewed, one_expert, tied)}
