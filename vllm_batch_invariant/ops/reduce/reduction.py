"""What decides the bits of a sum or mean."""

from dataclasses import dataclass

import torch

from ...errors import NotCovered

_ACCUMULATE = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float64: torch.float64,
}


@dataclass(frozen=True)
class SumReduction:
    """The reduction of a row of ``length`` elements: a function of its length, its dtype and the device.

    On a CPU, element i goes to lane i % 64, ascending; the 64 lanes are added by halving (lane i takes lane i + 32,
    then i + 16, ...). On a GPU the lanes are the elements of a block whose size follows the length, and rows are cut
    into chunks of 65536. All in ``accumulate``; a mean divides there; one rounding to ``dtype``.
    """

    length: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in _ACCUMULATE:
            raise NotCovered(
                f"a reduction in {self.dtype}",
                "no order of additions is defined for it",
                "use fp32, bf16, fp16 or fp64",
            )

    @property
    def accumulate(self) -> torch.dtype:
        return _ACCUMULATE[self.dtype]
