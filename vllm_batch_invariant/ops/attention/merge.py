"""Merges the partial results of splits, as Flash-Decoding does (Dao et al., pytorch.org/blog/flash-decoding)."""

import torch


def merge_splits(outputs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """One attention result from normalised partial ones, added in ascending order of the split.

    A split whose LSE is -inf has no visible key and weighs exactly 0, so splits that only other rows see change no bit.

    Args:
        outputs: [splits, ..., head_size] fp32 or fp64, finite where the LSE is -inf.
        lses: [splits, ...], natural logarithms of the sums of exponentials.

    Returns:
        [..., head_size]; 0 where every LSE is -inf.
    """
    top = lses.amax(dim=0)
    weights = torch.exp(lses - torch.where(top == -torch.inf, 0, top))
    total = torch.zeros_like(lses[0])
    merged = torch.zeros_like(outputs[0])
    for output, weight in zip(outputs, weights, strict=True):
        total = total + weight
        merged = merged + weight.unsqueeze(-1) * output
    return merged / torch.where(total == 0, 1, total).unsqueeze(-1)
