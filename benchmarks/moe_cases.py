"""Layers of experts and tokens that the benchmark of mixtures of experts meets, and who computes them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Self

import torch

from benchmarks.roofline import Work
from vllm_batch_invariant.integration.layers import deep_gemm
from vllm_batch_invariant.ops.dispatch import module_for
from vllm_batch_invariant.ops.formats import MXFP4, Format
from vllm_batch_invariant.ops.formats.eight import FP8, FP8_BLOCK, SIDE
from vllm_batch_invariant.ops.formats.fp4 import NVFP4
from vllm_batch_invariant.ops.moe import Experts, MoeReduction, StoredExperts, moe, route
from vllm_batch_invariant.ops.scaled_linear import E4M3, ScaledLinearReduction

_OF_CODES = {FP8_BLOCK: "w8a8-fp8-block", FP8: "w8a8-fp8-channel"}
"""Formats whose activations are quantised, too, and their names."""


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
    """That the experts are stored in; None: as matrices. Those in FP8 are multiplied with activations in FP8."""

    @property
    def is_of_gpt_oss(self) -> bool:
        """Whether it has biases and gpt-oss's activation; others have none, and SiLU."""
        return self.form is MXFP4

    @property
    def quantises(self) -> bool:
        """Whether activations are quantised, too."""
        return self.form in _OF_CODES

    @property
    def format_name(self) -> str:
        """Of what experts are stored in; empty: as matrices."""
        if self.form is None:
            return ""
        return _OF_CODES.get(self.form, self.form.name)

    @property
    def reduction(self) -> MoeReduction:
        products = None
        if self.quantises:
            kind = "cuda" if torch.cuda.is_available() else "cpu"
            mma = module_for("scaled_linear", kind).mma_of(torch.empty(0, device=kind))
            products = ScaledLinearReduction.of(self.hidden, self.dtype, E4M3, self.form is FP8_BLOCK, mma)
        activation = "swigluoai" if self.is_of_gpt_oss else "silu"
        return MoeReduction(self.experts, self.top_k, self.dtype, activation=activation, products=products)

    @property
    def expert_bytes(self) -> int:
        """Of one expert's weights."""
        elements = 3 * self.hidden * self.intermediate
        if self.form is None:
            return elements * self.dtype.itemsize
        stored = self.form.stored(torch.zeros(SIDE, self.hidden, dtype=self.dtype))
        return elements * sum(tensor.nbytes for tensor in stored) // (SIDE * self.hidden)


