"""Attention on a GPU, with the norms of its heads, where a model has them (Qwen3), the rotary embedding and the cache's
new keys and values as one operation.
"""

import logging
from typing import Any

import torch

from ...ops.common.kv_cache import E4M3, CacheSlots, is_aligned
from ...ops.norm_rotary import DTYPES, HEAD_SIZES, norm_rotary
from ..reviews import patch_points
from ..side_table import beside
from . import mrope
from .fusion import ForwardFusion, is_watched

logger = logging.getLogger("vllm.batch_invariant")

_COMPARED, _PAGE = 77, 16
"""Tokens, and those of a page of their cache."""
_AGREED: dict[tuple[Any, ...], bool] = {}
"""What was compared in this process."""
_ROTATING = ("forward", "forward_native", "forward_cuda")
"""Methods that a layer must not have replaced."""


def _fits(layer: Any, parts: tuple[Any, ...], positions: torch.Tensor, hidden_states: torch.Tensor) -> bool:
    """Whether the operation does what the layer's own modules do; of these it is found out once."""
    if positions.dim() != 1 and not mrope.serves(parts[-1]):
        return False
    kept = beside(layer)
    if kept.heads_fit is None:
        if not hidden_states.is_cuda or torch.cuda.is_current_stream_capturing() or is_watched(*parts):
            return False
        if _rotates(parts[-1]):
            parts[-1]._match_cos_sin_cache_dtype(hidden_states)  # as vLLM does before it turns
        kept.heads_fit = _as_expected(layer, parts, hidden_states.dtype) and _agrees(layer, parts, positions.dim())
    return kept.heads_fit


def _agrees(layer: Any, parts: tuple[Any, ...], dims: int) -> bool:
    """Whether the operation has the bits of the layer's own modules on the GPU at hand; compared once for layers with
    such heads, such norms and such a rotary embedding. If not, or if it cannot be compiled there, a warning says so.
    """
    *norms, rotary = parts
    angles, heads = rotary.cos_sin_cache, (*_heads(layer), layer.head_dim)
    key = type(rotary), heads, len(norms), angles.dtype, angles.device, dims, mrope.sections_in(rotary)
    if key not in _AGREED:
        try:
            _AGREED[key] = _compare(parts, *heads, dims)
            why = "gives other bits"
        except Exception as error:
            from ...ops.common.compile_errors import is_of_a_compiler, reason

            if not is_of_a_compiler(error):
                raise
            _AGREED[key], why = False, reason(error)
        if not _AGREED[key]:
            logger.warning("Rotary embeddings of %d and %d heads of %d stay apart: in one kernel, %s.", *heads, why)
    return _AGREED[key]


