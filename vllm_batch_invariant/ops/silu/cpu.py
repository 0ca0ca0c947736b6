"""``silu(gate) * up`` on a CPU, in numba: both factors in fp32, rounded where the operation's package says so."""

import numpy as np
import torch
from numba import prange

from ..common.numba_bf16 import as_words, rounded, widened
from ..common.numba_math import exp32
from ..common.numba_rows import RowKernel
from ..pointwise import elementwise

_ONE = np.float32(1)


def _silu_and_mul_kernel(x, out):
    for row in prange(x.shape[0]):
        half = x.shape[1] // 2
        gates, ups, y = x[row, :half], x[row, half:], out[row]
        for i in range(half):
            gate = widened(gates[i])
            silu = widened(rounded(gate / (_ONE + exp32(-gate)), out))
            y[i] = rounded(silu * widened(ups[i]), out)


_silu_and_mul = RowKernel(_silu_and_mul_kernel)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See the operation's package."""
    if x.dtype == torch.float16:
        gate, up = x.chunk(2, dim=-1)
        return elementwise("silu", gate) * up
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
    out = torch.empty(len(rows), x.shape[-1] // 2, dtype=x.dtype)
    _silu_and_mul(x.numel(), as_words(rows), as_words(out))
    return out.reshape(*x.shape[:-1], out.shape[1])
