"""Rows of numbers for exact arithmetic, and their comparison with the definition."""

import numpy as np
import torch

from vllm_batch_invariant.ops.exact import definition

fp32 = np.float32
DRAW = np.random.default_rng(0)


def assert_same(ours: torch.Tensor, exact: np.ndarray, what: str = "") -> None:
    """The same bits, and NaN for NaN: no operation says which."""
    ours = (ours.float() if ours.is_floating_point() else ours).numpy()
    assert ours.shape == exact.shape
    if ours.dtype != np.float32:
        assert np.array_equal(ours, exact), what
        return
    assert exact.dtype == np.float32
    assert np.array_equal(np.isnan(ours), np.isnan(exact)), what
    different = ~np.isnan(exact) & (ours.view(np.int32) != exact.view(np.int32))
    assert not different.any(), f"{what}: {different.sum()} differ, first {ours[different][0]} {exact[different][0]}"


def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.from_numpy(DRAW.standard_normal(shape, fp32) * fp32(scale)).bfloat16()


def numbers(x: torch.Tensor) -> np.ndarray:
    return x.float().numpy()


def rows_of_all_kinds(length: int) -> np.ndarray:
    """[18, length] fp32: outliers, spikes, zeros, subnormal numbers, the largest and smallest, infinities and NaN; bf16
    numbers where the length is odd.
    """
    x = DRAW.standard_normal((18, length)).astype(fp32)
    x[1, DRAW.integers(0, length, 3)] *= 1000
    x[2] *= np.exp(3 * DRAW.standard_normal(length))
    x[3] = 0
    x[4] *= 1e-39
    x[5] *= 1e-20
    x[6] *= 1e37
    x[7, :] = 1.9921875
    x[8, :] = 2.0 ** DRAW.integers(-130, 120, length)
    x[9, length // 2] = np.inf
    x[10, -1] = np.nan
    x[11] = -0.0
    x[12, 0] = 3.3e38
    x[13] = 0
    x[13, length // 3] = -5
    x[14] = 1e-45
    x[15] = 32639 * 2.0**-14  # the largest integer of two digits, and then what is rounded to one more
    x[16] = 32639.5 * 2.0**-14
    x[17, -1] = 3000
    return definition.bf16(x) if length % 2 else x
