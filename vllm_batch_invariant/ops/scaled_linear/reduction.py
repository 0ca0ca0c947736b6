"""What decides the bits of a product of codes."""

from dataclasses import dataclass

import torch

from ...errors import NotCovered
from ..common.dtypes import E4M3

LARGEST_K = (2**31 - 1) // 128**2
"""Elements of K whose products, of up to 128 * 128, an int32 holds: 131071."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUP = 128
"""Elements of K, and rows of a weight, that have one scale in blocks; and elements that a tensor core adds up."""
EXACT = "exact"
"""The sum of a CPU: that of the products, which fp64 holds, rounded to fp32."""
WGMMA = "sm90 wgmma"
"""The sum of a Hopper."""


@dataclass(frozen=True)
class ScaledLinearReduction:
    """An element of the result, of a row's codes q with the scale s and a weight's codes w with the scale t. Of int8::

        sum = q[0] * w[0] + q[1] * w[1] + ...          # int32: exact, so that no order of additions shows
        out = round(fp32(sum) * t * s + bias)          # from left to right; each operation is rounded to fp32

    These are integers and operations of IEEE 754, the same on every device. The order of the scales is that of vLLM's
    CUTLASS kernels, which do not round before they add a bias (csrc/cutlass_extensions/epilogue/
    scaled_mm_epilogues_c3x.hpp).

    Of e4m3, where ``mma`` adds the products of each group g of ``promote`` elements of K from zero, to fp32::

        total = fma(s[g] * t[g], mma(q[g], w[g]), total)    # in_blocks: each group has scales; g ascends from 0
        total = total + mma(q[g], w[g])                     # else
        out = round(total + bias)                           # in_blocks
        out = round(total * s * t + bias)                   # else, from left to right

    The last group is filled up with zeros. A tensor core keeps few bits of a sum of e4m3 (Hopper 13 of its fraction),
    and so 128 elements are as many as it adds; DeepGEMM (github.com/deepseek-ai/DeepGEMM) promotes as often. ``mma`` is
    a part of the reduction: bits of e4m3 belong to a kind of tensor core. ``round`` is the one to ``dtype``.

    Attributes:
        dtype: of the result.
        accumulate: the dtype of the sum over K.
        codes: the dtype of the codes.
        in_blocks: whether scales are those of 128 elements of a row, and of 128 x 128 of the weight.
        promote: elements of K that ``mma`` adds. None: all, exactly.
        mma: what adds products of e4m3: :data:`EXACT`, or one of :data:`..common.nvidia_gpus.FP8_MMA`.
    """

    dtype: torch.dtype
    accumulate: torch.dtype = torch.int32
    codes: torch.dtype = torch.int8
    in_blocks: bool = False
    promote: int | None = None
    mma: str | None = None

    @classmethod
    def of(
        cls,
        k: int,
        dtype: torch.dtype,
        codes: torch.dtype = torch.int8,
        in_blocks: bool = False,
        mma: str | None = None,
    ) -> "ScaledLinearReduction":
        """The reduction of results of a dtype: of int8 on every device, of e4m3 where ``mma`` is.

        Raises:
            NotCovered: a K whose sum may overflow, another dtype than fp32, bf16 and fp16, or e4m3 without an ``mma``.
        """
        is_int8 = codes == torch.int8
        name = "int8" if is_int8 else "e4m3"
        if is_int8 and k > LARGEST_K:
            raise NotCovered(
                f"a product of int8 over {k} elements", f"the sums of {LARGEST_K} fit an int32", "serve another model"
            )
        if dtype not in DTYPES:
            raise NotCovered(f"products of {name} in {dtype}", "they are scaled in fp32", "use fp32, bf16 or fp16")
        if is_int8:
            return cls(dtype)
        if mma is None:
            raise NotCovered(
                "products of e4m3 on this GPU",
                "its tensor cores have none",
                "use a GPU of compute capability 8.9 or above, or serve a checkpoint of which the weights alone are "
                "quantised",
            )
        return cls(dtype, torch.float32, E4M3, in_blocks, GROUP, mma)
