"""Gradients of RMSNorm over rows that are not kept in fp32: that of a row follows from the row alone."""

import torch

from ..dispatch import implementation

__all__ = ["rms_norm_backward"]


def rms_norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    grad: torch.Tensor,
    residual: torch.Tensor | None = None,
    grad_of_sum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``y = s / sqrt(mean(s**2) + eps) * weight`` with ``s = x`` or ``s = x + residual``, computed in fp32::

        n = s / sqrt(mean(s**2) + eps),  g = grad * weight
        of_s = (g - n * mean(g * n)) / sqrt(mean(s**2) + eps) + grad_of_sum
        of_weight = sum over rows of grad * n

    Args:
        x: [..., N] fp32, bf16 or fp16.
        weight: [N].
        eps: added to the mean of squares.
        grad: [..., N], the gradient of y.
        residual: [..., N], or None.
        grad_of_sum: [..., N], the gradient of s from elsewhere, which a norm with a residual has.

    Returns:
        The gradients of x, which the residual shares, rounded once to x's dtype, and of the weight, in fp32.

    Raises:
        NotCovered: a device without an implementation.
    """
    module = implementation("norm_backward", x, weight, grad, residual, grad_of_sum)
    return module.rms_norm_backward(x, weight, eps, grad, residual, grad_of_sum)
