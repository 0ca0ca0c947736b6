"""The short causal convolution on a CPU: taps in numba, what is gathered and scattered by PyTorch."""

import torch
from numba import prange

from ..common.numba_math import fma
from ..common.numba_rows import RowKernel
from .params import ConvStates
from .reduction import ConvReduction


def _taps_kernel(u, earlier, request, index, taps, bias, out):
    """A token a row: of inputs u [tokens, channels], those before a request's first new one [requests, width - 1,
    channels], each token's request and its index there, and taps [width, channels].
    """
    before = earlier.shape[1]
    for token in prange(u.shape[0]):
        y = out[token]
        for channel in range(y.size):
            y[channel] = bias[channel]
        for tap in range(before + 1):
            row = index[token] - before + tap
            source = u[token - before + tap] if row >= 0 else earlier[request[token], before + row]
            w = taps[tap]
            for channel in range(y.size):
                y[channel] = fma(w[channel], source[channel], y[channel])


_taps = RowKernel(_taps_kernel)


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: ConvStates, reduction: ConvReduction
) -> torch.Tensor:
    """See the operation's package."""
    starts, context, pages = (one.long() for one in (states.starts, states.context_lens, states.pages))
    lengths = starts.diff()
    tokens, before = int(lengths.sum()), reduction.width - 1
    out = x.new_empty(len(x), len(weight))
    if tokens == 0:
        return out
    rows = slice(int(starts[0]), int(starts[0]) + tokens)
    parts = x[rows].chunk(3, dim=1) if reduction.gated else (x[rows],)
    u = parts[0] * parts[2] if reduction.gated else parts[0]
    request = torch.repeat_interleave(torch.arange(len(pages)), lengths)
    index = torch.arange(tokens) - (starts[request] - starts[0])
    held, ring = states.states, states.states.shape[1]
    # A select, and no product: a page may hold NaN of another request.
    position = context[:, None] - torch.arange(before, 0, -1)
    there = (position >= 0) & (lengths[:, None] > 0)
    earlier = torch.where(there[:, :, None], held[pages[:, None], position % ring], 0.0).to(reduction.accumulate)
    total = torch.empty(tokens, len(weight), dtype=reduction.accumulate)
    start = total.new_zeros(len(weight)) if bias is None else bias.to(reduction.accumulate)
    _taps(
        total.numel() * reduction.width,
        u.to(reduction.accumulate).contiguous(),
        earlier,
        request,
        index,
        weight.t().to(reduction.accumulate).contiguous(),
        start.contiguous(),
        total,
    )
    out[rows] = total * parts[1] if reduction.gated else total
    kept = index >= lengths[request] - ring
    held[pages[request[kept]], (context[request] + index)[kept] % ring] = u[kept]
    return out
