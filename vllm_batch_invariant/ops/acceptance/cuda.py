"""Accepted drafts on a GPU, in Triton: one program a request."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.launch import launch
from . import NO_TOKEN

_NO_TOKEN = tl.constexpr(NO_TOKEN)


@dataclass(frozen=True)
class AcceptanceSchedule:
    """How a request is served; tokens are compared, so there is no reduction beside it.

    Attributes:
        padded_width: the power of two that holds a request's rows and one more.
    """

    padded_width: int


def schedule_for(width: int) -> AcceptanceSchedule:
    """The schedule for requests of up to ``width`` rows."""
    return AcceptanceSchedule(triton.next_power_of_2(width + 1))


@triton.jit(do_not_specialize=["width"])
def _accept_kernel(sampled_ptr, inputs_ptr, starts_ptr, tokens_ptr, counts_ptr, width, PADDED_WIDTH: tl.constexpr):
    request = tl.program_id(0)
    start, end = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    offs = tl.arange(0, PADDED_WIDTH)
    rows = start + offs  # [PADDED_WIDTH]
    drafted = (offs > 0) & (rows < end)
    sampled = tl.load(sampled_ptr + rows, mask=rows < end, other=0).to(tl.int64)
    inputs = tl.load(inputs_ptr + rows, mask=drafted, other=0).to(tl.int64)
    before = tl.load(sampled_ptr + rows - 1, mask=drafted, other=0).to(tl.int64)
    stops = (offs > 0) & ~(drafted & (inputs == before))
    count = tl.min(tl.where(stops, offs, PADDED_WIDTH))
    tl.store(tokens_ptr + request * width + offs, tl.where(offs < count, sampled, _NO_TOKEN), mask=offs < width)
    tl.store(counts_ptr + request, count.to(tl.int32))


def accept(
    sampled: torch.Tensor, inputs: torch.Tensor, starts: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    requests = len(starts) - 1
    tokens = torch.empty(requests, width, dtype=torch.int64, device=sampled.device)
    counts = torch.empty(requests, dtype=torch.int32, device=sampled.device)
    if requests:
        args = sampled.contiguous(), inputs.contiguous(), starts.contiguous(), tokens, counts, width
        launch(_accept_kernel, requests, args, on=sampled, PADDED_WIDTH=schedule_for(width).padded_width, num_warps=1)
    return tokens, counts
