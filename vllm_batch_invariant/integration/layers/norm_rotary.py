"""Attention of Qwen3 and Qwen3-MoE on a GPU, with the norms of its heads, the rotary embedding and the cache's new keys
and values as one operation.
"""

from typing import Any

import torch

from ...ops.common.kv_cache import E4M3, CacheSlots, is_aligned
from ...ops.norm_rotary import DTYPES, HEAD_SIZES, norm_rotary
from ..reviews import patch_points
from ..side_table import beside
from . import mrope
from .fusion import ForwardFusion

_ROTATING = ("forward", "forward_native", "forward_cuda")
"""Methods that a layer must not have replaced."""


def _fits(layer: Any, parts: tuple[Any, ...], positions: torch.Tensor, hidden_states: torch.Tensor) -> bool:
    """Whether the operation does what the layer's own modules do; of these it is found out once."""
    if positions.dim() != 1 and not mrope.serves(parts[2]):
        return False
    kept = beside(layer)
    if kept.heads_fit is None:
        kept.heads_fit = hidden_states.is_cuda and _as_expected(layer, hidden_states.dtype)
    return kept.heads_fit


def _forward(layer: Any, parts: tuple[Any, ...], positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    q_norm, k_norm, rotary = parts
    qkv, _ = layer.qkv_proj(hidden_states)
    slots = _slots_of_step(layer.attn, qkv.dtype)
    rows, angles = mrope.row_of_angles(rotary, positions)
    q, k = norm_rotary(
        qkv,
        rows,
        q_norm.weight.data,
        k_norm.weight.data,
        angles,
        q_norm.variance_epsilon,
        layer.num_heads,
        layer.num_kv_heads,
        slots,
    )
    v = qkv[:, -layer.kv_size :] if slots is None else None
    output, _ = layer.o_proj(layer.attn(q, k, v))
    return output


HEAD_NORMS = ForwardFusion(
    kinds=(patch_points.QWEN3_ATTENTION, patch_points.QWEN3_MOE_ATTENTION),
    parts=("q_norm", "k_norm", "rotary_emb"),
    apart="its norms and rotary embedding stay apart",
    fits=_fits,
    forward=_forward,
)
"""Its bits are those of the norm and of vLLM's rotary kernel."""


def _slots_of_step(attention: Any, dtype: torch.dtype) -> CacheSlots | None:
    """Where the operation writes a step's keys and values; None where the layer of attention writes them."""
    slots = attention.impl.slots_of_step(attention)
    if slots is None or slots.keys.dtype not in (dtype, E4M3) or not is_aligned(slots.keys):
        return None
    return slots


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
