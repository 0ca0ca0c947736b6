"""Attention of Qwen3 and Qwen3-MoE on a GPU, with the norms of its heads, the rotary embedding and the cache's new keys
and values as one operation.
"""

from collections.abc import Callable
from typing import Any

import torch

from ...ops.common.kv_cache import CacheSlots, is_aligned
from ...ops.norm_rotary import DTYPES, HEAD_SIZES, norm_rotary
from ..reviews import patch_points
from . import mrope

_ROTATING = ("forward", "forward_native", "forward_cuda")
"""Methods that a layer must not have replaced."""

Forward = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def install() -> None:
    """Give the attention layers the operation; where one is not as expected, vLLM's method stays, with the bits of the
    norm and of vLLM's rotary kernel, which are the same.
    """
    for layer in (patch_points.QWEN3_ATTENTION.get(), patch_points.QWEN3_MOE_ATTENTION.get()):
        if patch_points.replaces_forward(layer, "its norms and rotary embedding stay apart"):
            layer.forward = fused(layer.forward)


def fused(apart: Forward) -> Forward:
    """The forward method that has one operation where ``apart`` has three."""

    def forward(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        q_norm, k_norm, rotary = self.q_norm, self.k_norm, self.rotary_emb
        rows_differ = positions.dim() != 1 and not mrope.serves(rotary)
        if rows_differ or not _fits(self, hidden_states) or is_watched(q_norm, k_norm, rotary):
            return apart(self, positions, hidden_states)
        qkv, _ = self.qkv_proj(hidden_states)
        slots = _slots_of_step(self.attn, qkv.dtype)
        q, k = norm_rotary(
            qkv,
            mrope.of_text(positions),
            q_norm.weight.data,
            k_norm.weight.data,
            rotary.cos_sin_cache,
            q_norm.variance_epsilon,
            self.num_heads,
            self.num_kv_heads,
            slots,
        )
        v = qkv[:, -self.kv_size :] if slots is None else None
        output, _ = self.o_proj(self.attn(q, k, v))
        return output

    vars(forward)["fused"] = True
    return forward


def _fits(layer: Any, hidden_states: torch.Tensor) -> bool:
    """Whether the operation does what the layer's own modules do; found out once."""
    fits = layer.__dict__.get("_norm_and_rotary_are_one")
    if fits is None:
        fits = layer._norm_and_rotary_are_one = hidden_states.is_cuda and _as_expected(layer, hidden_states.dtype)
    return fits


def _slots_of_step(attention: Any, dtype: torch.dtype) -> CacheSlots | None:
    """Where the operation writes a step's keys and values; None where the layer of attention writes them."""
    slots = attention.impl.slots_of_step(attention)
    return slots if slots is not None and slots.keys.dtype == dtype and is_aligned(slots.keys) else None


def is_watched(*modules: torch.nn.Module) -> bool:
    """Whether something waits for these modules to be called, as the recorder of this project does."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def _as_expected(layer: Any, dtype: torch.dtype) -> bool:
    rotary, norms = layer.rotary_emb, (layer.q_norm, layer.k_norm)
    norm_class = patch_points.CUSTOM_OP.module().op_registry_oot.get("RMSNorm")
    size = layer.head_dim
    return (
        dtype in DTYPES
        and size in HEAD_SIZES
        and layer.q_size == layer.num_heads * size
        and layer.kv_size == layer.num_kv_heads * size
        and _rotates(rotary)
        and rotary.head_size == rotary.rotary_dim == size
        and rotary.is_neox_style
        and not rotary.use_flashinfer
        and rotary.cos_sin_cache.shape[1:] == (size,)
        and rotary.cos_sin_cache.is_cuda
        and all(type(norm) is norm_class and norm.has_weight and not norm.variance_size_override for norm in norms)
        and norms[0].variance_epsilon == norms[1].variance_epsilon
        and all(tensor.dtype == dtype for tensor in (rotary.cos_sin_cache, *(norm.weight for norm in norms)))
    )


def _rotates(rotary: Any) -> bool:
    """Whether vLLM's plain CUDA kernel would turn the queries and keys."""
    plain = patch_points.ROTARY_EMBEDDING.get()
    kind = type(rotary) if mrope.serves(rotary) else plain
    return (
        isinstance(rotary, kind)
        and all(getattr(type(rotary), name) is getattr(kind, name) for name in _ROTATING)
        and getattr(rotary._forward_method, "__func__", None) is kind.forward_cuda
    )
