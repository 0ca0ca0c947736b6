"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) whose rows have the same bits however many rows there are."""

import torch

from ...errors import NotCovered
from ..dispatch import implementation
from .reduction import GATES, NormReduction

__all__ = ["GATES", "NormReduction", "gated_rms_norm", "rms_norm"]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    variance_size: int | None = None,
    adds_one: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the last dimension, of x or of x + residual.

    Args:
        x: [..., N] fp32, bf16 or fp16.
        weight: [N], or None for none. Its dtype may differ from x's.
        residual: [..., N] of x's dtype, or None.
        variance_size: how many leading elements the mean of squares runs over; all if None.
        adds_one: whether rows are multiplied with 1 more than the weight, in fp32.

    Returns:
        The normalised rows in x's dtype; with a residual, also x + residual rounded to x's dtype.

    Raises:
        ValueError: shapes that do not fit.
        NotCovered: a dtype or device without an implementation.
    """
    length = x.shape[-1] if x.dim() else 0
    fits = (weight is None or weight.shape == (length,)) and (residual is None or residual.shape == x.shape)
    if not fits or length == 0 or not 0 < (variance_size or length) <= length:
        shapes = [None if tensor is None else list(tensor.shape) for tensor in (x, weight, residual)]
        raise ValueError(
            "rms_norm takes x [..., N], weight [N], a residual like x and a variance_size of at most N, "
            f"got {', '.join(map(str, shapes))} and {variance_size}"
        )
    served = implementation("norm", x, weight, residual)
    if adds_one and weight is not None:
        if hasattr(served, "ADDS_ONE"):
            return served.rms_norm(x, weight, eps, residual, variance_size, adds_one)
        weight = weight.float() + 1.0
    return served.rms_norm(x, weight, eps, residual, variance_size)


def gated_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    gate: torch.Tensor,
    activation: str = "silu",
    norm_before_gate: bool = True,
) -> torch.Tensor:
    """RMSNorm over the last dimension, multiplied by a function of a gate: all in fp32, rounded once.

    Args:
        x: [..., N] fp32, bf16 or fp16.
        weight: [N] of any of these, or [groups, N] for x [..., groups, N].
        gate: [..., N] of x's dtype.
        activation: of the gate: "silu" or "sigmoid".
        norm_before_gate: whether what is normalised is multiplied; else it is x that is, before its norm.

    Returns:
        [..., N] of x's dtype.

    Raises:
        ValueError: shapes that do not fit, or another activation.
        NotCovered: a dtype, or a device or an arithmetic without an implementation.
    """
    of_weight = weight.dim() in (1, 2) and weight.shape == x.shape[-weight.dim() :]
    if x.dim() == 0 or x.shape[-1] == 0 or not of_weight or gate.shape != x.shape:
        raise ValueError(
            "gated_rms_norm takes x [..., N], weight [N] or [groups, N] and a gate like x, got "
            f"{', '.join(str(list(tensor.shape)) for tensor in (x, weight, gate))}"
        )
    if activation not in GATES:
        raise ValueError(f"the activation of a gate is one of {', '.join(GATES)}, got {activation!r}")
    served = implementation("norm", x, weight, gate)
    if not hasattr(served, "gated_rms_norm"):
        raise NotCovered(
            f"RMSNorm with a gate on device '{x.device.type}'", "it has no kernel there", "serve the model on a CPU"
        )
    return served.gated_rms_norm(x, weight, eps, gate, activation, norm_before_gate)
