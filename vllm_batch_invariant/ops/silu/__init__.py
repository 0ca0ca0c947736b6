"""``silu(gate) * up`` (SwiGLU, Shazeer 2020, arXiv:2002.05202), element by element::

    out = round(round(gate / (1 + exp(-gate))) * up)

An expert's first product has the same on a GPU, in its tiles.
"""

import torch

from ..dispatch import implementation

__all__ = ["silu_and_mul"]


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Of x [..., 2 * N], gate first, computed in fp32; rounded to x's dtype before and after it is multiplied.

    Args:
        x: [..., 2 * N] fp32, bf16 or fp16.

    Returns:
        [..., N] of x's dtype.

    Raises:
        NotCovered: a device without an implementation.
    """
    return implementation("silu", x).silu_and_mul(x)
