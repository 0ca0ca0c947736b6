"""Rows of activations as codes of eight bits and a scale a row, each row from itself alone."""

import torch

from ..dispatch import implementation
from .reduction import QuantiseReduction

__all__ = ["QuantiseReduction", "quantise"]


def quantise(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as :class:`QuantiseReduction` says: ``codes * scale`` is near x.

    Args:
        x: [..., K] fp32, bf16 or fp16.
        scale: one fp32 number, finite and above 0, that all rows have (static); None: each row has its own (dynamic).

    Returns:
        The codes [..., K] int8, packed, and the scale of each row [...] fp32, NaN where the row is not finite.

    Raises:
        ValueError: a scale that is not one fp32 number.
        NotCovered: a dtype or device without an implementation.
    """
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise ValueError(f"a static scale is one fp32 number, got {list(scale.shape)} of {scale.dtype}")
    return implementation("quantise", x, scale).quantise(x, scale)
