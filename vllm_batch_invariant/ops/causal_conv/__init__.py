"""The short causal convolution of each channel, whose prefill, decode and verify have the same bits, with the gates of
LFM2 (Liquid AI, huggingface.co/LiquidAI/LFM2-1.2B) around it.
"""

import torch

from ..dispatch import implementation
from .params import ConvStates
from .reduction import ConvReduction

__all__ = ["ConvReduction", "ConvStates", "causal_conv", "reduction_of"]


def reduction_of(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: ConvStates, gated: bool = False
) -> ConvReduction:
    """The reduction of what :func:`causal_conv` is given, with its errors."""
    channels, width = weight.shape
    held = states.states
    requests = len(states.pages)
    fits = (
        x.dim() == 2
        and x.shape[1] == channels * (3 if gated else 1)
        and x.stride(1) == 1
        and (bias is None or bias.shape == (channels,))
        and held.dim() == 3
        and held.shape[2] == channels
        and held.shape[1] >= width - 1
        and states.starts.shape == (requests + 1,)
        and states.context_lens.shape == (requests,)
        and {one.dtype for one in (weight, bias, held) if one is not None} == {x.dtype}
    )
    if not fits:
        given = ", ".join(f"{list(one.shape)} {one.dtype}" for one in (x, weight, bias, held) if one is not None)
        raise ValueError(f"no convolution {'with gates ' * gated}of {given} for {requests} requests")
    return ConvReduction.of(width, x.dtype, gated)


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: ConvStates, gated: bool = False
) -> torch.Tensor:
    """The convolution of the new tokens of some requests, as :class:`ConvReduction` says; their inputs are kept in the
    requests' states.

    Args:
        x: [tokens, channels] fp32, bf16 or fp16; or gated [tokens, 3 * channels], of each token the gates before the
            convolution, those after it, and what is convolved. Rows may be any stride apart. Those of one request
            follow one another; those behind the last request's are not read.
        weight: [channels, width] of x's dtype: the last tap is of the token itself.
        bias: [channels] of x's dtype, or None.
        states: where the requests' earlier inputs are. The new ones are written there.
        gated: whether x has gates.

    Returns:
        [tokens, channels] of x's dtype. Rows of no request are not written. Bits of a row depend on that token and the
        width - 1 before it, the weight and the bias: not on how a request is cut into calls, nor on rows that a later
        call writes anew, as those of drafts that were rejected.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotCovered: a dtype, a width or a device without an implementation.
    """
    reduction = reduction_of(x, weight, bias, states, gated)
    batch = states.pages, states.starts, states.context_lens
    served = implementation("causal_conv", x, weight, bias, states.states, *batch)
    return served.causal_conv(x, weight, bias, states, reduction)
