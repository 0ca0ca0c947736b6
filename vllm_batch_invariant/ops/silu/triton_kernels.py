"""What kernels on a GPU that activate share."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def silu_of_pytorch(x):
    """silu of fp32 with the bits of PyTorch's kernel for a GPU: CUDA's expf, and a division that IEEE rounds."""
    # The interpreter has no libdevice.
    grown = tl.exp(-x) if _INTERPRETED else libdevice.exp(-x)
    return tl.div_rn(x, 1.0 + grown)


@triton.jit
def silu_times(gate, up, DTYPE: tl.constexpr):
    """silu(gate), rounded to DTYPE, times up: fp32 of fp32. NaN stays NaN."""
    return (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32) * up
