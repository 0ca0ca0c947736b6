"""The gradient of ``silu(gate) * up`` (SwiGLU, Shazeer 2020, arXiv:2002.05202), element by element."""

import torch

from ..dispatch import implementation

__all__ = ["silu_and_mul_backward"]


def silu_and_mul_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Of x [..., 2 * N], gate first, computed in fp32 and rounded once::

        of_gate = grad * up * (sigmoid(gate) + silu(gate) * (1 - sigmoid(gate))),  of_up = grad * silu(gate)

    Args:
        x: [..., 2 * N].
        grad: [..., N], of the result.

    Returns:
        [..., 2 * N] of x's dtype.

    Raises:
        NotCovered: a device without an implementation.
    """
    return implementation("silu_backward", x, grad).silu_and_mul_backward(x, grad)
