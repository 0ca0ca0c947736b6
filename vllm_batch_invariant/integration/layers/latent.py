"""Where vLLM's layers of multi-head latent attention call ours, and what is looked at around them."""

from typing import Any

import torch

from ..reviews import patch_points
from . import quantised

NAME = "MLAAttention"
"""Of vLLM's class of such a layer."""
OUTER = "MultiHeadLatentAttentionWrapper"
"""Of what calls it, its norms and its linear layers."""
FUSED = "DeepSeekV2FusedQkvAProjLinear"
"""Of the linear layer in front of it, which has a kernel of vLLM's for few rows on some GPUs."""


def install() -> None:
    """Have such layers attend by ours, in a worker; a vLLM that lacks them has no such model."""
    if patch_points.LATENT_ATTENTION.is_there():
        patch_points.LATENT_ATTENTION.get().forward_impl = forward_impl
        patch_points.LATENT_PREFILL.put(_no_prefill)


class NoPrefill:
    """In the place of what computes keys and values of each head for long chunks."""

    def __init__(self, **dimensions: object) -> None:
        """Of any layer."""


def _no_prefill(_config: Any) -> type[NoPrefill]:
    return NoPrefill


def prepare(model: torch.nn.Module) -> None:
    """Have the layers around it compute as others of their kinds do: a GEMM for up to 16 rows alone would give a token
    other bits beside others, and FlashInfer's rotary embedding is not there in every installation.
    """
    for layer in model.modules():
        if getattr(layer, "_use_min_latency_gemm", False):
            layer._use_min_latency_gemm = False
        if type(layer).__name__ == "DeepseekScalingRotaryEmbedding":
            layer.use_flashinfer = False


def problem_of(layer: Any) -> str | None:
    """Why a layer is refused; None if it is not."""
    if not any(kind.__module__.startswith(f"{__package__}.") for kind in type(layer.impl).__mro__):
        return "its kernels are not ours"
    if layer.use_sparse or layer.indexer is not None:
        return "it attends to keys that an indexer chooses"
    if layer.sliding_window is not None or layer.non_causal_multi_token_decode:
        return "it is more than causal attention"
    method = layer.kv_b_proj.quant_method
    return None if quantised.is_plain(method) else f"its matrices are made by {type(method).__name__}"


def forward_impl(
    layer: Any,
    q: torch.Tensor,
    k_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    attn_metadata: Any,
    output: torch.Tensor,
    output_scale: torch.Tensor | None = None,
    output_block_scale: torch.Tensor | None = None,
    **of_quantised_output: object,  # which is refused
) -> torch.Tensor:
    """Stands for vLLM's method, of a step whose latent vectors are written."""
    return layer.impl.forward(
        layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, output, output_scale, output_block_scale
    )
