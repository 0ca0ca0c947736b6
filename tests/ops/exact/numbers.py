"""Operands of exact arithmetic, made by integers alone, so that every machine has the same."""

import numpy as np

from vllm_batch_invariant.ops.exact import definition
from vllm_batch_invariant.ops.exact.definition import Floats, fp32


def normal(seed: int, *shape: int) -> Floats:
    """About standard normal bf16 values: sums of four of the definition's uniform numbers."""
    count = int(np.prod(shape))
    parts = [definition.uniform(seed, part, np.arange(count, dtype=np.uint64)) for part in range(4)]
    return definition.bf16(((parts[0] + parts[1]) + (parts[2] + parts[3]) - fp32(2)) * fp32(1.7320508)).reshape(shape)


def with_outliers(seed: int, rows: int, k: int) -> Floats:
    """Rows [rows, k] of activations as models have them, and those that are hard: a spike, channels that are large,
    zeros, subnormal numbers, the smallest and the largest, infinities and NaN.
    """
    x = normal(seed, rows, k)
    x[1 % rows, k // 2] = 1500
    x[2 % rows, :: max(k // 4, 1)] *= 100
    x[3 % rows] = 0
    x[4 % rows] *= fp32(2.0**-120)
    x[5 % rows] *= fp32(2.0**-60)
    x[6 % rows] *= fp32(2.0**100)
    x[7 % rows, 0], x[8 % rows, -1] = np.inf, np.nan
    x[9 % rows] = np.where(x[9 % rows] > 0, fp32(1), fp32(-1))
    return definition.bf16(x)
