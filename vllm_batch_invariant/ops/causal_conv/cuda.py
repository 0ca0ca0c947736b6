"""The short causal convolution on a GPU, in Triton."""

from dataclasses import dataclass

import torch
import triton

from ..common.launch import launch
from .params import ConvStates
from .reduction import ConvReduction
from .triton_kernels import causal_conv_kernel, write_states_kernel


@dataclass(frozen=True)
class ConvSchedule:
    """Speed only: a channel's taps are added one after the other wherever a block ends."""

    block: int = 256
    """Channels of a program."""
    tokens: int = 16
    """Tokens of a program. A request with no more has its state written by the same launch."""
    num_warps: int = 4


_SCHEDULE = ConvSchedule()


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: ConvStates,
    reduction: ConvReduction,
    schedule: ConvSchedule = _SCHEDULE,
) -> torch.Tensor:
    """See the operation's package."""
    channels, held = len(weight), states.states
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    if not len(states.pages) or not len(x):
        return out
    batch = held, states.pages, states.starts, states.context_lens
    strides = x.stride(0), *held.stride(), held.shape[1]
    constants = {"CHANNELS": channels, "GATED": reduction.gated}
    constants |= {"BLOCK": schedule.block, "TOKENS": schedule.tokens, "num_warps": schedule.num_warps}
    blocks = triton.cdiv(channels, schedule.block)
    launch(
        causal_conv_kernel,
        (len(states.pages), triton.cdiv(states.longest, schedule.tokens), blocks),
        (x, weight.contiguous(), bias, *batch, out, *strides),
        on=x,
        waits=True,
        WIDTH=reduction.width,
        HAS_BIAS=bias is not None,
        **constants,
    )
    if states.longest > schedule.tokens:
        launch(write_states_kernel, (len(states.pages), blocks), (x, *batch, *strides), on=x, waits=True, **constants)
    return out