LAYERS = (
    MoeLayer("Qwen3-30B-A3B", 128, 8, 2048, 768),
    MoeLayer("Qwen3-30B-A3B/2", 128, 8, 2048, 384),
    MoeLayer("gpt-oss-20b", 32, 4, 2880, 2880),
    MoeLayer("Qwen3-235B-A22B/4", 128, 8, 4096, 384),
    MoeLayer("Qwen3-235B-A22B/8", 128, 8, 4096, 192),
    MoeLayer("gpt-oss-20b", 32, 4, 2880, 2880, form=MXFP4),
    MoeLayer("Qwen3-30B-A3B", 128, 8, 2048, 768, form=FP8_BLOCK),
    MoeLayer("Qwen3-30B-A3B", 128, 8, 2048, 768, form=FP8),
    MoeLayer("Qwen3-30B-A3B", 128, 8, 2048, 768, form=NVFP4),
)
"""After the stroke, by how many workers the columns are shared."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
TOKENS_OF_STORED = (1, 8, 16, 64, 256, 2048)
TOKENS_OF_FP8 = (1, 8, 64, 256, 1024, 4096, 16_384)


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
            tensors = tuple(torch.stack(parts) for parts in of_experts)
            if layer.form is NVFP4:
                tensors = *tensors[:2], tensors[2].amax(1, keepdim=True)  # one scale of a matrix, as checkpoints have
            return StoredExperts(layer.form, tensors, layer.dtype)

        matrices = (
            drawn(layer.experts, 2 * layer.intermediate, layer.hidden),
            drawn(layer.experts, layer.hidden, layer.intermediate),
        )
        if not layer.is_of_gpt_oss:
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
    @cache
    def experts_of(layer: MoeLayer, weights: Weights) -> Experts:
        biases, matrices = (weights.gate_up_bias, weights.down_bias), (weights.gate_up, weights.down)
        if layer.form is NVFP4 and matrices[0].device.type == "cuda":  # as an engine does when it loads a layer
            as_read = module_for("moe", "cuda").as_read
            matrices = tuple(as_read(one) if isinstance(one, StoredExperts) else one for one in matrices)
        experts = Experts(*matrices, layer.reduction, *biases)
        if layer.quantises and experts.down.device.type == "cuda":  # as an engine does, too
            deep_gemm.use_for_experts()
            module_for("moe", "cuda").prepare_library(experts, max(TOKENS_OF_FP8))
        return experts

    def call(layer: MoeLayer, weights: Weights, inputs: Inputs) -> torch.Tensor:
        return moe(inputs.x, *route(inputs.logits, layer.reduction), experts_of(layer, weights))

    return Provider("ours", call, promises_bits=True)


def stock() -> Provider:
    """vLLM's Triton kernel behind vLLM's own routing; of experts in MXFP4 that of triton_kernels, with its routing; of
    those in FP8 and NVFP4 the kernel that vLLM chooses.
    """
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    mxfp4, fp8, nvfp4 = cache(_stock_mxfp4), cache(PlainFp8), cache(PlainNvfp4)

    def call(layer: MoeLayer, weights: Weights, inputs: Inputs) -> torch.Tensor:
        if layer.is_of_gpt_oss:
            return mxfp4(weights)(inputs, layer.top_k)
        if layer.quantises:
            return fp8(layer, weights).call(inputs)
        if layer.form is NVFP4:
            return nvfp4(layer, weights).call(inputs)
        chosen, ids, *_ = fused_topk(inputs.x, inputs.logits, layer.top_k, renormalize=True)
        return fused_moe.fused_experts(inputs.x, weights.gate_up, weights.down, chosen, ids)

    def about(layer: MoeLayer, weights: Weights, tokens: int) -> str:
        if layer.is_of_gpt_oss:
            return "triton_kernels, as vLLM prepares it"
        if layer.quantises:
            return fp8(layer, weights).about
        if layer.form is NVFP4:
            return nvfp4(layer, weights).about
        shapes = weights.gate_up.shape, weights.down.shape
        config: dict[str, Any] = fused_moe.try_get_optimal_moe_config(*shapes, layer.top_k, None, tokens)
        tuned = fused_moe.get_moe_configs(layer.experts, layer.intermediate, None)
        return f"{'tuned' if tuned else 'default'} {'x'.join(map(str, config.values()))} ({', '.join(config)})"

    def serves(layer: MoeLayer) -> bool:
        return not layer.is_of_gpt_oss or bool(_triton_kernels())

    return Provider("stock", call, promises_bits=False, about=about, serves=serves)


def stock_deep_gemm() -> Provider:
    """vLLM's DeepGEMM for experts in FP8, which its user may choose where it would choose Triton."""
    from vllm.utils.deep_gemm import is_deep_gemm_supported

    if not is_deep_gemm_supported():
        raise ImportError("vLLM has no DeepGEMM here, or is told not to use it")
    fp8 = cache(partial(PlainFp8, backend="deep_gemm"))
    return Provider(
        "stock-deep-gemm",
        lambda layer, weights, inputs: fp8(layer, weights).call(inputs),
        promises_bits=False,
        about=lambda layer, weights, _: fp8(layer, weights).about,
        serves=lambda layer: layer.form is FP8_BLOCK,
    )


class PlainExperts:
    """What plain vLLM computes of quantised experts, by a kernel that it makes of weights as it loads them.

    Args:
        layer: whose experts they are.
        device: of the weights.
        backend: as its ``--moe-backend``.
    """

    def __init__(self, layer: MoeLayer, device: torch.device, backend: str = "auto") -> None:
        from vllm.model_executor.layers.fused_moe import config as of_vllm
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.v1.worker import workspace

        if not workspace.is_workspace_manager_initialized():
            workspace.init_workspace_manager(device)
        self._layer = layer
        self._made = of_vllm.FusedMoEConfig(
            num_experts=layer.experts,
            experts_per_token=layer.top_k,
            hidden_dim=layer.hidden,
            intermediate_size=layer.intermediate,
            num_local_experts=layer.experts,
            num_logical_experts=layer.experts,
            activation=MoEActivation.SILU,
            device=device,
            routing_method=of_vllm.get_routing_method_type("softmax", layer.top_k, True, None, False),
            moe_parallel_config=of_vllm.FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=layer.dtype,
            moe_backend=backend,
        )
        self._gate_up: torch.Tensor
        self._down: torch.Tensor
        self._kernel: Any = None
        self.about = ""

    def call(self, inputs: Inputs) -> torch.Tensor:
        """The layer, routing included."""
        from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

        weights, ids, *_ = fused_topk(inputs.x, inputs.logits, self._layer.top_k, renormalize=True)
        activation, experts = self._made.activation, self._layer.experts
        return self._kernel.apply(
            inputs.x, self._gate_up, self._down, weights, ids, activation, experts, None, False
        )  # fmt: skip


