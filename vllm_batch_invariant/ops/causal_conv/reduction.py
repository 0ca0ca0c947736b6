"""What decides the bits of a short causal convolution."""

from dataclasses import dataclass

import torch

from ...errors import NotCovered

WIDTHS = (2, 3, 4)
"""Taps that the kernels have."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ConvReduction:
    """The reduction of a channel of the token at position p, of its inputs u and the taps w of the weight::

        u[p] = x[p]                                        # gated: round(before[p] * x[p])
        sum = bias                                         # 0 without one
        sum = fma(w[i], u[p - width + 1 + i], sum)         # in fp32, i ascends from 0 to width - 1
        out = round(sum)                                   # gated: round(after[p] * sum), the product rounded to fp32

    Inputs of positions below 0 are zeros. ``round`` is the one to ``dtype``, in which inputs are kept between calls: a
    call that begins at p reads the bits that one over all tokens computes.

    Attributes:
        width: taps of a channel.
        dtype: of operands, states and result.
        gated: whether an input is multiplied before the convolution, and a sum after it.
        accumulate: the dtype of every addition.
    """

    width: int
    dtype: torch.dtype
    gated: bool
    accumulate: torch.dtype = torch.float32

    @classmethod
    def of(cls, width: int, dtype: torch.dtype, gated: bool) -> "ConvReduction":
        """The same on every device.

        Raises:
            NotCovered: another width than 2 to 4, or a dtype that is not fp32, bf16 or fp16.
        """
        if width not in WIDTHS:
            raise NotCovered(
                f"a convolution of {width} taps", f"the kernels have {WIDTHS[0]} to {WIDTHS[-1]}", "serve another model"
            )
        if dtype not in DTYPES:
            raise NotCovered(f"a convolution in {dtype}", "its taps are added in fp32", "use fp32, bf16 or fp16")
        return cls(width, dtype, gated)
