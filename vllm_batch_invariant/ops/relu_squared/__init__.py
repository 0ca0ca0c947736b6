"""``max(x, 0) ** 2`` (So et al. 2021, arXiv:2109.08668), element by element: of MLPs without a gate."""

import torch

from ..dispatch import implementation

__all__ = ["relu_squared"]


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Of x [...], multiplied in fp32 and rounded once; NaN stays NaN.

    Args:
        x: [...] fp32, bf16 or fp16.

    Returns:
        [...] of x's dtype.

    Raises:
        NotCovered: a device without an implementation.
    """
    return implementation("relu_squared", x).relu_squared(x)