class PlainFp8(PlainExperts):
    """Of experts in FP8; the weights stay as they are."""

    def __init__(self, layer: MoeLayer, weights: Weights, backend: str = "auto") -> None:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.fused_moe import get_moe_configs
        from vllm.model_executor.layers.fused_moe.oracle import fp8
        from vllm.model_executor.layers.quantization.utils import quant_utils

        super().__init__(layer, weights.gate_up.device, backend)
        in_blocks = layer.form is FP8_BLOCK
        block, of_weights, of_activations = (
            ([SIDE, SIDE], quant_utils.kFp8Static128BlockSym, quant_utils.kFp8Dynamic128Sym)
            if in_blocks
            else (None, quant_utils.kFp8StaticChannelSym, quant_utils.kFp8DynamicTokenSym)
        )
        (gate_up, of_gate_up), (down, of_down) = (
            [tensor.clone() for tensor in stored.tensors] for stored in (weights.gate_up, weights.down)
        )
        with set_current_vllm_config(VllmConfig()):
            chosen, kind = fp8.select_fp8_moe_backend(self._made, of_weights, of_activations, not in_blocks)
            self._gate_up, self._down, *scales = fp8.convert_to_fp8_moe_kernel_format(
                chosen, SimpleNamespace(weight_block_size=block), gate_up, down, of_gate_up, of_down, None, None
            )
            rows = dict.fromkeys(("per_act_token_quant", "per_out_ch_quant"), not in_blocks)
            quantised = fp8.make_fp8_moe_quant_config(chosen, *scales, None, None, block_shape=block, **rows)
            self._kernel = fp8.make_fp8_moe_kernel(quantised, self._made, kind, chosen)
        tuned = get_moe_configs(layer.experts, layer.intermediate, "fp8_w8a8", *(block or ()))
        self.about = f"{kind.__name__}, Triton {'tuned' if tuned else 'with default configurations'}"


class PlainNvfp4(PlainExperts):
    """Of experts in NVFP4 whose checkpoint names activations in FP4, too."""

    def __init__(self, layer: MoeLayer, weights: Weights) -> None:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.oracle import nvfp4
        from vllm.model_executor.layers.quantization.utils import quant_utils

        super().__init__(layer, weights.gate_up.device)
        ones = torch.ones(layer.experts, device=weights.gate_up.device)
        (gate_up, of_gate_up, of_first), (down, of_down, of_second) = (
            [tensor.clone() for tensor in stored.tensors] for stored in (weights.gate_up, weights.down)
        )
        of_layer = SimpleNamespace(
            num_experts=layer.experts,
            hidden_size=layer.hidden,
            intermediate_size_per_partition=layer.intermediate,
            params_dtype=layer.dtype,
        )
        with set_current_vllm_config(VllmConfig()):
            keys = quant_utils.kNvfp4Static, quant_utils.kNvfp4Dynamic
            chosen, kind = nvfp4.select_nvfp4_moe_backend(self._made, *keys)
            first, second = (gate_up, of_gate_up, of_first.flatten(), ones), (down, of_down, of_second.flatten(), ones)
            made = nvfp4.convert_to_nvfp4_moe_kernel_format(chosen, of_layer, *first, *second, is_act_and_mul=True)
            self._gate_up, of_gate_up, of_first, ones_of_first, self._down, of_down, of_second, ones_of_second = made
            scales = of_gate_up, of_down, of_first, of_second, ones_of_first, ones_of_second
            quantised = nvfp4.make_nvfp4_moe_quant_config(chosen, *scales)
            self._kernel = nvfp4.make_nvfp4_moe_kernel(quantised, self._made, kind, chosen)
        self.about = kind.__name__


PROVIDERS: dict[str, Callable[[], Provider]] = {"stock": stock, "stock-deep-gemm": stock_deep_gemm, "ours": ours}
"""By their names."""


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
