"""Layers of experts and tokens that the benchmark of mixtures of experts meets, and who computes them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, Self

import torch

from benchmarks.roofline import Work
from vllm_batch_invariant.ops.formats import MXFP4, Format
from vllm_batch_invariant.ops.moe import Experts, MoeReduction, StoredExperts, moe, route


@dataclass(frozen=True)
class MoeLayer:
    """A layer of a published model, or a worker's part of its columns."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    dtype: torch.dtype = torch.bfloat16
    form: Format | None = None
    """That the experts are stored in; None: as matrices, with SiLU and without biases. Others are gpt-oss's."""

    @property
    def reduction(self) -> MoeReduction:
        activation = "silu" if self.form is None else "swigluoai"
        return MoeReduction(self.experts, self.top_k, self.dtype, activation=activation)

    @property
    def expert_bytes(self) -> int:
        """Of one expert's weights."""
        elements = 3 * self.hidden * self.intermediate
        if self.form is None:
            return elements * self.dtype.itemsize
        stored = self.form.stored(torch.zeros(1, self.hidden, dtype=self.dtype))
        return elements * sum(tensor.nbytes for tensor in stored) // self.hidden


LAYERS = (
    MoeLayer("Qwen3-30B-A3B", 128, 8, 2048, 768),
    MoeLayer("Qwen3-30B-A3B/2", 128, 8, 2048, 384),
    MoeLayer("gpt-oss-20b", 32, 4, 2880, 2880),
    MoeLayer("Qwen3-235B-A22B/4", 128, 8, 4096, 384),
    MoeLayer("Qwen3-235B-A22B/8", 128, 8, 4096, 192),
    MoeLayer("gpt-oss-20b", 32, 4, 2880, 2880, form=MXFP4),
)
"""After the stroke, by how many workers the columns are shared."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
TOKENS_OF_STORED = (1, 8, 16, 64, 256, 2048)


@dataclass(frozen=True, eq=False)
class Weights:
    gate_up: Any
    """[experts, 2 * intermediate, hidden], or as they are stored."""
    down: Any
    """[experts, hidden, intermediate], or as they are stored."""
    gate_up_bias: torch.Tensor | None = None
    """[experts, 2 * intermediate]"""
    down_bias: torch.Tensor | None = None
    """[experts, hidden]"""

    @classmethod
    def random(cls, layer: MoeLayer, device: str) -> Self:
        """Of results that are about as large as the inputs."""
        generator = torch.Generator(device).manual_seed(1)

        def draw(*shape: int) -> torch.Tensor:
            matrix = torch.randn(*shape, generator=generator, dtype=layer.dtype, device=device)
            return matrix.mul_(shape[-1] ** -0.5)

        def drawn(*shape: int) -> torch.Tensor | StoredExperts:
            if layer.form is None:
                return draw(*shape)
            of_experts = zip(*(layer.form.stored(matrix) for matrix in draw(*shape)), strict=True)
            return StoredExperts(layer.form, tuple(torch.stack(parts) for parts in of_experts), layer.dtype)

        matrices = (
            drawn(layer.experts, 2 * layer.intermediate, layer.hidden),
            drawn(layer.experts, layer.hidden, layer.intermediate),
        )
        if layer.form is None:
            return cls(*matrices)
        return cls(*matrices, draw(layer.experts, 2 * layer.intermediate), draw(layer.experts, layer.hidden))

    def unpacked(self) -> Self:
        """With the matrices that the stored experts stand for."""
        return replace(self, gate_up=self.gate_up.matrices(), down=self.down.matrices())


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
    serves: Callable[[MoeLayer], bool] = lambda _: True


def ours() -> Provider:
    def call(layer: MoeLayer, weights: Weights, inputs: Inputs) -> torch.Tensor:
        chosen = route(inputs.logits, layer.reduction)
        biases = weights.gate_up_bias, weights.down_bias
        return moe(inputs.x, *chosen, Experts(weights.gate_up, weights.down, layer.reduction, *biases))

    return Provider("ours", call, promises_bits=True)


def stock() -> Provider:
    """vLLM's Triton kernel behind vLLM's own routing; of experts in MXFP4 that of triton_kernels, with its routing."""
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    mxfp4 = cache(_stock_mxfp4)

    def call(layer: MoeLayer, weights: Weights, inputs: Inputs) -> torch.Tensor:
        if layer.form is not None:
            return mxfp4(weights)(inputs, layer.top_k)
        chosen, ids, *_ = fused_topk(inputs.x, inputs.logits, layer.top_k, renormalize=True)
        return fused_moe.fused_experts(inputs.x, weights.gate_up, weights.down, chosen, ids)

    def about(layer: MoeLayer, weights: Weights, tokens: int) -> str:
        if layer.form is not None:
            return "triton_kernels, as vLLM prepares it"
        shapes = weights.gate_up.shape, weights.down.shape
        config: dict[str, Any] = fused_moe.try_get_optimal_moe_config(*shapes, layer.top_k, None, tokens)
        tuned = fused_moe.get_moe_configs(layer.experts, layer.intermediate, None)
        return f"{'tuned' if tuned else 'default'} {'x'.join(map(str, config.values()))} ({', '.join(config)})"

    def serves(layer: MoeLayer) -> bool:
        return layer.form is None or bool(_triton_kernels())

    return Provider("stock", call, promises_bits=False, about=about, serves=serves)


def _triton_kernels() -> str:
    """The module of triton_kernels that multiplies, which vLLM brings; empty where it cannot be had."""
    from vllm.utils.import_utils import get_triton_kernels_version, has_triton_kernels

    if not has_triton_kernels():
        return ""
    return f"triton_kernels.{'matmul' if get_triton_kernels_version() == '3.8' else 'matmul_ogs'}"


def _stock_mxfp4(weights: Weights) -> Callable[[Inputs, int], torch.Tensor]:
    """What vLLM computes of gpt-oss's experts in MXFP4 on a Hopper, with weights in its layout."""
    from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe import triton_kernel_moe_forward
    from vllm.model_executor.layers.quantization.utils import mxfp4_utils

    matmul = import_module(_triton_kernels())

    def prepared(stored: StoredExperts) -> tuple[Any, Any]:
        codes, flex, scales = mxfp4_utils._swizzle_mxfp4(*stored.tensors)
        scale = mxfp4_utils.mx_scale_kwargs(scales)
        return codes, matmul.PrecisionConfig(**scale, flex_ctx=matmul.FlexCtx(rhs_data=flex))

    (gate_up, of_gate_up), (down, of_down) = prepared(weights.gate_up), prepared(weights.down)
    assert weights.gate_up_bias is not None
    assert weights.down_bias is not None
    biases = {"w1_bias": weights.gate_up_bias.float(), "w2_bias": weights.down_bias.float()}
    config = mxfp4_w4a16_moe_quant_config(of_gate_up, of_down, **biases)
    return lambda inputs, top_k: triton_kernel_moe_forward(
        inputs.x, gate_up, down, inputs.logits, top_k, renormalize=True, quant_config=config
    )
