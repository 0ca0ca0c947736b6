"""Dtypes with a name here, and that of additions, by that of what is added."""

import torch

from ...errors import NotCovered

E4M3 = torch.float8_e4m3fn
"""vLLM's "fp8" and "fp8_e4m3": four bits of exponent, three of fraction, no infinity."""
_ACCUMULATE = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float64: torch.float64,
}


def accumulate(dtype: torch.dtype, operation: str) -> torch.dtype:
    """In which dtype an operation adds numbers of ``dtype``.

    Raises:
        NotCovered: a dtype that is not fp32, bf16, fp16 or fp64.
    """
    if dtype not in _ACCUMULATE:
        raise NotCovered(
            f"{operation} in {dtype}", "no order of additions is defined for it", "use fp32, bf16, fp16 or fp64"
        )
    return _ACCUMULATE[dtype]
