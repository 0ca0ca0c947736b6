"""Codes that a kernel has written beside the rows that they are of, for who quantises these rows next."""

from typing import NamedTuple

import torch

from .reduction import QuantiseReduction

_ENTRY = "_batch_invariant_codes"


class _Kept(NamedTuple):
    """Codes of all elements of a memory, and what they are."""

    codes: torch.Tensor
    scales: torch.Tensor
    reduction: QuantiseReduction


def keep(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, reduction: QuantiseReduction) -> None:
    """Keep codes with the memory of x, a new packed tensor. Whoever writes to x afterwards has codes of what was.

    Args:
        x: [..., K]
        codes: like x.
        scales: [..., groups], as :func:`..quantise` gives them.
        reduction: of the codes.
    """
    x.untyped_storage().__dict__[_ENTRY] = _Kept(codes, scales, reduction)


def kept(x: torch.Tensor, reduction: QuantiseReduction) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes and scales of all of a memory, in the shape of x; None where none of this reduction are kept."""
    found = x.untyped_storage().__dict__.get(_ENTRY)
    if found is None or found.reduction != reduction or not x.is_contiguous():
        return None
    if x.numel() != found.codes.numel() or x.shape[-1] != found.codes.shape[-1]:
        return None
    return found.codes.view(x.shape), found.scales.view(*x.shape[:-1], -1)
