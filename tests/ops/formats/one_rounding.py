"""The nearest number of a dtype, by numpy in fp64, which knows nothing of PyTorch's conversions."""

import numpy as np
import torch

_BITS = {torch.bfloat16: (8, -133, 2.0**128), torch.float16: (11, -24, 65536.0), torch.float32: (24, -149, 2.0**128)}
"""Of a significand, the exponent of the smallest number, and the first number that would need a larger exponent."""


def nearest(exact: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """fp64 numbers rounded once, ties to even."""
    if dtype == torch.float64:
        return torch.from_numpy(exact)
    bits, smallest, too_large = _BITS[dtype]
    with np.errstate(invalid="ignore"):
        _, exponent = np.frexp(exact)
        unit = np.ldexp(1.0, np.maximum(exponent - bits, smallest))
        found = np.rint(exact / unit) * unit
        found = np.where(np.abs(found) >= too_large, np.copysign(np.inf, exact), found)
    return torch.from_numpy(found).to(dtype)


def numbers(tensor: torch.Tensor) -> np.ndarray:
    """fp64."""
    return tensor.double().numpy()
