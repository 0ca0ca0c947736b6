"""Layers of experts and tokens that the benchmark of mixtures of experts meets, and who computes them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from benchmarks.roofline import Work
from vllm_batch_invariant.ops.moe import Experts, MoeReduction, moe, route


@dataclass(frozen=True)
class MoeLayer:
    """A layer of a published model, or a worker's part of its columns."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def reduction(self) -> MoeReduction:
        return MoeReduction(self.experts, self.top_k, self.dtype)

    @property
    def expert_bytes(self) -> int:
        """Of one expert's weights."""
        return 3 * self.hidden * self.intermediate * self.dtype.itemsize


LAYERS = (
    MoeLayer("Qwen3-30B-A3B", 128, 8, 2048, 768),
    MoeLayer("Qwen3-30B-A3B/2", 128, 8, 2048, 384),
    MoeLayer("gpt-oss-20b", 32, 4, 2880, 2880),
    MoeLayer("Qwen3-235B-A22B/4", 128, 8, 4096, 384),
    MoeLayer("Qwen3-235B-A22B/8", 128, 8, 4096, 192),
)
"""With SiLU and without biases; after the stroke, by how many workers the columns are shared."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


@dataclass(frozen=True)
class Weights:
    gate_up: torch.Tensor
    """[experts, 2 * intermediate, hidden]"""
    down: torch.Tensor
    """[experts, hidden, intermediate]"""

    @classmethod
    def random(cls, layer: MoeLayer, device: str) -> Self:
        """Of results that are about as large as the inputs."""
        generator = torch.Generator(device).manual_seed(1)

        def draw(*shape: int) -> torch.Tensor:
            matrix = torch.randn(*shape, generator=generator, dtype=layer.dtype, device=device)
            return matrix.mul_(shape[-1] ** -0.5)

        return cls(
            draw(layer.experts, 2 * layer.intermediate, layer.hidden),
            draw(layer.experts, layer.hidden, layer.intermediate),
        )


@dataclass(frozen=True)
class Inputs:
    x: torch.Tensor
    """[tokens, hidden]"""
    logits: torch.Tensor
    """[tokens, experts]"""

    @classmethod
    def random(cls, layer: MoeLayer, tokens: int, seed: int, device: str) -> Self:
        """Every expert is as likely as any other."""
        generator = torch.Generator(device).manual_seed(seed)
        x, logits = (
            torch.randn(tokens, size, generator=generator, dtype=layer.dtype, device=device)
            for size in (layer.hidden, layer.experts)
        )
        return cls(x, logits)

    def first(self, tokens: int) -> "Inputs":
        return Inputs(self.x[:tokens], self.logits[:tokens])

    def work(self, layer: MoeLayer) -> Work:
        """Each chosen expert's weights once, tokens and results once."""
        chosen = self.logits.float().topk(layer.top_k, 1).indices
        moved = chosen.unique().numel() * layer.expert_bytes + 2 * self.x.numel() * layer.dtype.itemsize
        return Work(moved, 2 * chosen.numel() * 3 * layer.hidden * layer.intermediate)


@dataclass(frozen=True)
class Provider:
    """One way from tokens and logits to a layer's output."""

    name: str
    call: Callable[[MoeLayer, Weights, Inputs], torch.Tensor]
    promises_bits: bool
    about: Callable[[MoeLayer, Weights, int], str] = lambda *_: ""
    """What is to be known of a case: with which configuration it runs."""


def ours() -> Provider:
    def call(layer: MoeLayer, weights: Weights, inputs: Inputs) -> torch.Tensor:
        chosen = route(inputs.logits, layer.reduction)
        return moe(inputs.x, *chosen, Experts(weights.gate_up, weights.down, layer.reduction))

    return Provider("ours", call, promises_bits=True)


def stock() -> Provider:
    """vLLM's Triton kernel behind vLLM's own routing."""
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    def call(layer: MoeLayer, weights: Weights, inputs: Inputs) -> torch.Tensor:
        chosen, ids, *_ = fused_topk(inputs.x, inputs.logits, layer.top_k, renormalize=True)
        return fused_moe.fused_experts(inputs.x, weights.gate_up, weights.down, chosen, ids)

    def about(layer: MoeLayer, weights: Weights, tokens: int) -> str:
        shapes = weights.gate_up.shape, weights.down.shape
        config: dict[str, Any] = fused_moe.try_get_optimal_moe_config(*shapes, layer.top_k, None, tokens)
        tuned = fused_moe.get_moe_configs(layer.experts, layer.intermediate, None)
        return f"{'tuned' if tuned else 'default'} {'x'.join(map(str, config.values()))} ({', '.join(config)})"

    return Provider("stock", call, promises_bits=False, about=about)
