"""What decides the codes of a row."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...errors import NotCovered
from ..common.dtypes import E4M3
from ..common.row_reduction import REDUCTIONS_KEPT

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUPS = {torch.int8: (None,), E4M3: (None, 128)}
"""By the dtype of the codes, the groups of a row that may have a scale each; None: the whole row has one."""


@dataclass(frozen=True)
class QuantiseReduction:
    """The codes of one row x of ``dtype``, a function of that row: every operation is one of IEEE 754 in fp32 or of
    integers, so they have the same bits on every device.

    With scales of its own, where m is the largest magnitude (exact in any order) of the row, or of a ``group`` of it::

        scale = m / largest,  code = round(x * (largest / m))            # int8
        scale = m / largest,  code = round(x / scale)                    # e4m3, which ``divides``

    and every operation is rounded. The first is what vLLM's kernel for GPUs computes
    (csrc/quantization/w8a8/int8/scaled_quant.cu, "dynamic"), the second what the definition of a scale says; with the
    inverse about one code of e4m3 in 2000 would be its neighbour. Where m is below ``least`` all x are zeros: codes are
    0 and the scale is ``scale_of_zeros``. With a given scale (vLLM's "static")::

        code = round(x / scale)

    ``round`` is to the nearest code, of two the even one, no less than -``largest`` (with a given scale
    ``smallest_static``) and no more than ``largest``. What has an infinity or a NaN has codes of 0 and the scale NaN,
    so that whatever is multiplied with it is NaN, too: vLLM's kernel for int8 reads a NaN as a zero.

    Attributes:
        dtype: of the row.
        codes: the dtype of the codes.
        largest: code; the least is as far from 0 where a row has a scale of its own.
        smallest_static: code where the scale is given.
        least: below it neither the scale nor its inverse would be a normal fp32 number.
        group: elements that have one scale, counted from the row's start; the last of a row may be fewer. None: all.
        divides: whether numbers are divided by a scale of their own, not multiplied by ``largest / m``.
        scale_of_zeros: the scale where all numbers are.
    """

    dtype: torch.dtype
    codes: torch.dtype = torch.int8
    largest: float = 127.0
    smallest_static: float = -128.0
    least: float = 2.0**-119
    group: int | None = None
    divides: bool = False
    scale_of_zeros: float = 0.0

    @classmethod
    @lru_cache(REDUCTIONS_KEPT)
    def of_dtype(
        cls, dtype: torch.dtype, codes: torch.dtype = torch.int8, group: int | None = None
    ) -> "QuantiseReduction":
        """The reduction of rows of a dtype, on every device.

        Raises:
            NotCovered: rows of none of fp32, bf16 and fp16, or codes or groups that are not in :data:`GROUPS`.
        """
        if codes not in GROUPS:
            raise NotCovered(f"codes of {codes}", "rows are quantised to int8 and e4m3", "use one of them")
        name = "int8" if codes == torch.int8 else "e4m3"
        if dtype not in DTYPES:
            raise NotCovered(f"rows of {dtype} as {name}", "they are quantised in fp32", "use fp32, bf16 or fp16")
        if group not in GROUPS[codes]:
            raise NotCovered(
                f"rows in groups of {group} as {name}",
                f"a scale is that of {' or '.join('a row' if one is None else str(one) for one in GROUPS[codes])}",
                "use one of them",
            )
        if codes == torch.int8:
            return cls(dtype)
        return cls(dtype, codes, 448.0, -448.0, 2.0**-117, group, divides=True, scale_of_zeros=1.0)

    def scales_of(self, length: int) -> int | None:
        """How many scales a row of ``length`` elements has; None: one, which is no dimension of its own."""
        return None if self.group is None else -(-length // self.group)
