"""Products of FP8 in blocks of 128 x 128, from activations in bf16: who multiplies quantises them first, too."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from vllm_batch_invariant.integration.layers import deep_gemm, fp8
from vllm_batch_invariant.ops.common.kv_cache import LARGEST
from vllm_batch_invariant.ops.quantise.weights import quantise_weight
from vllm_batch_invariant.ops.scaled_linear import E4M3, GROUP
from vllm_batch_invariant.ops.scaled_linear import prepare as prepare_product

GRAPH_SIZES = tuple(1 << power for power in range(10))
"""Of an engine's CUDA graphs, those for which DeepGEMM is tried first."""
Multiply = Callable[[torch.Tensor], torch.Tensor]
"""x [M, K] bf16 to [M, N]."""


@dataclass(frozen=True)
class Weight:
    """Codes [N, K] of e4m3 and their scales in fp32 [N / 128, K / 128], as a checkpoint has them."""

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, matrix: torch.Tensor) -> "Weight":
        """Near a matrix [N, K]."""
        return cls(*quantise_weight(matrix, "block"))

    @classmethod
    def drawn(cls, n: int, k: int, seed: int) -> "Weight":
        """Of random numbers, whose largest of a block becomes the largest code."""
        generator = torch.Generator("cuda").manual_seed(seed)
        blocks = torch.randn(n // GROUP, GROUP, k // GROUP, GROUP, generator=generator, device="cuda") * k**-0.5
        scale = blocks.abs().amax((1, 3)) / LARGEST
        return cls((blocks / scale[:, None, :, None]).reshape(n, k).to(E4M3), scale)

    @property
    def in_float64(self) -> torch.Tensor:
        """[N, K], what codes and scales stand for."""
        n, k = self.codes.shape
        blocks = self.codes.double().view(n // GROUP, GROUP, k // GROUP, GROUP)
        return (blocks * self.scale.double()[:, None, :, None]).view(n, k)

    def clone(self) -> "Weight":
        return Weight(self.codes.clone(), self.scale.clone())


def prepare(weight: Weight, max_m: int) -> None:
    """What an engine of up to so many tokens a step does when it loads a layer: it chooses schedules, and verifies
    them.
    """
    if weight.codes.is_cuda:
        deep_gemm.use()
    prepare_product(weight.codes, torch.bfloat16, in_blocks=True, max_m=max_m, sizes=GRAPH_SIZES)


def ours(weight: Weight) -> Multiply:
    """As a layer of the mode multiplies, with a weight that nobody writes."""
    blocks = fp8.Source("block")
    return partial(
        fp8.multiply, weight=weight.codes, weight_scale=weight.scale, bias=None, source=blocks, weight_is_constant=True
    )


def plain(weight: Weight) -> Multiply:
    """As plain vLLM does where it has FlashInfer and DeepGEMM, after what it makes of the weight when it is loaded."""
    from vllm.config import set_current_vllm_config

    config, kernel = _plain_kernel(*weight.codes.shape)
    own = weight.clone()  # which it may write
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(own.codes, requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(own.scale, requires_grad=False)
    layer.weight_block_size = [GROUP, GROUP]
    with set_current_vllm_config(config):
        kernel.process_weights_after_loading(layer)
    return partial(kernel.apply_weights, layer)


@cache
def _plain_kernel(n: int, k: int) -> tuple[Any, Any]:
    """A configuration of vLLM's, and its kernel for weights of these sizes."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels.linear.scaled_mm.flashinfer import FlashInferFp8DeepGEMMDynamicBlockScaledKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, create_fp8_quant_key

    config = VllmConfig()
    with set_current_vllm_config(config):
        of_layer = FP8ScaledMMLinearLayerConfig(
            weight_quant_key=create_fp8_quant_key(static=True, group_shape=GroupShape(GROUP, GROUP)),
            activation_quant_key=create_fp8_quant_key(static=False, group_shape=GroupShape(1, GROUP)),
            input_dtype=torch.bfloat16,
            out_dtype=torch.bfloat16,
            weight_shape=(n, k),
        )
        return config, FlashInferFp8DeepGEMMDynamicBlockScaledKernel(of_layer)
