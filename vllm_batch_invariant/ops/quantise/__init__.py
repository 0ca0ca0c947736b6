"""Rows of activations as codes of eight bits and their scales, each row from itself alone."""

import torch

from ..dispatch import implementation
from .reduction import E4M3, QuantiseReduction

__all__ = ["E4M3", "QuantiseReduction", "quantise"]


def quantise(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    codes: torch.dtype = torch.int8,
    group: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as :class:`QuantiseReduction` says: ``codes * scale`` is near x.

    Args:
        x: [..., K] fp32, bf16 or fp16.
        scale: fp32 numbers, finite and above 0, of which all rows have the largest (static); None: each row has its own
            (dynamic).
        codes: dtype of the codes, int8 or float8_e4m3fn.
        group: elements of K that have a scale of their own: 128, of e4m3. None: a row has one.

    Returns:
        The codes [..., K], packed, and fp32 scales, of each row [...] or of each of its groups [..., ceil(K / group)].
        A scale is NaN where its row or group is not finite.

    Raises:
        ValueError: a scale without an fp32 number, or that is given with a group.
        NotCovered: a dtype, group or device without an implementation.
    """
    if scale is not None and (not scale.numel() or scale.dtype != torch.float32):
        raise ValueError(f"a static scale is the largest of fp32 numbers, got {list(scale.shape)} of {scale.dtype}")
    if scale is not None and group is not None:
        raise ValueError("a static scale is one of all groups: leave the group out")
    reduction = QuantiseReduction.of_dtype(x.dtype, codes, group)
    return implementation("quantise", x, scale).quantise(x, scale, reduction)
