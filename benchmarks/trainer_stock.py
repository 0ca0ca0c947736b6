"""Hugging Face's own attention, in every way in which this machine has it: whom the benchmark of the trainer takes for
stock.
"""

import inspect
from typing import Any

import torch

_VARLEN = "varlen"
"""What transformers calls :func:`_attend`; a name with "flash" in it would have it look for a package."""


def attentions(device: str) -> list[str]:
    """What transformers calls each implementation: SDPA, and on a GPU those of FlashAttention's packages that are
    installed, and PyTorch's own FlashAttention of sequences that lie one after the other.
    """
    from transformers import utils

    found = ["sdpa"]
    if device == "cuda":
        packages = {"flash_attention_2": "is_flash_attn_2_available", "flash_attention_3": "is_flash_attn_3_available"}
        found += [name for name, asks in packages.items() if getattr(utils, asks, lambda: False)()]
        found += [register_varlen()] if _varlen_attn() is not None else []
    return found


def register_varlen() -> str:
    """Tell transformers of PyTorch's FlashAttention; returns the name that it has there."""
    from transformers import AttentionInterface

    AttentionInterface.register(_VARLEN, _attend)  # without a mask: transformers makes none for it
    return _VARLEN


def options(implementation: str, cu_seqlens: torch.Tensor, longest: int) -> dict[str, Any]:
    """What a model is called with beside tokens and positions: SDPA finds the sequences by their positions, and
    FlashAttention need not if it is told.

    Args:
        implementation: as transformers calls it.
        cu_seqlens: [sequences + 1] int32, the first token of each sequence.
        longest: tokens of the longest sequence.
    """
    if implementation == "sdpa":
        return {}
    return {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _varlen_attn() -> Any | None:
    """PyTorch's function; None where it has none, or one that knows no causal window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "window_size" in inspect.signature(varlen_attn).parameters else None


def _attend(
    _: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, __: None, **given: Any
) -> tuple[torch.Tensor, None]:
    """[1, tokens, heads, head_size] of [1, heads, tokens, head_size]; head_size**-0.5 is every scale here."""
    attend, groups = _varlen_attn(), {"enable_gqa": True}
    if "enable_gqa" not in inspect.signature(attend).parameters:
        each = query.shape[1] // key.shape[1]
        key, value, groups = key.repeat_interleave(each, 1), value.repeat_interleave(each, 1), {}
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    where = (given[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
    return attend(*rows, *where, window_size=(-1, 0), **groups)[None], None
