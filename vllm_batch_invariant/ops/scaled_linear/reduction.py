"""What decides the bits of a product of codes."""

from dataclasses import dataclass

import torch

from ...errors import NotCovered

LARGEST_K = (2**31 - 1) // 128**2
"""Elements of K whose products, of up to 128 * 128, an int32 holds: 131071."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ScaledLinearReduction:
    """An element of the result, of a row's codes q with the scale s and a weight's codes w with the scale t::

        sum = q[0] * w[0] + q[1] * w[1] + ...          # int32: exact, so that no order of additions shows
        out = round(fp32(sum) * t * s + bias)          # from left to right; each operation is rounded to fp32

    ``round`` is the one to ``dtype``. These are integers and operations of IEEE 754, the same on every device. The
    order of the scales is that of vLLM's CUTLASS kernels, which do not round before they add a bias
    (csrc/cutlass_extensions/epilogue/scaled_mm_epilogues_c3x.hpp).

    Attributes:
        dtype: of the result.
        accumulate: the dtype of the sum over K.
    """

    dtype: torch.dtype
    accumulate: torch.dtype = torch.int32

    @classmethod
    def of(cls, k: int, dtype: torch.dtype) -> "ScaledLinearReduction":
        """The reduction of results of a dtype, on every device.

        Raises:
            NotCovered: a K whose sum may overflow, or another dtype than fp32, bf16 and fp16.
        """
        if k > LARGEST_K:
            raise NotCovered(
                f"a product of int8 over {k} elements", f"the sums of {LARGEST_K} fit an int32", "serve another model"
            )
        if dtype not in DTYPES:
            raise NotCovered(f"products of int8 in {dtype}", "they are scaled in fp32", "use fp32, bf16 or fp16")
        return cls(dtype)
