"""``silu(gate) * up`` on a CPU, in numba: both factors in fp32, rounded where the operation's package says so."""

import numpy as np
import torch
from numba import prange

from ..common.numba_bf16 import rounded, widened
from ..common.numba_math import exp32
from ..common.numba_rows import ELEMENTS, RowKernel, array_at
from ..pointwise import elementwise

_ONE = np.float32(1)


def _silu_and_mul_kernel(x_ptr, out_ptr, of_x, rows, length):
    for row in prange(rows):
        gates = array_at(x_ptr + 2 * row * length * of_x.itemsize, length, of_x)
        ups = array_at(x_ptr + (2 * row + 1) * length * of_x.itemsize, length, of_x)
        out = array_at(out_ptr + row * length * of_x.itemsize, length, of_x)
        for i in range(length):
            gate = widened(gates[i])
            silu = widened(rounded(gate / (_ONE + exp32(-gate)), out))
            out[i] = rounded(silu * widened(ups[i]), out)


_silu_and_mul = RowKernel(_silu_and_mul_kernel)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See the operation's package."""
    if x.dtype == torch.float16:
        gate, up = x.chunk(2, dim=-1)
        return elementwise("silu", gate) * up
    x, length = x.contiguous(), x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], length, dtype=x.dtype)
    if out.numel():
        _silu_and_mul(x.numel(), x.data_ptr(), out.data_ptr(), ELEMENTS[x.dtype], out.numel() // length, length)
    return out
