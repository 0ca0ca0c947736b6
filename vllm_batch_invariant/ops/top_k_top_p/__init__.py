"""top-k and top-p: the candidates that a row may be sampled from, with the logits of the others set to -inf."""

import torch

from ..dispatch import implementation
from .reduction import TopKTopPReduction

__all__ = ["TopKTopPReduction", "top_k_top_p"]


def top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """Keep, in each row, the first ``k`` candidates in the order of :mod:`..ranking`, and of these the fewest first
    ones whose probabilities (a softmax over the first ``k``) add up to ``p`` or more.

    So of equal logits at the cut those with lower indices stay, and what a row keeps follows from the row, its k and
    its p. :class:`TopKTopPReduction` says how probabilities are added.

    Args:
        logits: [rows, length] fp32, bf16 or fp16; changed in place where their rows are contiguous.
        k: [rows] integers, or None. A number below 1, or of length or more, keeps all.
        p: [rows] fp32, or None. 1 or more keeps all; at least one candidate stays.

    Returns:
        The logits.

    Raises:
        NotCovered: a device without an implementation.
    """
    if (k is None and p is None) or not logits.numel():
        return logits
    return implementation("top_k_top_p", logits, k, p).top_k_top_p(logits, k, p)
