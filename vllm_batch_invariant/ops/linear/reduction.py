"""What decides the bits of a matrix product."""

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
class LinearReduction:
    """The reduction of ``x @ weight.T + bias``: a function of the weight alone, never of the rows of x.

    Operands are converted exactly to ``accumulate``, summed over K by one order that K, N and the library fix, the bias
    is added in ``accumulate``, and the result is rounded once to ``dtype``.
    """

    out_features: int
    in_features: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in _ACCUMULATE:
            raise NotCovered(
                f"a product in {self.dtype}", "no reduction is defined for it", "use fp32, bf16, fp16 or fp64"
            )

    @property
    def accumulate(self) -> torch.dtype:
        return _ACCUMULATE[self.dtype]
