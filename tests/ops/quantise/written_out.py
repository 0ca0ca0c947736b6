"""Codes of rows and products of codes in numpy: integers, and float64 that is rounded to fp32 after each operation,
which is that operation in fp32 (of 53 bits at least 2 * 24 + 2 are needed).
"""

import numpy as np
import torch

LEAST = 2.0**-119


def fp32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(np.float64)


def numbers(x: torch.Tensor) -> np.ndarray:
    return x.cpu().double().numpy()


def codes_of(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``quantise`` gives for x [M, K]."""
    codes, scales = [], []
    for row in numbers(x):
        top = np.abs(row).max(initial=0.0)
        if not np.isfinite(top):
            of_row, step = 0 * np.ones_like(row), np.nan
        elif scale is not None:
            step = float(scale)
            with np.errstate(over="ignore"):
                of_row = np.clip(np.rint(fp32(row / step)), -128, 127)
        elif top < LEAST:
            of_row, step = np.zeros_like(row), 0.0
        else:
            step = fp32(top / 127)
            of_row = np.rint(fp32(row * fp32(127 / top)))
        codes.append(of_row.astype(np.int8))
        scales.append(step)
    return torch.from_numpy(np.array(codes).reshape(x.shape)), torch.tensor(scales, dtype=torch.float32)


def product_of(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What ``scaled_linear`` gives for codes [M, K]."""
    sums = codes.cpu().numpy().astype(np.int64) @ weight.cpu().numpy().astype(np.int64).T
    assert np.abs(sums).max(initial=0) < 2**31
    out = fp32(fp32(fp32(sums) * numbers(weight_scale)) * numbers(scale)[:, None])
    if bias is not None:
        out = fp32(out + numbers(bias))
    return torch.from_numpy(out.astype(np.float32)).to(dtype)
