"""RMSNorm of every query and key head, where a model has them, then their rotary embedding (Su et al. 2021,
arXiv:2104.09864), in one pass.
"""

from typing import NamedTuple

import torch

from ...errors import NotCovered
from ..common.kv_cache import E4M3, CacheSlots, is_aligned, of_tokens
from ..dispatch import module_for
from ..norm.reduction import HEAD_SIZES
from .reduction import NormRotaryReduction

__all__ = ["DTYPES", "HEAD_SIZES", "NormRotaryReduction", "Sections", "norm_rotary"]

DTYPES = (torch.bfloat16, torch.float16)
"""Their products are exact in fp32, so that it does not matter whether a compiler fuses one with the addition."""


class Sections(NamedTuple):
    """By which of a token's three positions each frequency turns: M-RoPE (Qwen2-VL, arXiv:2409.12191)."""

    time: int
    """Frequencies; of all three half of a head together."""
    height: int
    width: int
    interleaved: bool = False
    """Whether frequencies 1, 4, 7 and so on are height's and 2, 5, 8 width's, so many of each, and the others time's;
    else those of one follow those of the other.
    """

    def rows(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """[half of a head], the position of each frequency, made there."""
        frequency = torch.arange(self.time + self.height + self.width, device=device)
        if not self.interleaved:
            return (frequency >= self.time).long() + (frequency >= self.time + self.height)
        is_height = (frequency % 3 == 1) & (frequency < 3 * self.height)
        is_width = (frequency % 3 == 2) & (frequency < 3 * self.width)
        return is_height + 2 * is_width.long()


def norm_rotary(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    eps: float,
    heads: int,
    kv_heads: int,
    cache: CacheSlots | None = None,
    sections: Sections | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries and keys, normalised head by head and turned by the angles of their positions.

    The bits are those of ``rms_norm``, rounded, and then of a rotation in fp32, rounded once, as vLLM's CUDA kernel
    does it: the first half of a head becomes x cos - y sin and the second y cos + x sin ("neox" style).

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_size] bf16 or fp16: a token's queries, keys and values, packed;
            tokens may be apart by any multiple of 8.
        positions: [tokens] int64, each below max_position; with sections [3, tokens].
        query_weight: [head_size] of qkv's dtype; None: there are no norms.
        key_weight: the same for the norm of keys.
        cos_sin_cache: [max_position, head_size] of qkv's dtype: cosines in a row's first half, sines in the second.
        eps: of both norms.
        heads: query heads.
        kv_heads: key heads, and value heads.
        cache: where keys go, and values as they are, of qkv's dtype and device, or as codes in e4m3 by the formula of
            :func:`..kv_cache.write`; None: keys are returned.
        sections: of positions that have three rows.

    Returns:
        Queries [tokens, heads * head_size] and, without a cache, keys [tokens, kv_heads * head_size], contiguous.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
        RuntimeError: a gradient is wanted.
        NotCovered: another dtype or head size, or a device that is no GPU.
    """
    size = cos_sin_cache.shape[-1]
    if qkv.dtype not in DTYPES or size not in HEAD_SIZES:
        raise NotCovered(
            f"norm_rotary of heads of {size} in {qkv.dtype}",
            "the order of additions in rms_norm would be another",
            "call rms_norm, then rotate",
        )
    weights = () if query_weight is None or key_weight is None else (query_weight, key_weight)
    tensors = (qkv, positions, *weights, cos_sin_cache)
    fits = (
        qkv.shape == (positions.shape[-1], (heads + 2 * kv_heads) * size)
        and positions.shape[:-1] == (() if sections is None else (3,))
        and (sections is None or 2 * sum(sections[:3]) == size)
        and positions.dtype == torch.int64
        and (query_weight is None) == (key_weight is None)
        and all(weight.shape == (size,) for weight in weights)
        and cos_sin_cache.dim() == 2
        and all(tensor.dtype == qkv.dtype for tensor in (cos_sin_cache, *weights))
        and len({tensor.device for tensor in tensors}) == 1
    )
    if not fits:
        given = ", ".join(f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}" for tensor in tensors)
        raise ValueError(f"norm_rotary of {heads} and {kv_heads} heads does not take {given}")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise RuntimeError("norm_rotary records no gradient: call it in torch.no_grad()")
    if cache is not None:
        _check_cache(cache, qkv, kv_heads, size)
    module, given = module_for("norm_rotary", qkv.device.type), (qkv, positions, query_weight, key_weight)
    return module.norm_rotary(*given, cos_sin_cache, eps, heads, kv_heads, cache, sections)


def _check_cache(cache: CacheSlots, qkv: torch.Tensor, kv_heads: int, size: int) -> None:
    keys, values, slots = cache.keys, cache.values, cache.slots
    fits = (
        keys.shape[1::2] == (kv_heads, size)
        and keys.shape == values.shape
        and keys.stride() == values.stride()
        and keys.stride(3) == 1
        and is_aligned(keys)
        and is_aligned(values)
        and keys.dtype == values.dtype == (qkv.dtype if cache.k_scale is None else E4M3)
        and cache.scales_fit
        and not of_tokens(cache.k_scale)
        and keys.device == values.device == slots.device == qkv.device
        and slots.dtype == torch.int64
        and slots.dim() == 1
        and len(slots) <= len(qkv)
        and slots.is_contiguous()
    )
    if not fits:
        given = ", ".join(f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}" for tensor in (keys, values, slots))
        raise ValueError(f"norm_rotary of {kv_heads} heads in {qkv.dtype} does not write to {given}")
