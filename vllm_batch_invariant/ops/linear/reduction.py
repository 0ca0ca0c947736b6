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
    is added in ``accumulate``, and the result is rounded once to ``dtype``. On a GPU that order is one accumulator
    that walks K upwards through the tensor cores, and operands of fp32 are multiplied in ``precision``. That a chain
    has the same bits for every tile and instruction is a measurement (docs/contract.md) which agrees with models of
    the tensor core: Khattak and Mikaitis, "Accurate models of NVIDIA tensor cores" (arXiv:2512.07004).
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
    def precision(self) -> str:
        """How a GPU multiplies fp32: "tf32" where PyTorch's setting allows it (``torch.set_float32_matmul_precision``,
        ``torch.backends.cuda.matmul.fp32_precision``), else "ieee". Other dtypes are multiplied exactly.
        """
        tf32 = self.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        return "tf32" if tf32 else "ieee"

    @property
    def accumulate(self) -> torch.dtype:
        return _ACCUMULATE[self.dtype]