def _compare(parts: tuple[Any, ...], heads: int, kv_heads: int, size: int, dims: int) -> bool:
    """Of random queries, keys and values, at random positions of ``dims`` dimensions, which go to a cache."""
    *norms, rotary = parts
    angles, sizes = rotary.cos_sin_cache, [heads * size, kv_heads * size, kv_heads * size]
    chance = torch.Generator(angles.device).manual_seed(0)
    drawn = {"generator": chance, "device": angles.device}
    qkv = torch.randn(_COMPARED, sum(sizes), dtype=angles.dtype, **drawn)
    positions = torch.randint(len(angles), (3, _COMPARED), **drawn)
    if dims == 1:
        positions = positions[0]
    elif mrope.sections_in(rotary) is None:
        positions = positions[:1].expand(3, -1)
    query, key, value = (part.contiguous() for part in qkv.split(sizes, dim=-1))
    if norms:
        by_head = zip(norms, (query, key), strict=True)
        query, key = (norm(part.unflatten(1, (-1, size))).flatten(1) for norm, part in by_head)
    query, key = rotary(positions, query, key)
    cache = qkv.new_zeros(-(-_COMPARED // _PAGE), kv_heads, _PAGE, 2 * size)
    slots = torch.randperm(len(cache) * _PAGE, **drawn)[:_COMPARED]
    keys, values = cache.chunk(2, dim=-1)
    turned, _ = _in_one(parts, positions, qkv, (heads, kv_heads), CacheSlots(keys, values, slots))
    written = cache[slots // _PAGE, :, slots % _PAGE]  # [tokens, kv_heads, 2 * size]
    pairs = zip((turned, *(part.flatten(1) for part in written.chunk(2, -1))), (query, key, value), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def _in_one(
    parts: tuple[Any, ...],
    positions: torch.Tensor,
    qkv: torch.Tensor,
    heads: tuple[int, int],
    slots: CacheSlots | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    *norms, rotary = parts
    of_queries, of_keys = [norm.weight.data for norm in norms] or (None, None)
    eps = norms[0].variance_epsilon if norms else 0.0
    positions, sections = mrope.sections_of(rotary, positions)
    return norm_rotary(qkv, positions, of_queries, of_keys, rotary.cos_sin_cache, eps, *heads, slots, sections)


def _forward(layer: Any, parts: tuple[Any, ...], positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    qkv, _ = layer.qkv_proj(hidden_states)
    slots = _slots_of_step(layer.attn, qkv.dtype)
    q, k = _in_one(parts, positions, qkv, _heads(layer), slots)
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
ROTATIONS = ForwardFusion(
    kinds=(
        patch_points.LLAMA_ATTENTION,
        patch_points.QWEN2_ATTENTION,
        patch_points.QWEN2_MOE_ATTENTION,
        patch_points.MIXTRAL_ATTENTION,
    ),
    parts=("rotary_emb",),
    apart="its rotary embedding and its cache stay apart",
    fits=_fits,
    forward=_forward,
)
"""The same of models without norms of heads."""
ROTATIONS_BEHIND_STATES = ForwardFusion(
    kinds=(patch_points.GPT_OSS_ATTENTION,),
    parts=("rotary_emb",),
    apart="its rotary embedding and its cache stay apart",
    fits=lambda layer, parts, hidden_states, positions: _fits(layer, parts, positions, hidden_states),
    forward=lambda layer, parts, hidden_states, positions: _forward(layer, parts, positions, hidden_states),
)
"""The same where a layer is given the states first."""


def _heads(layer: Any) -> tuple[int, int]:
    """Query heads and KV heads of a worker."""
    return layer.q_size // layer.head_dim, layer.kv_size // layer.head_dim


def _slots_of_step(attention: Any, dtype: torch.dtype) -> CacheSlots | None:
    """Where the operation writes a step's keys and values; None where the layer of attention writes them."""
    slots = attention.impl.slots_of_step(attention)
    if slots is None or slots.keys.dtype not in (dtype, E4M3) or not is_aligned(slots.keys):
        return None
    return slots


def _as_expected(layer: Any, parts: tuple[Any, ...], dtype: torch.dtype) -> bool:
    *norms, rotary = parts
    size = layer.head_dim
    return (
        dtype in DTYPES
        and size in HEAD_SIZES
        and layer.q_size % size == layer.kv_size % size == 0
        and _rotates(rotary)
        and rotary.head_size == rotary.rotary_dim == size
        and rotary.is_neox_style
        and not rotary.use_flashinfer
        and rotary.cos_sin_cache.shape[1:] == (size,)
        and rotary.cos_sin_cache.is_cuda
        and rotary.cos_sin_cache.dtype == dtype
        and bool(norms or getattr(layer, "q_norm", None) is None)
        and _norms_as_expected(norms, dtype)
    )


def _norms_as_expected(norms: list[Any], dtype: torch.dtype) -> bool:
    norm_class = patch_points.CUSTOM_OP.module().op_registry_oot.get("RMSNorm")
    return (
        all(type(norm) is norm_class and norm.has_weight and not norm.variance_size_override for norm in norms)
        and len({norm.variance_epsilon for norm in norms}) <= 1
        and all(norm.weight.dtype == dtype for norm in norms)
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
