"""What decides the codes of a row."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...errors import NotCovered
from ..common.row_reduction import REDUCTIONS_KEPT

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class QuantiseReduction:
    """The codes of one row x of ``dtype``, a function of that row: every operation is one of IEEE 754 in fp32, so they
    have the same bits on every device.

    With a scale of its own, where m is the row's largest magnitude (exact in any order)::

        scale = m / largest,  code = round(x * (largest / m))            # both divisions and the product rounded

    which is what vLLM's kernel for GPUs computes (csrc/quantization/w8a8/int8/scaled_quant.cu, "dynamic"). A row whose
    m is below ``least`` is a row of zeros: its codes and its scale are 0. With a given scale (vLLM's "static")::

        code = round(x / scale), no less than smallest_static and no more than largest

    ``round`` is to the nearest integer, of two the even one. A row with an infinity or a NaN has codes of 0 and the
    scale NaN, so that whatever is multiplied with it is NaN, too: vLLM's kernel reads a NaN as a zero.

    Attributes:
        dtype: of the row.
        codes: the dtype of the codes.
        largest: code; the least is as far from 0 where a row has a scale of its own.
        smallest_static: code where the scale is given.
        least: below it neither the scale nor its inverse would be a normal fp32 number.
    """

    dtype: torch.dtype
    codes: torch.dtype = torch.int8
    largest: float = 127.0
    smallest_static: float = -128.0
    least: float = 2.0**-119

    @classmethod
    @lru_cache(REDUCTIONS_KEPT)
    def of_dtype(cls, dtype: torch.dtype) -> "QuantiseReduction":
        """The reduction of rows of a dtype, on every device.

        Raises:
            NotCovered: none of fp32, bf16 and fp16.
        """
        if dtype not in DTYPES:
            raise NotCovered(f"rows of {dtype} as int8", "they are quantised in fp32", "use fp32, bf16 or fp16")
        return cls(dtype)
