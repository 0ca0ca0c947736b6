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
    m = lses.amax(dim=0)
    alphas = torch.exp(lses - torch.where(m == -torch.inf, 0, m))
    l = torch.zeros_like(lses[0])
    acc = torch.zeros_like(outputs[0])
    for output, alpha in zip(outputs, alphas, strict=True):
        l = l + alpha
        acc = acc + alpha.unsqueeze(-1) * output
    return acc / torch.where(l == 0, 1, l).unsqueeze(-1)
